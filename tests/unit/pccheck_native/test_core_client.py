"""Client and Tenant in one process: what goes in comes out, and who may close what when."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from pccheck_native import (
    LEVEL_DEVICE,
    LEVEL_MEMORY,
    SLOT_OFFERED,
    SLOT_PINNED,
    SNAPSHOTS,
    WORD_ABANDONED,
    WORD_COPIED,
    WORD_REFUSED,
    WORD_REQUESTED,
    Client,
    Event,
    Events,
    NativeError,
    Pool,
    Tenant,
    Volume,
)
from pccheck_wire.ends import Cause
from pccheck_wire.messages import CheckpointState as State
from tests.support.coreloop import BLOCK_BYTES, CHUNK_BYTES, Loop, deadline, make_volume, pack
from tests.support.waiting import until


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with Loop(tmp_path / "v.pcc") as made:
        yield made


def random_extents(*sizes: int) -> list[bytearray]:
    return [bytearray(os.urandom(size)) for size in sizes]


def events_until(loop: Loop, kind: str) -> list[Event]:
    """Everything that was reported up to the first event of that kind."""
    seen: list[Event] = []
    while not any(event.kind == kind for event in seen):
        ready, _, _ = select.select([loop.events.fileno()], [], [], 60)
        assert ready, f"no {kind} after {seen}"
        seen.extend(loop.take())
    return seen


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        (1,),
        (64, 64),
        (CHUNK_BYTES,),
        (CHUNK_BYTES - 1, 1, CHUNK_BYTES + 1),
        (7, 100_000, 3, 300_000, BLOCK_BYTES),
    ],
)
def test_what_goes_in_comes_out(loop: Loop, sizes: tuple[int, ...]) -> None:
    extents, tree = random_extents(*sizes), os.urandom(777)
    assert loop.client.chunk_bytes == CHUNK_BYTES
    sequence = loop.save(1, extents, tree, step=5)
    state = loop.client.state(1)
    assert state is not None
    assert (state.word, state.outcome, state.sequence) == (WORD_COPIED, State.DURABLE, sequence)
    assert state.source_read
    entry = next(e for e in loop.volume.table() if e.sequence == sequence)
    assert (entry.step, entry.incarnation, entry.world_size) == (5, 1, 1)
    assert loop.load(sequence, sizes, len(tree)) == [*extents, tree]
    loop.volume.verify(sequence)


def test_inline_ranges_are_copied_during_the_call(loop: Loop) -> None:
    extents = random_extents(90_000, 5_000)
    wanted = [bytes(extent) for extent in extents]
    loop.submit(1, extents, b"tree", inline=1)
    extents[1][:] = bytes(5_000)
    sequence = loop.begin(1)
    assert loop.client.wait(1, "read", deadline())
    extents[0][:] = bytes(90_000)
    assert loop.client.wait(1, "durable", deadline())
    assert [bytes(m) for m in loop.load(sequence, (90_000, 5_000), 4)] == [*wanted, b"tree"]


def test_more_bytes_than_chunks(tmp_path: Path) -> None:
    sizes = (600_000, 1, 300_000)
    with Loop(tmp_path / "v", chunks=2) as loop:
        for snapshot in range(1, 5):
            extents = random_extents(*sizes)
            sequence = loop.save(snapshot, extents, step=snapshot)
            assert loop.load(sequence, sizes, 4) == [*extents, b"tree"]


def test_cached_chunks_serve_a_load_without_the_disk(loop: Loop) -> None:
    extents = random_extents(100_000)
    sequence = loop.save(1, extents)
    events_until(loop, "durable")
    assert loop.tenant.usage().cached_chunks == 4
    assert loop.load(sequence, (100_000,), 4) == [*extents, b"tree"]
    cached_bytes, read_bytes = loop.client.loaded
    assert cached_bytes > 100_000
    assert read_bytes == 0
    ended = events_until(loop, "load_ended")[-1]
    assert (ended.id, ended.error, ended.sequence) == (sequence, 0, sequence)


def test_snapshots_use_their_entries_again(loop: Loop) -> None:
    extents = random_extents(10)
    for snapshot in range(1, SNAPSHOTS + 3):
        loop.save(snapshot, extents, step=snapshot)
    assert loop.client.state(1) is None
    newest = loop.client.state(SNAPSHOTS + 2)
    assert newest is not None
    assert newest.outcome == State.DURABLE
    steps = sorted(entry.step for entry in loop.volume.table() if entry.sequence)
    assert steps[-1] == SNAPSHOTS + 2


# -- events and usage --------------------------------------------------------------------------


def test_events_tell_the_way_of_a_checkpoint(loop: Loop) -> None:
    sequence = loop.save(1, random_extents(50_000))
    seen = events_until(loop, "durable")
    assert {event.kind for event in seen} == {"copied", "writing", "durable"}
    durable = seen[-1]
    assert (durable.tenant, durable.session, durable.id) == (1, 1, 1)
    assert (durable.sequence, durable.error, durable.error_name) == (sequence, 0, "")
    assert (durable.stage, durable.rehomed) == ("", 0)
    times = durable.times
    assert 0 < times.begin <= times.first_write <= times.written <= times.flushed <= times.durable
    assert times.sealed <= times.flushed
    assert loop.take() == []


def test_memory_is_counted(loop: Loop) -> None:
    usage = loop.tenant.usage()
    assert usage.bytes == 16 * CHUNK_BYTES
    assert loop.pool.usage() == (64 << 20, usage.bytes)
    assert usage.in_flight == 0
    assert loop.tenant.grow(20 * CHUNK_BYTES) >= 20 * CHUNK_BYTES
    with pytest.raises(OSError, match="busy"):
        loop.tenant.release_memory()
    loop.tenant.detach([])
    assert events_until(loop, "detached")[-1].session == 1
    loop.tenant.release_memory()
    assert loop.pool.usage() == (64 << 20, 0)


# -- words -------------------------------------------------------------------------------------


def test_refused_and_abandoned_snapshots(loop: Loop) -> None:
    extents = random_extents(1000)
    loop.submit(1, extents, b"tree")
    state = loop.client.state(1)
    assert state is not None
    assert state.word == WORD_REQUESTED
    assert not loop.client.wait(1, "read", deadline(0))
    until(lambda: loop.tenant.refuse(1, State.SKIPPED))  # once its request has come
    assert not loop.tenant.refuse(1, State.SKIPPED)
    for what in ("read", "host_read", "copied", "durable", "global"):
        assert loop.client.wait(1, what, deadline())
    with pytest.raises(ValueError, match="no snapshot becomes 'written'"):
        loop.client.wait(1, "written", deadline())
    state = loop.client.state(1)
    assert state is not None
    assert (state.word, state.outcome) == (WORD_REFUSED, State.SKIPPED)

    loop.submit(2, extents, b"tree")
    assert loop.client.abandon(2)
    assert not loop.client.abandon(2)
    state = loop.client.state(2)
    assert state is not None
    assert state.word == WORD_ABANDONED
    sequence = loop.save(3, extents)
    assert not loop.client.abandon(3)
    assert [e.sequence for e in loop.volume.table() if e.sequence] == [sequence]


def park(loop: Loop, snapshot: int, extents: list[bytearray]) -> int:
    """Copied, of level memory; its sequence."""
    loop.submit(snapshot, extents, b"tree", level=LEVEL_MEMORY)
    sequence = loop.begin(snapshot)
    assert loop.client.wait(snapshot, "copied", deadline())
    assert [event.kind for event in events_until(loop, "copied")] == ["copied"]
    return sequence


def test_a_parked_checkpoint_is_written_when_told(loop: Loop) -> None:
    extents = random_extents(100_000)
    sequence = park(loop, 1, extents)
    assert (loop.tenant.usage().parked, loop.tenant.usage().full_chunks) == (1, 4)
    assert not loop.client.wait(1, "durable", time.monotonic_ns())
    loop.client.write(1)
    loop.client.write(1)
    wanted = events_until(loop, "wanted")
    assert [(event.kind, event.id, event.sequence) for event in wanted] == [("wanted", 1, sequence)]
    loop.tenant.write(sequence)
    assert [event.kind for event in events_until(loop, "durable")] == ["writing", "durable"]
    loop.tenant.write(sequence)  # nothing of it is parked any more
    assert not loop.tenant.drop(sequence, State.SUPERSEDED)
    assert loop.tenant.usage().parked == 0
    assert loop.load(sequence, (100_000,), 4) == [*extents, b"tree"]


def test_a_dropped_checkpoint_frees_its_chunks(loop: Loop) -> None:
    older, newer = (park(loop, snapshot, random_extents(100_000)) for snapshot in (1, 2))
    assert loop.tenant.drop(older, State.SUPERSEDED, newer, cause=Cause.REPLACED)
    state = loop.client.state(1)
    assert state is not None
    assert (state.outcome, state.newer, state.cause) == (State.SUPERSEDED, newer, Cause.REPLACED)
    assert (loop.tenant.usage().parked, loop.tenant.usage().full_chunks) == (1, 4)
    assert not any(entry.sequence for entry in loop.volume.table())


def test_what_is_being_copied_is_not_written(loop: Loop) -> None:
    extents = random_extents(100_000)
    loop.submit(1, extents, b"tree", level=LEVEL_MEMORY, provisional=True)
    sequence = loop.begin(1)
    with pytest.raises(OSError, match="busy"):
        loop.tenant.write(sequence)
    assert not loop.tenant.drop(sequence, State.SUPERSEDED)
    loop.client.confirm(1)
    assert loop.client.wait(1, "copied", deadline())
    loop.tenant.write(sequence)
    assert loop.client.wait(1, "durable", deadline())


def test_gpu_memory_is_refused_as_a_level(loop: Loop) -> None:
    loop.submit(1, random_extents(10), b"tree", level=LEVEL_DEVICE)
    assert loop.client.wait(1, "copied", deadline())
    state = loop.client.state(1)
    assert state is not None
    assert (state.word, state.cause, state.argument) == (WORD_REFUSED, Cause.BAD_LEVEL, 2)


def test_set_outcome_reaches_the_trainer(loop: Loop) -> None:
    sequence = loop.save(1, random_extents(10))
    loop.tenant.set_outcome(1, State.GLOBAL, sequence)
    state = loop.client.state(1)
    assert state is not None
    assert state.outcome == State.GLOBAL
    assert state.newer == 0
    loop.tenant.set_outcome(1, State.SUPERSEDED, sequence, newer=sequence + 5)
    state = loop.client.state(1)
    assert state is not None
    assert (state.sequence, state.newer) == (sequence, sequence + 5)
    with pytest.raises(ValueError, match="outcome"):
        loop.tenant.set_outcome(1, 10)
    with pytest.raises(ValueError, match="outcome"):
        loop.tenant.refuse(1, 255)


def test_the_queue_reports_what_it_does(loop: Loop) -> None:
    asked = {
        "step": 7, "base": 1, "turn": 2, "descents": 3, "row": 4, "interval": 5, "division": 2**63,
    }  # fmt: skip
    loop.tenant.policy(numbers=True, above=40)
    loop.submit(1, random_extents(10), b"tree", **asked)
    assert loop.client.wait(1, "durable", deadline())
    reported: list[Event] = []
    until(lambda: reported.extend(loop.events.take()) or reported[-1].kind == "durable")
    requested, begun = reported[:2]
    assert (requested.kind, requested.error, requested.id) == ("requested", 0, 1)
    assert requested.request is not None
    assert asked.items() <= requested.request._asdict().items()
    assert (requested.request.payload_bytes, requested.request.tree_offset) == (68, 64)
    assert (begun.kind, begun.sequence, begun.request) == ("begun", 41, None)


def test_one_of_several_ranks_is_numbered_while_it_is_copied(loop: Loop) -> None:
    loop.tenant.policy()
    loop.submit(1, random_extents(10), b"tree")
    assert loop.client.wait(1, "read", deadline())
    assert not loop.client.wait(1, "copied", deadline(0))
    loop.tenant.number(1, 9, 4, 1, SLOT_OFFERED, (3, 1, 2))
    assert loop.client.wait(1, "durable", deadline())
    (entry,) = (entry for entry in loop.volume.table() if entry.sequence)
    assert (entry.incarnation, entry.sequence, entry.flags) == (4, 9, SLOT_OFFERED)
    assert loop.volume.name(9) == (3, 1, 2)
    loop.submit(2, random_extents(10), b"tree")
    until(lambda: any(e.id == 2 and e.kind == "begun" for e in loop.events.take()))
    for sequence, marks in (9, SLOT_OFFERED), (10, SLOT_PINNED):
        with pytest.raises(OSError, match="Invalid"):
            loop.tenant.number(2, sequence, 4, 1, marks)
    assert loop.tenant.refuse(2, State.FAILED)


def test_no_save_begins_in_a_lost_file_until_the_loop_decides(loop: Loop) -> None:
    loop.tenant.policy(numbers=True)
    loop.path.unlink()
    reported: list[Event] = []

    def of(snapshot: int, kinds: tuple[str, ...]) -> list[str]:
        reported.extend(loop.events.take())
        return [e.error_name for e in reported if e.id == snapshot and e.kind in kinds]

    loop.submit(1, random_extents(10), b"tree")
    until(lambda: of(1, ("failed",)) == ["REMOVED"])
    loop.submit(2, random_extents(10), b"tree")
    until(lambda: of(2, ("failed", "waits")))
    assert of(2, ("failed", "waits")) == ["ENODEV"]


def test_what_waits_or_cannot_be_is_refused(loop: Loop) -> None:
    loop.submit(1, random_extents(2 << 20), b"tree")
    loop.submit(2, random_extents(10), b"tree", map=1)
    loop.tenant.policy(numbers=True)
    refused: list[tuple[int, str]] = []

    def both() -> bool:
        events = loop.events.take()
        refused.extend((e.id, e.error_name) for e in events if e.kind == "refused")
        return len(refused) == 2

    until(both)
    assert refused == [(1, "TOO_LARGE"), (2, "BAD_HANDLE")]


def test_ranges_are_checked(loop: Loop) -> None:
    loop.client.request(1)
    for ranges in (b"1234", pack([(0, 0, 5)]), pack([(4096, 64, 5), (4096, 0, 5)])):
        with pytest.raises(ValueError, match="ranges"):
            loop.client.submit(1, ranges, b"", b"tree", 64)
        with pytest.raises(ValueError, match="ranges"):
            loop.client.submit(1, b"", ranges, b"tree", 64)
        with pytest.raises(ValueError, match="ranges"):
            loop.client.load_start(1, ranges)


# -- ends --------------------------------------------------------------------------------------


def test_a_dead_daemon_ends_every_wait(loop: Loop) -> None:
    loop.submit(1, random_extents(1000), b"tree")
    loop.client.load_start(7, b"")
    assert loop.client.alive()
    loop.tenant.close()
    loop.far.close()
    with contextlib.suppress(ConnectionResetError):  # or the daemon's last word is seen first
        assert loop.client.wait(1, "durable", deadline())
    with pytest.raises(ConnectionResetError):
        loop.client.load_wait(7, deadline())
    assert not loop.client.alive()


def test_a_load_that_nobody_serves_times_out(loop: Loop) -> None:
    loop.client.load_start(7, b"")
    with pytest.raises(TimeoutError):
        loop.client.load_wait(7, deadline(0.01))


def test_a_page_that_is_none_is_refused(tmp_path: Path) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far, (tmp_path / "page").open("w+b") as page:
        page.write(bytes(1 << 20))
        page.flush()
        with pytest.raises((NativeError, OSError)):
            Client(near.fileno(), page.fileno())
        with pytest.raises((NativeError, OSError)):
            Client(near.fileno(), near.fileno())


def test_close_ends_the_waits_of_other_threads(loop: Loop) -> None:
    loop.submit(1, random_extents(1000), b"tree")
    raised: list[Exception] = []

    def wait() -> None:
        try:
            loop.client.wait(1, "durable", deadline())
        except ValueError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    loop.client.close()
    waiter.join(30)
    assert not waiter.is_alive()
    assert "closed" in str(raised[0])
    with pytest.raises(ValueError, match="this Client is closed"):
        loop.client.state(1)
    loop.client.close()


def test_a_signal_is_served_during_a_wait(loop: Loop) -> None:
    loop.submit(1, random_extents(1000), b"tree")

    def handler(_number: int, _frame: FrameType | None) -> None:
        loop.client.close()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(ValueError, match="closed during the call"):
            loop.client.wait(1, "durable", time.monotonic_ns() + 60 * 10**9)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_borrowed_objects_outlive_their_borrower(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "v")
    extents = random_extents(1000)
    loop.volume.close()
    loop.pool.close()
    loop.events.close()
    with pytest.raises(ValueError, match="this Pool is closed"):
        loop.pool.usage()
    loop.submit(1, extents, b"tree")
    loop.begin(1)
    assert loop.client.wait(1, "durable", deadline())
    with pytest.raises(NativeError) as caught:
        Volume(loop.path, writable=True)
    assert caught.value.code_name == "LOCKED"
    loop.client.close()
    loop.tenant.close()
    reopened = Volume(loop.path, writable=True)
    assert [e.step for e in reopened.table() if e.sequence] == [1]
    reopened.close()


def test_unbind_lets_go(tmp_path: Path) -> None:
    with Loop(tmp_path / "v") as loop:
        loop.save(1, random_extents(100))
        other = Volume(make_volume(tmp_path / "w"), writable=True)
        loop.tenant.bind(other)
        events_until(loop, "durable")
        loop.tenant.unbind(loop.volume)
        loop.volume.close()
        Volume(loop.path, writable=True).close()
        loop.save(2, random_extents(100), step=2)
        assert [e.step for e in other.table() if e.sequence] == [2]
        with pytest.raises(ValueError, match="this Volume is closed"):
            loop.tenant.bind(loop.volume)
        other.close()


def test_everything_may_be_dropped_at_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        loop = Loop(tmp_path / name)
        loop.save(1, random_extents(1000))
        loop.near.close()
        loop.far.close()
        del loop
        gc.collect()
        Volume(tmp_path / name, writable=True).close()


def test_wrong_types_are_refused(tmp_path: Path) -> None:
    pool, events = Pool(1 << 20), Events()
    numbers = {
        "id": 1, "chunk_bytes": CHUNK_BYTES, "block_bytes": BLOCK_BYTES, "chunk_capacity": 8,
        "lanes": 1, "writers": 1,
    }  # fmt: skip
    with pytest.raises(TypeError):
        Tenant(events, pool, **numbers)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="writers"):
        Tenant(pool, events, id=1, chunk_bytes=1, block_bytes=1, chunk_capacity=1, lanes=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="gpus"):
        Tenant(pool, events, **numbers, gpus=pool)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="Invalid argument"):
        Tenant(pool, events, **{**numbers, "chunk_bytes": 1000})
    channel = Tenant(pool, events, **numbers)
    with pytest.raises(TypeError):
        channel.bind(pool)  # type: ignore[arg-type]
    pool.close()
    with pytest.raises(ValueError, match="this Pool is closed"):
        Tenant(pool, events, **numbers)
    channel.close()
    events.close()
