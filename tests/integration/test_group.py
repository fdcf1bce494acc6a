"""Several ranks on one node: one step for all of them, or none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import LEVEL_DISK, Volume, dropping, layout
from pccheck_wire.messages import (
    CheckpointState,
    Described,
    ListVolumes,
    Open,
    Opened,
    Report,
    Restored,
)
from tests.support import live
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect, RemoteError, Trainer, mismatch
from tests.support.waiting import until

Members = Callable[..., list[Rank]]
COUNTS = [300_000, 11]
SIZE, SIZE_MAX = 4096, 1 << 20


def ranks(
    connect: Connect, daemon: Daemon, launch: str, world: int = 2, only: int = 0, **options: object
) -> list[Trainer]:
    """Connects the ranks of a start, or `only` the first ones. launch "": no launch id."""
    named = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": launch}
    return [
        connect(
            daemon, COUNTS, rank=rank, world_size=world,
            environment={**(named if launch else {}), "LOCAL_WORLD_SIZE": str(world)}, **options,
        )
        for rank in range(only or world)
    ]  # fmt: skip


def save(group: list[Trainer], *, to: int = 0, **options: object) -> None:
    """Every rank makes a step (or the steps up to `to`); waits until all have its checkpoint."""
    for trainer in group:
        while trainer.step() < to:
            pass
    handles = [trainer.checkpoint(**options) for trainer in group]
    states = [trainer.wait_global(at) for trainer, at in zip(group, handles, strict=True)]
    assert set(states) <= {"global", "durable"}, states


def restored(group: list[Trainer]) -> list[int]:
    """Restores all ranks, checks the content, and returns the steps."""
    steps = [trainer.restore()["step"] for trainer in group]
    assert [trainer.check(step) for trainer, step in zip(group, steps, strict=True)] == [
        "" for _ in group
    ]
    return steps


def end(group: list[Trainer]) -> None:
    for trainer in group:
        trainer.kill()


def test_the_last_common_step_is_not_recycled(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    for trainer in group:
        trainer.restore()
        trainer.save()
    ends = []
    for _ in range(8):  # rank 0 runs ahead, far beyond its slots
        group[0].step()
        ends.append(group[0].ended(group[0].checkpoint()))
    assert ends[0] == "durable" and ends[-1] == "skipped"
    for trainer in group:
        trainer.kill()
    again = ranks(start_trainer, daemon, "1")
    assert [trainer.restore()["step"] for trainer in again] == [1, 1]


def test_a_rank_without_checkpoints_is_refused_not_mixed(
    daemon: Daemon, start_trainer: Connect
) -> None:
    group = ranks(start_trainer, daemon, "0")
    group[0].save()
    for trainer in group:
        trainer.kill()
    again = ranks(start_trainer, daemon, "1")
    for trainer in again:
        with pytest.raises(RemoteError, match="rank"):
            trainer.restore()


# -- which processes are one start -------------------------------------------------------------


def test_the_same_launch_id_twice(start_daemon: Start, start_trainer: Connect) -> None:
    """A launch id may repeat, for example in a loop of a batch script."""
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    for step in (1, 2, 3):
        save(group, to=step)
    end(group)
    again = ranks(start_trainer, daemon, "0")
    assert restored(again) == [3, 3]
    save(again)
    end(again)
    assert restored(ranks(start_trainer, daemon, "0")) == [4, 4]


def test_the_same_launch_id_without_a_restore_keeps_what_was(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0", 1)
    save(group, to=20)
    end(group)
    (forgetful,) = ranks(start_trainer, daemon, "0", 1)
    for _ in range(8):
        save([forgetful])
    assert any("restore()" in warning for warning in forgetful.warnings)
    assert forgetful.recover(step=20)["wrong"] == ""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("before", [0, 1])
def test_what_becomes_durable_after_a_run_began_is_kept_for_its_restore(
    start_daemon: Start, start_trainer: Connect, world: int, before: int
) -> None:
    """The newest checkpoint of the previous run was still being written when a run began that
    forgets to restore. With `before`, an earlier checkpoint was durable."""
    daemon = start_daemon("--slots", "4", "--keep", "1", "--max-bandwidth", "2MiB")
    group = ranks(start_trainer, daemon, "0", world)
    for _ in range(before):
        save(group)
    for trainer in group:
        trainer.step()
        trainer.wait_copied(trainer.checkpoint())
    end(group)
    forgetful = ranks(start_trainer, daemon, "1", world)
    for trainer in forgetful:
        assert trainer.evaluate(partial(_waits_for, before + 1)) == before + 1
    for _ in range(3):
        save(forgetful, to=40)
    assert forgetful[0].recover(step=before + 1)["wrong"] == ""


def _waits_for(step: int, trainer: Any) -> int:
    """Waits until this step is on the disk; returns the newest step of the previous run."""

    def newest() -> int:
        return max((one.step for one in trainer.client.steps()), default=0)

    until(lambda: newest() >= step, newest)
    return newest()


def reconnect(group: list[Trainer]) -> None:
    """Trains until every rank has reconnected to the restarted daemon."""

    def are_connected() -> bool:
        for trainer in group:
            trainer.step()
            trainer.checkpoint()
        return all(trainer.evaluate(_is_connected) for trainer in group)

    until(are_connected, every_s=0.1)


def ask_until_connected(trainer: Trainer) -> int:
    """Saves until a checkpoint reaches the restarted daemon; returns that checkpoint."""
    handles: list[int] = []
    until(lambda: (handles.append(trainer.checkpoint()), trainer.evaluate(_is_connected))[1])
    return handles[-1]


def _is_connected(trainer: Any) -> bool:
    return bool(trainer.client.connected)


def test_ranks_that_reconnect_stay_one_start(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=2)
    daemon.kill()
    daemon.start()
    reconnect(group)
    save(group)
    step = group[0].evaluate(_now)
    end(group)
    assert restored(ranks(start_trainer, daemon, "1")) == [step, step]


def _until_answered(trainer: Any) -> None:
    connection = trainer.client._session.require()
    until(lambda: (connection.pump(), not connection._waiting)[1])


def _now(trainer: Any) -> int:
    return int(trainer.optimizer.now)


def test_the_first_to_reconnect_does_not_split_the_step(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """Rank 0 reconnects and requests a step before rank 1 has reconnected."""
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=1)
    daemon.kill()
    daemon.start()
    handles = []
    for trainer in group:
        trainer.step()
        handles.append(ask_until_connected(trainer))
        trainer.wait_durable(handles[-1])
    # Calls that reached no daemon count as well, and the ranks did not call alike.
    save(group)
    step = group[0].evaluate(_now)
    end(group)
    assert restored(ranks(start_trainer, daemon, "1")) == [step, step]


@pytest.mark.parametrize("first_back", [0, 1])
def test_a_daemon_that_is_restarted_while_the_ranks_come(
    start_daemon: Start, start_trainer: Connect, first_back: int
) -> None:
    """Rank 0 has restored. Rank 1 connects to the next daemon, before or after rank 0 has
    reconnected."""
    daemon = start_daemon("--slots", "4", "--keep", "1")
    before = ranks(start_trainer, daemon, "0")
    save(before, to=2)
    end(before)
    (early,) = ranks(start_trainer, daemon, "1", only=1)
    assert restored([early]) == [2]
    early.evaluate(_register)  # as restore() has announced
    daemon.kill()
    daemon.start()
    if first_back == 0:
        early.step()
        ask_until_connected(early)
    environment = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "1"}
    late = start_trainer(
        daemon, COUNTS, rank=1, world_size=2,
        environment=environment | {"LOCAL_WORLD_SIZE": "2"},
    )  # fmt: skip
    group = [early, late]
    assert restored([late]) == [2]
    while late.evaluate(_now) < early.evaluate(_now):
        late.step()
    reconnect(group)
    save(group)
    step = early.evaluate(_now)
    end(group)
    assert restored(ranks(start_trainer, daemon, "2")) == [step, step]


def test_a_daemon_that_ends_after_a_survivor_has_restored(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """Rank 1 is replaced, and rank 0 restores with it: both ranks announce that to the next
    daemon."""
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "")
    save(group, to=2)
    group[1].kill()
    group[1] = start_trainer(
        daemon, COUNTS, rank=1, world_size=2, environment={"LOCAL_WORLD_SIZE": "2"}
    )
    assert restored([group[1], group[0]]) == [2, 2]
    for trainer in group:
        trainer.evaluate(_until_answered)  # as restore() has announced
    daemon.kill()
    daemon.start()
    reconnect(group)
    save(group)
    step = group[0].evaluate(_now)
    end(group)
    assert restored(ranks(start_trainer, daemon, "")) == [step, step]


def test_one_rank_finds_the_storage_directory_away(
    start_daemon: Start, start_trainer: Connect, ctl: Ctl
) -> None:
    """The other rank keeps what all ranks had, because the directory comes back."""
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=1)
    save(group, to=2)
    away = daemon.storage.with_name("away")
    daemon.storage.rename(away)
    group[1].step()
    assert group[1].ended(group[1].checkpoint()) == "failed"
    asked = ("--socket", daemon.socket, "status", "--json")
    until(lambda: ctl(None, *asked).json["groups"][0]["global"] is None)  # what is there
    away.rename(daemon.storage)
    for step in (3, 4, 5, 6, 7):
        assert group[0].step() == step
        assert group[0].ended(group[0].checkpoint()) in ("durable", "skipped")
    end(group)
    again = ranks(start_trainer, daemon, "1")
    assert restored(again) == [2, 2]
    save(again)
    end(again)
    assert restored(ranks(start_trainer, daemon, "2")) == [3, 3]


def test_slots_that_could_not_be_recycled_do_not_skip_for_ever(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """With on_busy="skip" no rank begins a checkpoint without a slot. A volume is full, because the
    record failed that frees slots, and must be opened again."""
    daemon = start_daemon("--slots", "3", "--keep", "1", shim="eio:record-a:1")
    group = ranks(start_trainer, daemon, "0", on_busy="skip")
    save(group, to=1)

    def asks(rank: int) -> str:
        group[rank].step()
        return group[rank].ended(group[rank].checkpoint())

    def all_ask() -> set[str]:
        """At the same step."""
        now = [trainer.step() for trainer in group]
        for trainer, at in zip(group, now, strict=True):
            trainer.step(max(now) - at)
        return {trainer.ended(trainer.checkpoint()) for trainer in group}

    assert [asks(0), asks(0)] == ["durable", "durable"]
    group[1].step(2)
    assert [asks(1), asks(0)] == ["skipped", "skipped"]  # what only rank 0 has is given up
    until(lambda: asks(1) == "durable")
    daemon.armed.touch()
    until(lambda: asks(0) and "cannot recycle slots" in daemon.log.read_text())
    until(lambda: not all_ask() & {"skipped", "failed"})


def _register(trainer: Any) -> None:
    session = trainer.client._session
    session.register(session.require(), 1 << 20, 1 << LEVEL_DISK)


def renew(trainer: Trainer, daemon: Daemon, rank: int, **options: object) -> None:
    """Closes the client; a new client in the same process goes on with the same tensors."""
    trainer.evaluate(_Renew(str(daemon.socket), rank, options))


class _Renew:
    def __init__(self, socket: str, rank: int, options: dict[str, Any]) -> None:
        self.socket = socket
        self.rank = rank
        self.options = options

    def __call__(self, trainer: Any) -> None:
        trainer.client.close()
        made = type(trainer.client)("job", self.rank, 2, socket=self.socket, **self.options)
        trainer.client = made
        trainer.client.attach(model=trainer.model, optimizer=trainer.optimizer)


def test_a_new_client_in_a_rank_does_not_split_the_job(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=1)
    group[0].step()
    first = group[0].checkpoint()  # before the other one's new client has connected
    group[0].wait_durable(first)
    renew(group[1], daemon, 1)
    group[1].step()
    second = group[1].checkpoint()
    assert group[1].wait_global(second, 10) == "global"
    assert group[0].wait_global(first, 10) == "global"
    save(group)
    end(group)
    assert restored(ranks(start_trainer, daemon, "1")) == [3, 3]


def test_a_new_client_that_says_fresh_again_does_not_split_the_job(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """A script makes its client twice, with the same arguments."""
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0", fresh=True)
    save(group, to=2)
    renew(group[1], daemon, 1, fresh=True)
    save(group, to=4)
    end(group)
    assert restored(ranks(start_trainer, daemon, "1")) == [4, 4]


def test_a_new_client_after_a_rollback_does_not_split_the_job(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    save(group, step=5)
    save(group, step=3)
    renew(group[1], daemon, 1)
    for step in (4, 5, 6):
        save(group, step=step)


def test_a_start_killed_before_all_were_there(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=3)
    end(group)
    (alone,) = ranks(start_trainer, daemon, "0", only=1)
    assert restored([alone]) == [3]
    alone.step()
    alone.checkpoint()
    alone.kill()
    second = start_trainer(daemon, COUNTS, rank=1, world_size=2)  # comes first this time
    first = start_trainer(daemon, COUNTS, rank=0, world_size=2)
    again = [first, second]
    assert restored(again) == [3, 3]
    save(again)
    daemon.kill()  # the daemon with its knowledge of the group ends as well
    daemon.start()
    reconnect(again)
    save(again)


# -- a start of one rank ------------------------------------------------------------------------


@pytest.fixture
def members() -> Iterator[Members]:
    """Connects all ranks of a start, and closes them at the end of the block."""
    made: list[Rank] = []

    def connect(daemon: Daemon, world: int = 2, **options: Any) -> list[Rank]:
        group = [
            Rank(daemon.socket, rank=rank, world_size=world, **options) for rank in range(world)
        ]
        made.extend(group)
        for rank in group:
            rank.register(SIZE_MAX)
        return group

    yield connect
    for rank in made:
        rank.close()


def listed(rank: Rank) -> list[int]:
    """The steps in the volume of a rank, newest first."""
    found = rank.ask(ListVolumes("job"))
    assert isinstance(found, Report)
    rows: Any = found.document["checkpoints"]
    return sorted((row["step"] for row in rows if row["rank"] == rank.rank), reverse=True)


def steps_of_all(group: list[Rank]) -> list[int]:
    """The steps that the ranks restore; ends the group."""
    found = [rank.open() for rank in group]
    for rank in group:
        rank.close()
    return [one.step for one in found if isinstance(one, Opened)]


@pytest.mark.parametrize("fresh", [False, True])
def test_one_rank_after_two_recycles_nothing_that_the_two_had(
    start_daemon: Start, members: Members, fresh: bool
) -> None:
    """Rank 0 was ahead of rank 1, so its newest checkpoints are of no use to the job."""
    daemon = start_daemon("--slots", "3", "--keep", "1")
    first, second = members(daemon)
    for rank in (first, second):
        rank.save(1, payload_of(1, SIZE))
    first.save(2, payload_of(2, SIZE))
    first.save(3, payload_of(3, SIZE))
    first.close()
    second.close()
    (alone,) = members(daemon, 1, fresh=fresh)
    if not fresh:
        found = alone.ask(Open(any_world_size=True))
        assert isinstance(found, Opened) and found.step == 1
        alone.ask(Restored(found.sequence))
    snapshot = alone.begin(2, payload_of(4, SIZE), fill=False)  # it takes a slot, and never ends
    alone.until_copying(snapshot)
    alone.close()
    assert steps_of_all(members(daemon)) == [1, 1]
    (alone,) = members(daemon, 1, fresh=True)
    for step in range(5, 12):
        alone.save(step, payload_of(step, SIZE))
    assert listed(alone) == [11]
    alone.close()


def test_what_two_ranks_had_in_flight_takes_nothing_from_them(
    start_daemon: Start, members: Members
) -> None:
    """After a start of one rank has begun, rank 0 finishes its part, and rank 1 is still writing
    when the node fails."""
    daemon = start_daemon("--slots", "4", "--keep", "1", "--max-bandwidth", "1MiB")
    group = members(daemon)
    for rank in group:
        rank.save(1, payload_of(1, SIZE))
    for rank, size in zip(group, (SIZE_MAX // 2, 8 * SIZE_MAX), strict=True):
        rank.register(size)
        rank.wait(rank.begin(2, payload_of(2, size)), copied=True)
        rank.close()
    (alone,) = members(daemon, 1, fresh=True)
    found = until(lambda: rows if 2 in (rows := listed(alone)) else [])
    daemon.kill()
    alone.close()
    assert found == [2, 1]
    daemon.start()
    assert steps_of_all(members(daemon)) == [1, 1]


# -- files that cannot be read ------------------------------------------------------------------


def divided(group: list[Rank], step: int) -> str:
    """Every rank saves a step. Returns "" when all have the step, else the state on each rank."""
    made = {rank: rank.begin(step, payload_of(step, SIZE)) for rank in group}
    for rank, snapshot in made.items():
        rank.wait(snapshot)

    def over() -> list[Described]:
        told = [rank.describe(snapshot) for rank, snapshot in made.items()]
        done = all(one.state is CheckpointState.GLOBAL or one.reason for one in told)
        return told if done else []

    told = until(over)
    one = {(each.state, each.sequence) for each in told}
    return "" if len(one) == 1 else str(told)


@pytest.mark.parametrize("readable", [True, False])
def test_a_file_of_one_rank_that_cannot_be_read_does_not_divide_the_step(
    daemon: Daemon, members: Members, readable: bool
) -> None:
    """From the first checkpoint on, all ranks use sequences above any that the file may contain.
    `readable`: the rank has another file, which it restores."""
    for rank in (group := members(daemon)):
        rank.save(1, payload_of(1, SIZE))
    for rank in group:
        rank.close()
    daemon.stop()
    generation = 1 if readable else 0
    path = layout.volume_path(daemon.storage, os.getuid(), "job", 1, generation)
    path.write_bytes(bytes(4096))
    daemon.start()
    group = members(daemon, fresh=not readable)
    if readable:
        assert [rank.restore()[0].step for rank in group] == [1, 1]
    assert divided(group, 2) == ""
    for rank in group:
        rank.close()
    daemon.stop()
    daemon.start()
    assert steps_of_all(members(daemon)) == [2, 2]


@pytest.mark.parametrize("asks_first", [0, 1])
def test_a_file_that_appears_while_ranks_save_does_not_divide_the_step(
    daemon: Daemon, members: Members, asks_first: int
) -> None:
    group = members(daemon)
    assert divided(group, 1) == ""
    path = layout.volume_path(daemon.storage, os.getuid(), "job", 1, 1)
    path.write_bytes(bytes(4096))
    group[1].register(SIZE_MAX)
    assert divided([group[asks_first], group[1 - asks_first]], 2) == ""


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "now"), [(2, 1), (2, 3), (4, 2)])
def test_another_number_of_ranks_is_refused_with_the_numbers(
    start_daemon: Start, start_trainer: Connect, before: int, now: int
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0", before)
    save(group, to=2)
    end(group)
    others = ranks(start_trainer, daemon, "1", now)
    for trainer in others:
        with pytest.raises(RemoteError) as caught:
            trainer.restore()
        assert caught.value.kind == "NoCheckpointError"
        assert f"{before} rank" in caught.value.message and f"{now} rank" in caught.value.message
    end(others)
    assert restored(ranks(start_trainer, daemon, "2", before)) == [2] * before


def test_two_ranks_that_both_say_solo(daemon: Daemon, start_trainer: Connect) -> None:
    start_trainer(daemon, COUNTS, rank=0, world_size=2, solo=True)
    with pytest.raises(RemoteError, match=r"rank 1 .*solo=True.*rank 0") as caught:
        start_trainer(daemon, COUNTS, rank=1, world_size=2, solo=True, on_error="raise")
    assert caught.value.kind == "RefusedError"


@pytest.mark.parametrize("call", ["restore", "recover"])
def test_the_rank_that_saves_may_have_been_on_another_node(
    daemon: Daemon, start_trainer: Connect, call: str
) -> None:
    for local, warnings in (2, 0), (1, 1):
        trainer = start_trainer(
            daemon, COUNTS, rank=0, world_size=2, solo=True, job=f"local-{local}",
            environment={"LOCAL_WORLD_SIZE": str(local)},
        )  # fmt: skip
        assert not getattr(trainer, call)()["found"]
        assert len([text for text in trainer.warnings if "other nodes" in text]) == warnings


def test_unreadable_volumes_are_never_nothing(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon(shim="dead:read:1")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=2)
    end(group)
    assert daemon.stop() == 0
    daemon.armed.touch()
    daemon.start()
    for rank in range(2):
        with pytest.raises(RemoteError) as caught:
            start_trainer(daemon, COUNTS, rank=rank, world_size=2, on_error="raise").restore()
        assert caught.value.kind in ("UnreadableError", "NoCheckpointError")
    daemon.armed.unlink()
    assert daemon.stop() == 0
    daemon.start()
    assert restored(ranks(start_trainer, daemon, "1")) == [2, 2]


# -- ranks that do not keep up -----------------------------------------------------------------


def test_a_rank_that_saves_alone_is_told_and_not_stalled(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    (alone,) = ranks(start_trainer, daemon, "0", only=1, stall_limit_s=100)
    slow = []
    for step in range(12):
        since = time.monotonic()
        alone.step()
        alone.checkpoint()
        if step:
            slow.append(time.monotonic() - since)
    (warning,) = [one for one in alone.warnings if "solo=True" in one]
    assert "replicated=True" in warning
    assert sum(slow) < 90, slow  # not even once for the limit


def test_a_step_that_one_rank_leaves_out_is_given_up_on_all(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1", "--max-bandwidth", "512KiB")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=1)
    for trainer in group:
        trainer.step()
    alone = group[1].checkpoint()  # of step 2, which takes some seconds to write
    for trainer in group:
        trainer.step()
    group[0].checkpoint()  # of step 3: rank 0 will never ask for step 2
    assert group[1].ended(alone) == "skipped"
    assert "rank 0 did not ask for this checkpoint" in group[1].reason(alone)
    assert group[1].wait_global(group[1].checkpoint()) == "global"
    end(group)
    assert restored(ranks(start_trainer, daemon, "1")) == [3, 3]


def one_ahead(start: Start, start_trainer: Connect) -> tuple[Daemon, list[Trainer], int]:
    """Both ranks have step 1, and rank 0 alone has step 2, whose handle comes last."""
    daemon = start("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    save(group, to=1)
    for trainer in group:
        trainer.step()
    alone = group[0].checkpoint()
    assert group[0].wait_durable(alone) == "durable"
    return daemon, group, alone


def test_wait_global_ends_for_a_step_that_a_rank_never_gets(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """The checkpoint was reported as durable on this rank, and stays so: only the wait for all
    ranks fails."""
    _, group, alone = one_ahead(start_daemon, start_trainer)
    group[0].post("wait_global", alone)
    assert group[1].save() == "durable"  # of step 3
    with pytest.raises(
        RemoteError, match=r"step 2 is durable on this rank, but .* rank 1"
    ) as ended:
        group[0].answer()
    assert ended.value.kind == "CheckpointFailedError"
    assert group[0].wait_durable(alone) == "durable"
    assert "rank 1 did not ask for this checkpoint" in group[0].reason(alone)
    assert group[0].evaluate(_flushed) == 1
    with pytest.raises(RemoteError, match="rank 1 did not ask"):
        group[0].wait_global(alone)  # again, at once
    group[0].step()
    assert group[0].wait_global(group[0].checkpoint()) == "global"
    assert group[0].wait_global(alone) == "superseded"


def test_what_all_ranks_replaced_is_superseded_after_a_kill(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon, group, alone = one_ahead(start_daemon, start_trainer)
    save(group, to=3)
    daemon.kill()
    for trainer in group:
        trainer.step()
    assert group[0].wait_global(alone) == group[0].wait_durable(alone) == "superseded"


def test_nobody_waits_for_ever_for_a_rank_that_ended(
    daemon: Daemon, start_trainer: Connect
) -> None:
    group = ranks(start_trainer, daemon, "0")
    save(group)
    group[1].kill()
    group[0].step()
    handle = group[0].checkpoint()
    with pytest.raises(RemoteError, match="rank 1 ended without this checkpoint"):
        group[0].wait_global(handle)
    assert group[0].flushed() == 1


def test_what_a_killed_rank_had_not_copied_ends_the_wait_for_all_ranks(
    start_daemon: Start, start_trainer: Connect, ctl: Ctl
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    (first,) = ranks(start_trainer, daemon, "", only=1)
    second = Rank(daemon.socket, rank=1, world_size=2)
    second.register(SIZE)
    first.step()
    alone = first.checkpoint()
    second.begin(1, payload_of(1, SIZE), fill=False)
    assert first.wait_durable(alone) == "durable"
    first.post("wait_global", alone)
    second.close()
    with pytest.raises(RemoteError, match="rank 1 did not save this checkpoint"):
        first.answer()
    ran = ctl(
        None, "--socket", daemon.socket, "wait", "job", "--step", 1, "--for", "global",
        "--timeout", "60",
    )  # fmt: skip
    assert ran.code != 0 and "rank 1 did not save this checkpoint" in ran.err


def _flushed(trainer: Any) -> int | None:
    durable = trainer.client.flush()
    return durable.step if durable else None


def test_what_was_copied_is_waited_for(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--max-bandwidth", "2MiB")
    group = ranks(start_trainer, daemon, "0")
    save(group)
    for trainer in group:
        trainer.step()
        trainer.wait_copied(trainer.checkpoint())
    end(group)
    assert restored(ranks(start_trainer, daemon, "0")) == [2, 2]


def test_a_job_that_was_done_is_not_finished_once_it_goes_on(
    daemon: Daemon, start_trainer: Connect
) -> None:
    group = ranks(start_trainer, daemon, "0")
    save(group, to=2)
    for trainer in group:
        trainer.close(done=True)
    assert [job.done for job in dropping.jobs(daemon.storage)] == [True]
    again = ranks(start_trainer, daemon, "1")
    assert restored(again) == [2, 2]
    save(again)
    assert [job.done for job in dropping.jobs(daemon.storage)] == [False]


def test_wait_for_global(daemon: Daemon, start_trainer: Connect, ctl: Ctl) -> None:
    group = ranks(start_trainer, daemon, "0")
    group[0].step(), group[1].step()
    first = group[0].checkpoint()
    assert group[0].wait_durable(first) == "durable"
    with pytest.raises(RemoteError, match="not durable on all ranks yet"):
        group[0].wait_global(first, 0.2)
    waiting = ("--socket", daemon.socket, "wait", "job", "--step", 1, "--for", "global")
    assert ctl(None, *waiting, "--timeout", "0.3").code != 0
    second = group[1].checkpoint()
    assert group[1].wait_global(second) == "global"
    assert group[0].wait_global(first) == "global"
    assert ctl(None, *waiting, "--timeout", "60").code == 0


def test_ranks_that_save_different_steps_are_warned(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """As when only rank 0 calls checkpoint(): no checkpoint would be there after a crash."""
    group = ranks(start_trainer, start_daemon(), "1")
    group[1].step(100)

    def told() -> list[int]:
        for trainer in group:
            trainer.step()
            trainer.checkpoint()
        return [
            sum(f"skipped: rank {1 - rank} did not ask" in one for one in trainer.warnings)
            for rank, trainer in enumerate(group)
        ]

    until(lambda: told() == [1, 1], told)
    for _ in range(5):
        assert told() == [1, 1]


def test_ranks_that_save_different_steps_slowly_are_warned(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """Each checkpoint is durable on its rank before the other rank asks for one, so none is
    skipped."""
    group = ranks(start_trainer, daemon, "1")
    group[1].step(100)

    def told() -> list[int]:
        for trainer in group:
            assert trainer.save() == "durable"
        return [
            sum(f"on all ranks: rank {1 - rank} did not ask" in one for one in trainer.warnings)
            for rank, trainer in enumerate(group)
        ]

    until(lambda: told() == [1, 1], told)
    assert told() == [1, 1]


def test_status_says_which_rank_holds_the_others_back(
    start_daemon: Start, start_trainer: Connect, ctl: Ctl
) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1", "--stall-limit", "1s")
    group = ranks(start_trainer, daemon, "0", on_busy="skip")
    save(group, to=1)
    asked = ("--socket", daemon.socket, "status", "--json")
    (told,) = ctl(None, *asked).json["groups"]
    assert (told["global"]["step"], told["slowest_rank"], told["behind"]) == (1, None, {})

    def is_noticed() -> bool:
        step = group[0].step()
        group[1].step()
        group[0].checkpoint()
        if step % 3 == 0:  # it keeps asking, but never for a step of the other rank
            group[1].checkpoint(step=10_000 + step)
        return ctl(None, *asked).code != 0

    until(is_noticed, every_s=0.1)
    ran = ctl(None, *asked)
    assert ran.code == 3
    (told,) = ran.json["groups"]
    assert told["global"]["step"] == 1 and told["late"]
    assert any(
        "no new checkpoint was saved by all 2 ranks" in warning for warning in ran.json["warnings"]
    )
    daemon.logs("no new checkpoint was saved by all 2 ranks")


# -- a disk that was away ----------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_found_nothing_because_its_disk_was_away(
    start_daemon: Start, start_trainer: Connect, ctl: Ctl, tmp_path: Path, world: int
) -> None:
    torch = pytest.importorskip("torch")
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0", world)
    save(group, to=40)
    end(group)
    assert daemon.stop() == 0
    away = daemon.root / "away"
    daemon.storage.rename(away)
    daemon.storage.mkdir()
    daemon.start()
    group = ranks(start_trainer, daemon, "1", world)
    assert not any(trainer.restore()["found"] for trainer in group)
    for _ in range(3):
        save(group)
    daemon.kill()
    live.remove(daemon.storage)
    away.rename(daemon.storage)
    daemon.start()
    reconnect(group)
    for _ in range(8):
        save(group)
    end(group)
    found = ctl(daemon.storage, "list", "--json").json["checkpoints"]
    assert sorted(one["rank"] for one in found if one["step"] == 40) == list(range(world))
    for rank in range(world):
        target = tmp_path / f"{rank}.pt"
        ran = ctl(daemon.storage, "export", "job", "--rank", rank, "--step", 40, "-o", target)
        assert ran.code == 0, ran.err
        state = torch.load(target)
        assert mismatch(list(state["model"].values()), 40) == ""
    for trainer in group:
        assert any("NOT restored" in warning for warning in trainer.warnings), trainer.warnings


def test_a_process_that_moved_to_a_newer_start_saves_and_is_shown_as_one_of_that(
    daemon: Daemon,
) -> None:
    with Rank(daemon.socket, rank=0, world_size=2) as stays:
        Rank(daemon.socket, rank=1, world_size=2).close()
        with Rank(daemon.socket, rank=1, world_size=2) as again:
            assert (stays.welcome.incarnation, again.welcome.incarnation) == (1, 2)
            stays.register(100_000)  # it has asked for no checkpoint, so it moves along
            document = stays.status()
            assert {one["incarnation"] for one in document["sessions"]} == {2}
            assert {one["incarnation"] for one in document["ranks"] if one["connected"]} == {2}
            (path,) = daemon.storage.glob("*/*/rank-0.*.pcc")
    daemon.stop()
    volume = Volume(str(path), writable=False, allow_buffered=True)
    assert volume.info().incarnation == 2
    volume.close()
