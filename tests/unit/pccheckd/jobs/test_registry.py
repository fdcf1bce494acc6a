"""Which jobs stay loaded, and what of a volume is kept."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import functools
import gc
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pccheck_native import NativeError, Volume, layout
from pccheck_wire import codec
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import RefusedError, StoreLockedError
from pccheck_wire.messages import Drop, Failure, Hello, Reply, Report, Request, Role, Verify
from pccheckd.config.options import Config
from pccheckd.control import verification
from pccheckd.control.handlers import Handlers
from pccheckd.core.engine import Engine, Shape
from pccheckd.core.port import Owner, Port
from pccheckd.front.endpoints import ControlServer
from pccheckd.jobs import registry as registry_module
from pccheckd.jobs import sessions as sessions_module
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Peer, Session, Sessions
from pccheckd.tenancy.checkpoint import Checkpoint
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import DAMAGED, PROTECTED, Key
from pccheckd.upkeep import expiry
from tests.support.coreloop import BLOCK_BYTES, Loop

KEY = Key(7, "job", 0)


@pytest.fixture
async def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.setattr(registry_module, "IDLE_MAX", 0)
    path = layout.volume_path(tmp_path, KEY.uid, KEY.job, KEY.rank)
    path.parent.mkdir(parents=True)
    with Loop(path) as loop:
        for step in (1, 2, 3):
            loop.save(step, [bytearray(100)], step=step)
    config = Config(
        storage=tmp_path, socket=tmp_path / "s", dram_bytes=1 << 24, chunk_bytes=1 << 16,
        block_bytes=BLOCK_BYTES, allow_any_filesystem=True,
    )  # fmt: skip

    engine = Engine(config)
    engine.start()
    yield Registry(engine)
    engine.stop()


def flags(tmp_path: Path) -> dict[int, int]:
    path = layout.volume_path(tmp_path, KEY.uid, KEY.job, KEY.rank)
    volume = Volume(path, writable=False, allow_buffered=True)
    try:
        return {entry.sequence: entry.flags for entry in volume.table() if entry.sequence}
    finally:
        volume.close()


def owner(*, world_size: int = 1, fresh: bool = False) -> Owner:
    return Owner(
        session=1, pid=1, world_size=world_size, local_world_size=world_size,
        fresh=fresh, process=bytes([world_size]) * 16, solo=False, restored=None,
        on_event=lambda event: None,
    )  # fmt: skip


@asynccontextmanager
async def trainer_of(tenant: Tenant) -> AsyncIterator[None]:
    """Meanwhile a trainer is attached."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        os.close(await tenant.attach(owner(), far.fileno()))
        yield
        await tenant.detach(1)


async def test_what_a_reader_may_read_stays_loaded(registry: Registry) -> None:
    _, tenant = await registry.existing(KEY)
    tenant.add_reader()
    await registry.trim()
    assert not tenant.closed and tenant.volumes.checkpoints()
    tenant.add_reader(-1)
    await registry.trim()
    assert tenant.closed


async def test_a_job_that_no_trainer_has_used_for_a_day_is_closed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "IDLE_MAX", 64)
    await registry.tenant(KEY)
    await registry.trim()
    assert len(registry.jobs) == 1
    monkeypatch.setattr(registry_module, "LOADED_S_MAX", 0.0)
    await registry.trim()
    assert not registry.jobs


