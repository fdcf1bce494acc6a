"""Checkpoints that stay in the daemon's memory: replaced there, written when they are wanted, and
restored after the death of their trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pccheck import CheckpointState, PCcheckClient, UsageError
from pccheck_native import LEVEL_MEMORY
from pccheck_wire.errors import CheckpointFailedError, NoCheckpointError
from pccheck_wire.messages import Pin
from tests.integration.test_group import end, ranks, restored
from tests.support.daemon import Daemon, Start
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect, Trainer
from tests.support.waiting import until

#: A disk that takes a third of a second for a state, and is not idle meanwhile.
SLOW = ("--slots", "4", "--keep", "1", "--chunk", "64KiB", "--max-bandwidth", "4MiB")
AUTO = {"durable_every": "auto"}


def saves(trainer: Trainer, count: int, **options: Any) -> list[int]:
    """Handles of so many steps, each copied."""
    made = []
    for _ in range(count):
        trainer.step()
        made.append(trainer.checkpoint(**options))
        trainer.wait_copied(made[-1])
    return made


def client_of(daemon: Daemon, **options: Any) -> PCcheckClient:
    return PCcheckClient(job="job", socket=daemon.socket, on_error="raise", **options)


def save(client: PCcheckClient, step: int, **options: Any) -> Any:
    handle = client.checkpoint([torch.full((300_000,), step)], step=step, **options)
    handle.wait_copied(60)
    return handle


def steps(client: PCcheckClient) -> list[int]:
    return [one.step for one in client.steps()]


def test_a_killed_trainer_loses_no_copied_step(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon(*SLOW)
    for last in (5, 9):
        trainer = start_trainer(daemon, [300_000, 11], **AUTO)
        if last > 5:
            assert trainer.restored() == (5, "")
        saves(trainer, last - trainer.evaluate(_now))
        trainer.kill()
    trainer = start_trainer(daemon, [300_000, 11], **AUTO)
    assert trainer.restored() == (9, "")
    assert trainer.warnings == []


def _now(commands: Any) -> int:
    return int(commands.optimizer.now)


def test_a_newer_one_in_memory_replaces_and_is_no_failure(
    start_daemon: Start, start_trainer: Connect
) -> None:
    trainer = start_trainer(start_daemon(*SLOW), [300_000], **AUTO)
    handles = saves(trainer, 8)
    until(lambda: "superseded" in trainer.states())
    place = trainer.states().index("superseded")
    assert "is in memory on all ranks" in trainer.reason(handles[place])
    assert trainer.wait_durable(handles[place]) == "superseded"
    assert trainer.ended(handles[-1]) == "durable"
    assert trainer.flushed() == 8 and trainer.warnings == []


@pytest.mark.parametrize("wait", ["result", "wait_global", "flush", "pin", "close"])
def test_what_is_wanted_on_the_disk_is_written(start_daemon: Start, wait: str) -> None:
    """Step 1 keeps the disk busy, so nothing is written because the disk is idle."""
    daemon = start_daemon(*SLOW)
    wanted: dict[str, Callable[[PCcheckClient, Any], object]] = {
        "result": lambda _, handle: handle.result(60).step,
        "wait_global": lambda _, handle: handle.wait_global(60).step,
        "flush": lambda client, _: client.flush().step,  # type: ignore[union-attr]
        "pin": lambda client, _: client.pin(4) or 4,  # type: ignore[func-returns-value]
        "close": lambda client, _: client.close() or 4,  # type: ignore[func-returns-value]
    }
    with client_of(daemon, **AUTO) as client:
        save(client, 1, to="disk")
        handles = [save(client, step) for step in (2, 3, 4)]
        assert wanted[wait](client, handles[-1]) == 4
        if wait != "close":
            assert steps(client)[0] == 4
            assert handles[-1].state in (CheckpointState.DURABLE, CheckpointState.GLOBAL)
            assert handles[0].wait_durable(60).step == 4
            with pytest.raises(NoCheckpointError):
                client.pin(2)
    assert handles[0].wait_durable(0).step == 4
    with client_of(daemon) as client:
        assert client.recover().step == 4


def test_every_third_checkpoint_goes_to_the_disk(start_daemon: Start) -> None:
    daemon = start_daemon("--slots", "12", "--keep", "10", "--chunk", "64KiB")
    with client_of(daemon, durable_every=3) as client:
        for step in range(1, 10):
            handle = save(client, step)
            if step % 3 == 0:
                until(handle.done)  # two that are written at once leave too little memory
                assert handle.state is CheckpointState.DURABLE
        assert {3, 6, 9} <= set(steps(client))


def test_three_states_of_memory_skip_none_beside_a_write(start_daemon: Start) -> None:
    """Copies overlap: while one for the disk is copied, the one before it in memory may be, too."""
    daemon = start_daemon(*SLOW, "--max-bandwidth", "32MiB", "--dram", "24MiB")
    layer = torch.nn.Linear(1024, 2044, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer.weight.grad = torch.ones_like(layer.weight)
    with client_of(daemon, durable_every=1000) as client:
        client.attach(layer=layer, optimizer=optimizer)
        handles: list[Any] = []

        def step(**options: Any) -> Any:
            optimizer.step()
            handles.append(client.checkpoint(step=len(handles) + 1, **options))
            return handles[-1]

        for _ in range(10):
            step()
            step()
            on_disk = step(to="disk")
            while not on_disk.done():
                step()
            assert on_disk.state is CheckpointState.DURABLE
        client.gate()
        assert [handle for handle in handles if handle.state is CheckpointState.SKIPPED] == []


def test_a_pin_has_the_daemon_write_what_is_in_memory(start_daemon: Start) -> None:
    """Also of a client that did not ask for that. The disk is not idle meanwhile."""
    daemon = start_daemon(*SLOW)
    with client_of(daemon, **AUTO) as other, Rank(daemon.socket, job="mine") as link:
        link.open()
        link.register(300_000, memory=True)
        on_disk = save(other, 1, to="disk")
        for step in (1, 2):
            number = link.begin(step, payload_of(step, 300_000), level=LEVEL_MEMORY, row=step)
            until(lambda number=number: link.native.state(number).outcome == CheckpointState.COPIED)
        assert not on_disk.done()
        with pytest.raises(NoCheckpointError):
            link.ask(Pin(1))  # replaced
        link.ask(Pin(2))
        assert link.native.state(number).outcome == CheckpointState.DURABLE


def test_a_disk_that_writes_for_another_job_is_not_idle(start_daemon: Start) -> None:
    daemon = start_daemon(*SLOW)
    with client_of(daemon, **AUTO) as client:
        with PCcheckClient(job="other", socket=daemon.socket, on_error="raise") as other:
            on_disk = save(other, 1)
            handle = save(client, 1)
            state = handle.state
            while not on_disk.done():
                assert state is CheckpointState.COPIED
                state = handle.state
        until(lambda: handle.state is CheckpointState.DURABLE)


def test_a_callback_wants_nothing_written(start_daemon: Start) -> None:
    called: list[int] = []
    with client_of(start_daemon(*SLOW), **AUTO) as client:
        save(client, 1, to="disk")
        handle = save(client, 2)
        handle.add_done_callback(lambda ended: called.append(ended.step))
        assert not handle.done()
        save(client, 3)
        until(lambda: called == [2])
        assert handle.state is CheckpointState.SUPERSEDED


def test_tensors_of_the_cpu_are_left_on_no_gpu(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        with pytest.raises(UsageError, match="is not a level"):
            client.checkpoint([torch.zeros(3)], step=1, to="tape")  # type: ignore[arg-type]
        with pytest.raises(CheckpointFailedError, match="no tensor of the state is on a GPU"):
            client.checkpoint([torch.zeros(3)], step=1, to="device")
        assert client.checkpoint([torch.zeros(3)], step=1).wait_durable(60).step == 1


def test_two_ranks_restore_the_newest_step_that_both_copied(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """One rank is a step ahead when both are killed."""
    daemon = start_daemon(*SLOW)
    group = ranks(start_trainer, daemon, "0", **AUTO)
    for trainer in group * 4:
        saves(trainer, 1)
    saves(group[0], 1)
    end(group)
    group = ranks(start_trainer, daemon, "1", **AUTO)
    assert restored(group) == [4, 4]
    assert [trainer.warnings for trainer in group] == [[], []]


def test_one_rank_that_asks_for_the_disk_asks_for_all(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """The ranks disagree about the level of step 2, and one of them waits."""
    daemon = start_daemon(*SLOW)
    group = ranks(start_trainer, daemon, "0", **AUTO)
    for trainer in group:
        saves(trainer, 1)
    handles = [saves(group[0], 1, to="disk"), saves(group[1], 1)]
    assert group[0].wait_global(handles[0][0]) == "global"
    assert group[1].wait_global(handles[1][0]) == "global"
    for trainer in group:
        saves(trainer, 1)
    group[1].post("flushed")
    assert group[1].answer() == 3
    end(group)
    assert restored(ranks(start_trainer, daemon, "1", **AUTO)) == [3, 3]


def test_a_memory_too_small_is_said(start_daemon: Start, start_trainer: Connect) -> None:
    """A state of 1.2 MB takes two chunks of 1 MiB, and three states six."""
    trainer = start_trainer(start_daemon(*SLOW, "--dram", "5MiB"), [300_000], **AUTO)
    for _ in range(4):
        trainer.step()
        trainer.checkpoint()
    assert "failed" not in trainer.states()
    told = [one for one in trainer.warnings if "--dram" in one]
    assert sum("3 states of 2 MiB" in one for one in told) == 1


def test_a_stopping_daemon_waits_for_a_slow_rank(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """Rank 0 has slots for two checkpoints, and none for step 3 until rank 1 has written step 2."""
    daemon = start_daemon("--slots", "2", *SLOW[2:])

    def connect(launch: str, **options: Any) -> list[Trainer]:
        named = {"TORCHELASTIC_RUN_ID": launch, "LOCAL_WORLD_SIZE": "2"}
        return [
            start_trainer(
                daemon, [count], rank=rank, world_size=2, environment=named, **AUTO, **options
            )
            for rank, count in enumerate((1000, 1_000_000))
        ]

    group = connect("0", fresh=True)
    saves(group[0], 1, to="disk")
    end(group)
    assert daemon.stop() == 0
    daemon.start("--slots", "4")
    group = connect("1", fresh=True)
    first = [saves(trainer, 1, to="disk")[0] for trainer in group]
    assert [t.wait_global(at) for t, at in zip(group, first, strict=True)] == ["global"] * 2
    for options in ({"to": "disk"}, {}):
        for trainer in group:
            saves(trainer, 1, **options)
    assert daemon.stop() == 0
    end(group)
    daemon.start()
    assert restored(connect("2")) == [3, 3]
