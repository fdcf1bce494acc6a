"""Pinned checkpoints stay: on every rank, over restarts, and without preventing the next
checkpoint."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from pccheck import CheckpointFailedError, NoCheckpointError, PCcheckClient, Reader, RefusedError
from pccheck.integrations.deepspeed_files import tags_of
from pccheck_native import catalog
from pccheck_wire.messages import Pin
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, RemoteError, Trainer


def client_of(daemon: Daemon, **options: Any) -> PCcheckClient:
    return PCcheckClient(job="job", socket=daemon.socket, on_error="raise", **options)


def save(client: PCcheckClient, *steps: int) -> None:
    for step in steps:
        client.checkpoint([torch.full((1000,), step)], step=step).wait_durable(60)


def steps(client: PCcheckClient) -> list[tuple[int, bool]]:
    return [(one.step, one.pinned) for one in client.steps()]


def test_a_pinned_checkpoint_outlives_kill_and_restart(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        save(client, 1, 2)
        client.pin(1)
        save(client, *range(3, 9))
        assert steps(client) == [(8, False), (7, False), (1, True)]
        daemon.kill()
        daemon.start()
        client.adopt()
        save(client, *range(9, 15))
        assert steps(client) == [(14, False), (13, False), (1, True)]
        assert bool((client.recover(step=1).state[0] == 1).all())
        client.unpin(1)
        save(client, 15, 16)
        assert steps(client) == [(16, False), (15, False)]
        client.unpin(1)  # nothing to do


def test_a_pin_takes_no_slot_that_the_next_checkpoint_needs(start_daemon: Start) -> None:
    with client_of(start_daemon("--slots", "5")) as client:
        save(client, 1, 2)
        client.pin(1)
        client.pin(1)
        client.pin(2)
        save(client, 3)
        with pytest.raises(RefusedError, match=r"2 of 5 slots can hold.*pinned steps: 2, 1"):
            client.pin(3)
        save(client, *range(4, 9))
        assert steps(client)[2:] == [(2, True), (1, True)]


def test_a_pinned_checkpoint_whose_step_is_saved_again_is_listed(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        save(client, 2, 3)
        client.pin(3)
        (pinned,) = (one.sequence for one in client.steps() if one.pinned)
        client.recover(step=2)  # and train again
        client.checkpoint([torch.zeros(1000)], step=3).wait_durable(60)
        assert steps(client) == [(3, False), (3, True)]
        assert client.steps()[1].sequence == pinned
        with pytest.raises(RefusedError, match="pinned steps: 3") as told:
            client.pin(3)
        assert "an earlier checkpoint of step 3 is pinned: unpin(3) releases it" in told.value.hint
        with Reader("job", socket=daemon.socket) as reader:
            assert bool((reader.open(sequence=pinned).read("")[0] == 3).all())
        client.unpin(3)
        client.pin(3)
        save(client, 4, 5)
        assert steps(client) == [(5, False), (4, False), (3, True)]
        assert not client.recover(step=3).state[0].any()


def test_the_tag_of_a_step_that_is_saved_again_is_the_newer_one(daemon: Daemon) -> None:
    """DeepSpeed loads a tag by its step."""
    with client_of(daemon) as client:
        for tag in ("first", "again"):
            client.checkpoint([torch.zeros(9)], step=3, metadata={"tag": tag}).wait_durable(60)
            if tag == "first":
                client.pin(3)
                client.recover(step=3)
        assert len(client.steps()) == 2
        assert tags_of(client) == {"again": 3}


def test_what_is_protected_for_the_next_run_and_pinned_leaves_a_slot(daemon: Daemon) -> None:
    """Of four slots, of which two are kept."""
    with client_of(daemon) as client:
        save(client, 1)
        client.pin(1)
        save(client, 2, 3, 4)
    for run in range(3):  # no run restores: the checkpoints that they must keep add up
        with client_of(daemon) as client, pytest.warns(UserWarning, match="NOT restored"):
            save(client, *range(100 * run + 10, 100 * run + 16))
            assert (1, True) in steps(client)


def test_only_what_is_durable_can_be_pinned(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        save(client, 1)
        with pytest.raises(NoCheckpointError, match=r"step 2 \(durable steps: 1\).*wait_global"):
            client.pin(2)


def test_the_end_of_the_job_leaves_what_is_pinned(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        save(client, 1)
        client.pin(1)
        save(client, 2, 3)
    client.close(done=True)
    with client_of(daemon) as client:
        assert steps(client) == [(3, False), (1, True)]


def test_a_pin_in_a_state_that_has_outgrown_its_slots_stays(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        save(client, 1)
        client.pin(1)
        for step in (2, 3, 4):
            client.checkpoint([torch.ones(3_000_000)], step=step).wait_durable(60)
        assert (1, True) in steps(client)
        assert bool((client.recover(step=1).state[0] == 1).all())


def _pin(trainer: Any) -> None:
    trainer.client.pin(1)


def _steps(trainer: Any) -> list[tuple[int, bool]]:
    return [(one.step, one.pinned) for one in trainer.client.steps()]


def test_a_pin_by_one_rank_holds_on_all(daemon: Daemon, start_trainer: Connect) -> None:

    def start() -> list[Trainer]:
        return [start_trainer(daemon, rank=rank, world_size=2) for rank in (0, 1)]

    def save_steps(count: int) -> None:
        for _ in range(count):
            for trainer in group:
                trainer.step()
            handles = [trainer.checkpoint() for trainer in group]
            for trainer, handle in zip(group, handles, strict=True):
                trainer.wait_global(handle)

    group = start()
    save_steps(1)
    group[1].evaluate(_pin)
    group[0].evaluate(_pin)
    save_steps(6)
    for trainer in group:
        assert trainer.evaluate(_steps)[-1] == (1, True)
    daemon.kill(signal.SIGKILL)
    for trainer in group:
        trainer.kill()
    daemon.start()
    group = start()
    for trainer in group:
        trainer.post("restore")
    assert [trainer.answer()["step"] for trainer in group] == [7, 7]
    save_steps(4)
    for trainer in group:
        assert trainer.evaluate(_steps)[-1] == (1, True)
        assert trainer.recover(step=1)["wrong"] == ""


def test_a_pin_that_was_cut_off_between_ranks_is_none(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--slots", "4", shim="kill:record-a:2")
    group = [start_trainer(daemon, rank=rank, world_size=2) for rank in (0, 1)]

    def save_one() -> None:
        for trainer in group:
            trainer.step()
        handles = [trainer.checkpoint() for trainer in group]
        for trainer, handle in zip(group, handles, strict=True):
            trainer.wait_global(handle)

    save_one()
    daemon.armed.touch()
    with pytest.raises(RemoteError):
        group[1].evaluate(_pin)
    daemon.wait_end()
    daemon.armed.unlink()
    daemon.start()
    assert group[0].evaluate(_steps) == [(1, False)]
    group[0].evaluate(_pin)
    assert group[1].evaluate(_steps) == [(1, True)]
    for _ in range(5):
        save_one()
    assert group[1].evaluate(_steps)[-1] == (1, True)


def test_all_ranks_go_back_together_and_finish_after_their_end(
    daemon: Daemon, start_trainer: Connect
) -> None:
    group = [start_trainer(daemon, rank=rank, world_size=2) for rank in (0, 1)]

    def save_step() -> None:
        handles = [trainer.checkpoint(step=trainer.step()) for trainer in group]
        for trainer, handle in zip(group, handles, strict=True):
            trainer.wait_global(handle)

    for _ in range(3):
        save_step()
    group[0].evaluate(_pin_two)
    for _ in range(2):
        save_step()
    for trainer in group:
        trainer.post("evaluate", _back_to_two)
    assert [trainer.answer() for trainer in group] == [2, 2]
    save_step()
    assert [trainer.evaluate(_steps)[0] for trainer in group] == [(6, False)] * 2
    for trainer in group:
        trainer.close()
    for trainer in group:
        trainer.close(done=True)
    with client_of(daemon, rank=0, world_size=2) as client:
        assert steps(client) == [(6, False), (2, True)]


def _pin_two(trainer: Any) -> None:
    trainer.client.pin(2)


def _back_to_two(trainer: Any) -> int:
    return int(trainer.client.restore(step=2).step)


def test_a_rank_that_does_not_save_its_job_pins_nothing_of_it(
    daemon: Daemon, start_trainer: Connect
) -> None:
    trainer = start_trainer(daemon)
    with pytest.raises(RemoteError, match="no durable checkpoint of step 1"):
        trainer.evaluate(_pin)
    assert Pin(1).pinned


def test_what_another_rank_saved_alone_is_not_pinned(start_daemon: Start) -> None:
    daemon = start_daemon("--slots", "6")
    for rank in (0, 1):
        with client_of(daemon, rank=rank, world_size=2, solo=True) as client:
            save(client, 1, 2)
        daemon.stop()  # one rank after the other may save alone
        daemon.start()
    with client_of(daemon) as client:
        client.adopt()
        client.pin(2)
        client.pin(1)  # looks for pins that were cut off
        assert steps(client) == [(2, True), (1, True)]
    listed = catalog.scan(daemon.storage).checkpoints
    assert {(one.id.rank, one.id.step) for one in listed if one.is_pinned} == {(0, 1), (0, 2)}


def test_a_disk_that_cannot_be_written_is_named(start_daemon: Start) -> None:
    """The job has the checkpoint, so "no checkpoint" would be a misleading error."""
    with client_of(daemon := start_daemon(shim="eio:record-a:1")) as client:
        save(client, 1)
        daemon.armed.touch()
        with pytest.raises(CheckpointFailedError, match=r"volume of job 'job'.*check the disk"):
            client.pin(1)
        assert steps(client) == [(1, False)]