async def test_nobody_attaches_to_a_rank_whose_job_is_being_dropped(registry: Registry) -> None:
    """All ranks refuse trainers before the first one is closed: while one rank closes, a trainer
    might attach to another."""
    _, first = await registry.tenant(KEY)
    _, second = await registry.tenant(Key(KEY.uid, KEY.job, 1))
    closing = first.close

    async def close() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, pytest.raises(RefusedError, match="unloaded"):
            await second.attach(owner(), ours.fileno())
        await closing()

    first.close = close  # type: ignore[method-assign]
    async with registry.unloaded(KEY.uid, KEY.job):
        assert second.owner is None


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_hang_up_that_is_on_its_way_is_waited_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    """A trainer that has just closed is still connected when the request to drop comes; and from
    when its hang-up is known on, until it is drained, however long that takes."""
    monkeypatch.setattr(registry_module, "STEP_S", 0.001)
    monkeypatch.setattr(registry_module, "GRACE_S", 0.005)
    _, tenant = await registry.existing(KEY)
    tenant.owner = owner()
    ask = functools.partial(expiry.drop, registry, KEY.uid)
    dropping = asyncio.create_task(ask(Drop(KEY.job, dry_run=dry_run)))
    tenant.leaving = True
    for _ in range(20):  # more often than it looks for a hang-up
        await asyncio.sleep(0.001)
    assert not dropping.done()
    tenant.owner, tenant.leaving = None, False
    assert (await dropping)["dropped"] is not dry_run


async def test_a_dry_run_closes_nothing(registry: Registry) -> None:
    """What a job has in DRAM is worth a fast recovery."""
    _, tenant = await registry.existing(KEY)
    ask = functools.partial(expiry.drop, registry, KEY.uid)
    document = await ask(Drop(KEY.job, dry_run=True))
    assert document["dropped"] is False
    assert registry.loaded(KEY) is tenant and not tenant.closed
    tenant.add_reader()
    with pytest.raises(RefusedError, match="in use"):
        await ask(Drop(KEY.job, dry_run=True))
    tenant.add_reader(-1)
    assert (await ask(Drop(KEY.job)))["dropped"] is True
    assert tenant.closed and not layout.list_volumes(registry.config.storage)


async def test_a_job_that_is_closed_while_it_is_looked_up_is_loaded_again(
    registry: Registry,
) -> None:
    await registry.job(KEY.uid, KEY.job)
    async with registry._lock(KEY.uid):
        found = asyncio.create_task(registry.tenant(KEY))
        await asyncio.sleep(0)
        trimmed = asyncio.create_task(registry.trim())
        await asyncio.sleep(0)
    await asyncio.gather(found, trimmed)
    _, tenant = await registry.tenant(KEY)
    assert not tenant.closed and tenant.volumes.open


async def test_a_second_pin_of_a_killed_daemon_goes_with_the_next(
    registry: Registry, tmp_path: Path
) -> None:
    _, tenant = await registry.tenant(KEY)
    newest, before = [found.sequence for found in tenant.volumes.checkpoints()][:2]
    keeper = tenant.retention
    for sequence in (newest, before):
        assert await keeper.flag(sequence, set_=PROTECTED, now=True)
    assert keeper.flagged == {newest, before}
    await keeper.protect({newest}, unrestored=True)
    assert await keeper.flag(newest, set_=DAMAGED, now=True)
    assert flags(tmp_path) == {newest: PROTECTED | DAMAGED, before: 0}
    assert (keeper.protected, keeper.flagged, keeper.unrestored) == ({newest}, {newest}, True)
    assert tenant.protected_step() == 3
    keeper.restored_to(before)
    assert keeper.unrestored  # that was not what is kept for it
    keeper.restored_to(newest)
    assert not keeper.unrestored and tenant.protected_step() is None
    await keeper.release()
    assert await keeper.flag(newest, clear=DAMAGED, now=True)
    assert flags(tmp_path) == {newest: 0, before: 0} and not keeper.protected
    await tenant.close()


async def test_a_trainer_that_has_not_restored_overwrites_nothing_of_before(
    registry: Registry,
) -> None:
    job, tenant = await registry.tenant(KEY)
    newest, before = [found.sequence for found in tenant.volumes.checkpoints()][:2]
    same = dataclasses.replace(owner(), process=bytes(16))
    job.join(KEY.rank, owner(), launch="", was=0)
    job.join(KEY.rank, same, launch="", was=1)
    for trainer, wanted in (
        (owner(), {newest}),
        (owner(fresh=True), set()),
        (dataclasses.replace(owner(), restored=before), {newest}),
        (dataclasses.replace(owner(), restored=newest), set()),
        (same, set()),  # its own run made them
    ):
        await tenant.protect(trainer)
        assert tenant.retention.protected == tenant.retention.flagged == wanted
        unread = trainer.restored is None and not trainer.fresh
        assert tenant.retention.unrestored is (unread or bool(wanted))
        assert tenant._needs(tenant.volumes.open[0]) is bool(wanted)
    await tenant.close()


async def test_what_becomes_durable_while_a_trainer_attaches_is_kept_for_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer before was killed, and its last checkpoint ended in that moment."""
    job, tenant = await registry.tenant(KEY)
    volume = tenant.volumes.open[0]
    newest, *before = volume.checkpoints
    volume.checkpoints = before  # the newest is durable, and not read yet
    last = SimpleNamespace(session=9, sequence=newest.sequence)
    attach = Port.attach

    async def ends_meanwhile(port: Port, *about: int) -> int:
        await tenant._after_durable(last)  # type: ignore[arg-type]
        return await attach(port, *about)

    monkeypatch.setattr(Port, "attach", ends_meanwhile)
    trainer = dataclasses.replace(owner(), kernel_pid=os.getpid())
    job.join(KEY.rank, trainer, launch="", was=0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        os.close(await tenant.attach(trainer, ours.fileno()))
        assert tenant.retention.flagged == {newest.sequence}
        await tenant.detach(trainer.session)
    await tenant.close()


async def test_a_rank_alone_needs_no_common_step(registry: Registry) -> None:
    """What the ranks of a group still need must not go with a volume that was outgrown."""
    job, tenant = await registry.tenant(KEY)
    sequences = [found.sequence for found in tenant.volumes.checkpoints()]
    newest = sequences[0]
    job.join(KEY.rank, owner(world_size=2), launch="a", was=0)
    job.settle()
    assert (job.members.world_size, job.newest_common) == (2, newest)
    assert [job.needs(one) for one in (newest + 1, *sequences)] == [True, True, True]
    assert not job.needs(sequences[-1] - 1)
    assert tenant._needs(tenant.volumes.open[0])
    job.left(KEY.rank, owner(world_size=2).process)
    job.join(KEY.rank, owner(), launch="b", was=0)
    assert job.members.world_size == 1 and not any(map(job.needs, sequences))
    assert not tenant._needs(tenant.volumes.open[0])
    await tenant.close()


async def test_a_stopped_volume_is_not_reopened_under_a_reader(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccheckd.tenancy.tenant.UNBIND_LIMIT_S", 0.0)
    _, tenant = await registry.tenant(KEY)
    await tenant._open_port()
    tenant.stopped = True
    tenant.begin_read()
    with pytest.raises(RefusedError, match="still being read"):
        await tenant.reopen()
    assert tenant.volumes.checkpoints()[0].step == 3
    tenant.end_read()
    await tenant.reopen()
    await tenant.volumes.refresh()
    assert tenant.volumes.checkpoints()[0].step == 3
    await tenant.close()


async def test_a_stopped_volume_is_not_reopened_under_a_reader_that_comes_meanwhile(
    registry: Registry,
) -> None:
    """While the writes in progress are waited for."""
    _, tenant = await registry.tenant(KEY)
    await tenant._open_port()
    assert tenant.port is not None
    unbind, old = tenant.port.unbind, tenant.volumes.open[0].volume
    reading = [tenant.read()]

    async def unbound(*which: object) -> bool:
        if reading:
            began = reading.pop()
            began.__enter__()
            asyncio.get_running_loop().call_later(0.05, lambda: ended(began))
        return await unbind(*which)  # type: ignore[arg-type]

    def ended(began: object) -> None:
        assert not closing(old)
        began.__exit__(None, None, None)  # type: ignore[attr-defined]

    tenant.port.unbind = unbound  # type: ignore[method-assign, assignment]
    tenant.stopped = True
    await tenant.reopen()
    assert not tenant._reading and not tenant.stopped and closing(old)
    await tenant.close()


async def test_a_verify_gives_way_to_a_stopped_volume(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verify may take hours, in which no checkpoint could begin."""
    reading = threading.Event()

    def verify(*_: object, ends: Callable[[], bool]) -> dict[str, object]:
        reading.set()
        deadline = time.monotonic() + 60
        while not ends() and time.monotonic() < deadline:
            time.sleep(0.001)
        return {"checkpoints": []}

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr("pccheckd.tenancy.tenant.UNBIND_LIMIT_S", 1.0)
    _, tenant = await registry.tenant(KEY)
    await tenant._open_port()
    verifying = await asked(registry, Verify(KEY.job))
    while not reading.is_set():
        await asyncio.sleep(0)
    tenant.stopped = True
    await tenant.reopen()
    answer = codec.decode(cast(bytes, await verifying), Reply).body
    assert isinstance(answer, Failure) and answer.retryable and "interrupted" in answer.message
    await tenant.close()


async def test_a_read_waits_while_a_volume_is_opened_again(registry: Registry) -> None:
    _, tenant = await registry.tenant(KEY)
    await tenant._open_port()
    opens, found = tenant.volumes._opened, tenant.volumes.checkpoints()[0].sequence
    verified: list[asyncio.Task[bytes | None]] = []

    async def opened(*args: object, **kwargs: object) -> object:
        verified.append(await asked(registry, Verify(KEY.job, sequence=found)))
        await asyncio.sleep(0.05)
        assert not verified[0].done()
        return await opens(*args, **kwargs)  # type: ignore[arg-type]

    tenant.volumes._opened = opened  # type: ignore[method-assign, assignment]
    tenant.stopped = True
    await tenant.reopen()
    answer = codec.decode(cast(bytes, await verified[0]), Reply)
    assert isinstance(answer.body, Report), answer
    await tenant.close()


async def test_a_volume_that_goes_while_it_is_looked_at_disturbs_nobody(registry: Registry) -> None:
    _, tenant = await registry.tenant(KEY)
    newest = tenant.volumes.checkpoints()[0].sequence
    tenant.volumes.open[0].volume.close()
    await tenant.volumes.refresh()
    assert not await tenant.retention.flag(newest, set_=PROTECTED)


async def test_a_follower_that_cannot_be_read_is_never_outnumbered_by_its_own_sequences(
    registry: Registry, tmp_path: Path
) -> None:
    layout.volume_path(tmp_path, KEY.uid, KEY.job, KEY.rank, 1).write_bytes(b"x" * (1 << 16))
    _, tenant = await registry.tenant(KEY)
    async with trainer_of(tenant):
        made = await tenant.register(1000)
        assert made.generation == 2 and made.info.next_sequence == 2 << 32
    await tenant.close()


async def test_a_volume_that_cannot_be_written_any_more_can_still_be_read(
    registry: Registry,
) -> None:
    _, tenant = await registry.tenant(KEY)
    item = tenant.volumes.open[0]
    item.volume.close()
    with item.path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(NativeError, match="LOCKED"):
            await tenant.volumes.reopen(item)
        item.volume.verify(tenant.volumes.checkpoints()[0].sequence)
    await tenant.volumes.reopen(item)
    assert await tenant.retention.flag(tenant.volumes.checkpoints()[0].sequence, set_=PROTECTED)
    await tenant.close()


async def test_a_volume_is_opened_again_when_its_last_user_has_left(registry: Registry) -> None:
    """Another thread may be inside a method of the volume when the volume is closed."""
    _, tenant = await registry.tenant(KEY)
    await tenant._open_port()  # its channel uses the volume
    port, item = tenant.port, tenant.volumes.open[0]
    assert port is not None
    old, opens = item.volume, tenant.volumes._opened

    async def opened(*args: object, **kwargs: object) -> object:
        assert old.closed  # else its lock refuses the opening
        return await opens(*args, **kwargs)  # type: ignore[arg-type]

    tenant.volumes._opened = opened  # type: ignore[method-assign, assignment]
    reopening = asyncio.create_task(tenant.volumes.reopen(item))
    while not closing(old):
        await asyncio.sleep(0)
    assert not old.closed
    assert await port.unbind(old, 0)
    assert await reopening
    item.volume.verify(tenant.volumes.checkpoints()[0].sequence)
    await tenant.close()


async def test_a_volume_that_could_not_be_opened_for_a_moment_is_opened_at_the_next_look(
    registry: Registry, tmp_path: Path
) -> None:
    """Its file does not change when another process unlocks it."""
    path = layout.volume_path(tmp_path, *KEY)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        _, tenant = await registry.tenant(KEY)
        assert [type(why) for why in tenant.volumes.unreadable.values()] == [StoreLockedError]
    opens = tenant.volumes._opened

    async def opened(*args: object, **kwargs: object) -> object:
        assert tenant.volumes.doubts  # else the job seems to have nothing
        return await opens(*args, **kwargs)  # type: ignore[arg-type]

    tenant.volumes._opened = opened  # type: ignore[method-assign, assignment]
    await tenant.look()
    assert not tenant.volumes.unreadable and tenant.volumes.checkpoints()


async def test_a_reader_finds_a_volume_that_could_not_be_opened_for_a_moment(
    registry: Registry, tmp_path: Path
) -> None:
    """No trainer need attach first."""
    path = layout.volume_path(tmp_path, *KEY)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError):
            await registry.existing(KEY)
    _, tenant = await registry.existing(KEY)
    assert tenant.volumes.checkpoints()


async def test_a_job_is_unloaded_when_the_last_user_of_its_files_has_left(
    registry: Registry,
) -> None:
    """A thread may be inside a method of a volume for a process that has ended."""
    _, tenant = await registry.tenant(KEY)
    shape = Shape(1 << 16, BLOCK_BYTES, 2, lanes=1, writers=1)
    port = await Port.opened(registry.engine, KEY.uid, lambda event: None, shape)
    volume = tenant.volumes.open[0].volume
    await tenant.bind(port, tenant.volumes.open[0])  # it uses the volume
    dropping = asyncio.create_task(expiry.drop(registry, KEY.uid, Drop(KEY.job)))
    while not closing(volume):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not dropping.done()
    assert await port.unbind(volume, 0)
    assert (await dropping)["dropped"]
    await port.close()


async def asked(registry: Registry, body: Drop | Verify) -> asyncio.Task[bytes | None]:
    """A request of an observer; cancelled when it hangs up."""
    sessions = Sessions(registry, cast(ControlServer, None))
    hello = Hello(PROTOCOL_VERSION, Role.OBSERVER, "test", os.getpid())
    session, _, _ = await sessions.open(hello, Peer(KEY.uid, 0, os.getpid()))
    request = codec.encode(Request(1, session.token, body))
    return asyncio.create_task(Handlers(sessions).answer(KEY.uid, request, session))


async def test_a_drop_whose_asker_has_gone_is_ended(registry: Registry) -> None:
    """Otherwise the files of a job that is no longer known stay open, and locked."""
    _, tenant = await registry.tenant(KEY)
    await tenant._open_port()
    volume = tenant.volumes.open[0].volume
    drop = await asked(registry, Drop(KEY.job))
    while registry.loaded(KEY):
        await asyncio.sleep(0)
    drop.cancel()
    await asyncio.wait([drop])
    _, again = await registry.tenant(KEY)  # waits for the end
    assert (volume.closed, again.volumes.unreadable, again.volumes.open) == (True, {}, [])


async def test_a_job_that_could_not_be_loaded_leaves_no_file_locked(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.volume_path(tmp_path, KEY.uid, KEY.job, 1).touch()
    listed, failures = layout.list_volumes, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def list_volumes(storage: Path, **whose: Any) -> list[layout.VolumeFile]:
        if whose.get("rank") == 1 and failures:
            raise failures.pop()
        return listed(storage, **whose)

    monkeypatch.setattr(layout, "list_volumes", list_volumes)
    with pytest.raises(OSError, match="Too many open files") as kept:  # as a log keeps it
        await registry.tenant(KEY)
    _, tenant = await registry.tenant(KEY)
    assert tenant.volumes.unreadable == {}
    assert kept.value.errno == errno.EMFILE


async def test_the_refusal_of_a_drop_whose_asker_has_gone_is_no_error_of_the_daemon(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client is left to receive it."""
    monkeypatch.setattr(registry_module, "GRACE_S", 0.005)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    _, tenant = await registry.tenant(KEY)
    tenant.add_reader()
    drop = await asked(registry, Drop(KEY.job))
    while len(asyncio.all_tasks()) < 4:  # this one and its runner, the request, the drop
        await asyncio.sleep(0)
    drop.cancel()
    await asyncio.wait([drop])
    del drop
    while len(asyncio.all_tasks()) > 2:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)  # its end is noted
    gc.collect()
    assert not errors


async def test_a_job_is_in_use_while_a_thread_reads_it_for_an_asker_that_has_gone(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, end = threading.Event(), threading.Event()

    def verify(*_: object, ends: Callable[[], bool]) -> dict[str, object]:
        reading.set()
        assert end.wait(20) and ends()
        return {"checkpoints": []}

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(registry_module, "GRACE_S", 0.005)
    verifying = await asked(registry, Verify(KEY.job))
    while not reading.is_set():
        await asyncio.sleep(0)
    verifying.cancel()
    await asyncio.wait([verifying])
    with pytest.raises(RefusedError, match="rank 0 is being read"):
        await expiry.drop(registry, KEY.uid, Drop(KEY.job))
    end.set()
    while registry.used(KEY.uid, KEY.job):
        await asyncio.sleep(0)
    assert (await expiry.drop(registry, KEY.uid, Drop(KEY.job)))["dropped"]


@pytest.mark.parametrize("role", [Role.READER, Role.TRAINER])
async def test_a_job_stays_loaded_while_a_process_attaches_to_it(
    registry: Registry, role: Role
) -> None:
    _, tenant = await registry.tenant(KEY)
    look = tenant.look

    async def slow_look() -> None:
        await registry.trim()
        await look()

    tenant.look = slow_look  # type: ignore[method-assign, assignment]
    front = SimpleNamespace(join=lambda *_: asyncio.sleep(0, ""), leave=print)
    sessions = Sessions(registry, cast(ControlServer, front))
    hello = Hello(PROTOCOL_VERSION, role, "test", os.getpid(), job=KEY.job)
    session, _, descriptors = await sessions.open(hello, Peer(KEY.uid, 0, os.getpid()))
    for descriptor in descriptors:
        os.close(descriptor)
    assert session.tenant is tenant and not tenant.closed
    await sessions.end(session)
    await registry.trim()
    assert tenant.closed


async def test_the_next_trainer_waits_for_one_that_ended_before_its_answer(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is noticed when it is answered, which may take long. The next one has been waiting
    then until other ranks have joined."""
    monkeypatch.setattr(sessions_module, "GRACE_S", 0.0)
    job, tenant = await registry.tenant(KEY)
    answers, ended, comes = asyncio.Event(), asyncio.Event(), asyncio.Event()
    release, prepare = job.release, tenant.prepare

    async def slow_release() -> None:
        answers.set()
        await ended.wait()
        await release()

    async def prepared() -> None:
        await prepare()
        if answers.is_set():
            comes.set()

    job.release, tenant.prepare = slow_release, prepared  # type: ignore[method-assign]
    front = SimpleNamespace(join=lambda *_: asyncio.sleep(0, ""), leave=print)
    sessions = Sessions(registry, cast(ControlServer, front))

    async def opened(process: bytes, gone: Callable[[], bool]) -> Session:
        hello = Hello(
            PROTOCOL_VERSION, Role.TRAINER, "test", os.getpid(), job=KEY.job, process=process
        )
        peer = Peer(KEY.uid, 0, os.getpid(), gone)
        session, _, descriptors = await sessions.open(hello, peer)
        for descriptor in descriptors:
            os.close(descriptor)
        return session

    first = asyncio.create_task(opened(b"1" * 16, ended.is_set))
    await answers.wait()
    second = asyncio.create_task(opened(b"2" * 16, lambda: False))
    await comes.wait()
    ended.set()
    await sessions.end(await first)
    session = await second
    assert tenant.owner is not None and tenant.owner.session == session.number
    assert job.members.starts.of(KEY.rank, session.process) is not None
    await sessions.end(session)


def closing(volume: Volume) -> bool:
    try:
        volume.info()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("size", [None, 0, 1000])
async def test_a_stopped_volume_whose_file_goes_at_that_moment_is_lost(
    registry: Registry, size: int | None
) -> None:
    """Between the look and the opening: the next checkpoint goes into a new volume."""
    _, tenant = await registry.tenant(KEY)
    async with trainer_of(tenant):
        item = await tenant.register(1000)
        tenant.stopped = True
        looks = tenant.volumes.look

        async def look() -> bool:
            found = await looks()
            if size is None:
                item.path.unlink(missing_ok=True)
            elif tenant.stopped:
                os.truncate(item.path, size)
            return found

        tenant.volumes.look = look  # type: ignore[method-assign]
        await tenant.reopen()
        made = tenant.volumes.current
        assert made is not None and made is not item and not tenant.stopped
        assert made.info.next_sequence >= item.info.next_sequence
        assert str(item.path) in tenant.volumes.loss
    await tenant.close()


async def test_a_stopped_volume_is_reopened_once(registry: Registry) -> None:
    """A request and a save may find it stopped at the same time: the second one must not close the
    volume that the first has just bound."""
    _, tenant = await registry.tenant(KEY)
    await tenant._open_port()
    tenant.stopped = True
    before = tenant.volumes.current
    assert before is not None
    old = before.volume
    await asyncio.gather(tenant.reopen(), tenant.reopen(), tenant.reopen())
    assert not tenant.stopped and before.volume is not old
    assert next(found.step for found in tenant.volumes.checkpoints()) == 3
    await tenant.close()


async def test_a_checkpoint_that_the_volume_does_not_list_yet_has_its_slot(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tenant = await registry.tenant(KEY)
    item = tenant.volumes.open[0]
    full = SimpleNamespace(has_expendable=lambda: False)
    free = item.info.slots - len(item.checkpoints)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(item, "volume", full)
        assert free > 0 and tenant.has_room()
        listed = [one.sequence for one in item.checkpoints]
        tenant._appearing = dict.fromkeys(listed, 1)
        assert tenant.has_room()
        tenant._appearing |= dict.fromkeys(range(100, 100 + free), 1)
        assert not tenant.has_room()
    await tenant.close()


async def test_what_was_requested_before_a_refusal_does_not_end_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tenant = await registry.existing(KEY)
    before = time.monotonic_ns()
    tenant.set_refusal(RefusedError("no room"))
    for asked_ns, ends in ((before, False), (time.monotonic_ns() + 1, True)):
        saved = Checkpoint(1, 1, 1, 10, False, 1, 1, requested_ns=asked_ns)
        monkeypatch.setattr(tenant.ledger, "apply", lambda *_, saved=saved: saved)
        tenant.on_event(SimpleNamespace(kind="durable", session=1))  # type: ignore[arg-type]
        assert (tenant.refused is None) == ends
    await tenant.close()
