"""Write errors, flush errors and a full disk under the real daemon (by a preloaded shim)."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import pytest

from pccheck import CheckpointFailedError, PCcheckClient, PccheckWarning
from pccheck.flight import waiting
from pccheck.flight.in_flight import InFlight
from pccheck.saving.saver import Saver
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Opened, Role
from tests.support.daemon import Start
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect, RemoteError
from tests.support.waiting import until


@pytest.mark.parametrize("fault", ["eio:data:2", "enospc:data:1", "eio:flush:1"])
def test_a_failed_write_moves_the_checkpoint_to_another_slot(
    start_daemon: Start, start_trainer: Connect, fault: str
) -> None:
    daemon = start_daemon(shim=fault)
    trainer = start_trainer(daemon)
    trainer.save()
    daemon.armed.touch()
    assert trainer.save() == "durable"
    assert trainer.save() == "durable"
    trainer.kill()
    daemon.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restored() == (3, "")


@pytest.mark.parametrize("fault", ["eio:record-a:1", "eio:record-b:1"])
def test_after_a_failed_record_the_volume_is_read_again(
    start_daemon: Start, start_trainer: Connect, fault: str
) -> None:
    daemon = start_daemon(shim=fault)
    trainer = start_trainer(daemon)
    trainer.save()
    daemon.armed.touch()
    trainer.step()
    handle = trainer.checkpoint()
    trainer.step()

    def goes_on() -> bool:
        last = trainer.checkpoint()
        trainer.step()
        return bool(trainer.evaluate(_settled) and trainer.state(last) == "durable")

    until(goes_on, trainer.states)  # the failed one fails; the volume is opened again
    assert trainer.state(handle) in ("failed", "durable", "superseded")


def test_a_volume_that_cannot_be_opened_is_told(start_daemon: Start) -> None:
    """After a restart of the daemon, to a training that has a client: it saves nothing."""
    daemon = start_daemon(shim="dead:open:1")
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        client.checkpoint([1]).wait_durable(30)
        daemon.kill()
        daemon.start()
        daemon.armed.touch()
        with pytest.warns(PccheckWarning, match="WITHOUT checkpoints.*Input/output error"):
            assert client.checkpoint([2]).state is State.FAILED
        with pytest.warns(PccheckWarning, match="1 checkpoint failed"):
            client.close()


def test_a_new_volume_that_cannot_be_opened_takes_no_space(start_daemon: Start) -> None:
    daemon = start_daemon(shim="dead:open:1")
    daemon.armed.touch()
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        for _ in range(2):
            with pytest.raises(CheckpointFailedError, match="Input/output error"):
                client.checkpoint([1]).wait_durable(30)
        assert not list(daemon.storage.rglob("*.pcc"))
        daemon.armed.unlink()
        client.checkpoint([2]).wait_durable(30)
        assert len(list(daemon.storage.rglob("*.pcc"))) == 1


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failure_after_the_call_is_told_by_the_next(start_daemon: Start, on_error: Any) -> None:
    daemon = start_daemon(shim="eio:record-a:1")
    with PCcheckClient(job="job", socket=daemon.socket, on_error=on_error) as client:
        client.checkpoint([1]).wait_durable(60)
        daemon.armed.touch()
        told = (
            pytest.raises(CheckpointFailedError, match="step 2 failed")
            if on_error == "raise"
            else pytest.warns(PccheckWarning, match="step 2 failed")
        )
        with told:
            handle = client.checkpoint([2])  # raises itself when the disk fails that soon
            with pytest.raises(CheckpointFailedError):
                handle.wait_durable(60)
            for step in range(3, 103):
                client.checkpoint([step], step=step)
        assert client.checkpoint([1000], step=1000).wait_durable(60).step == 1000


def test_a_failure_that_the_call_itself_raises_is_told_once(
    start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Saver.submit

    def slow(*arguments: Any) -> InFlight:
        """The disk fails before the call returns."""
        made = submit(*arguments)
        with suppress(CheckpointFailedError):
            waiting.wait_durable(made, 60)
        return made

    daemon = start_daemon(shim="eio:record-a:1")
    monkeypatch.setattr(Saver, "submit", slow)
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        client.checkpoint([1])
        daemon.armed.touch()
        with pytest.raises(CheckpointFailedError, match="step 2 failed"):
            client.checkpoint([2])
        assert client.checkpoint([3]).wait_durable(60).step == 3


def test_a_reader_that_stays_does_not_keep_a_stopped_volume(start_daemon: Start) -> None:
    size = 200_000
    daemon = start_daemon(shim="eio:record-a:1")
    with Rank(daemon.socket) as rank, ExitStack() as stack:
        rank.register(size)
        rank.save(1, payload_of(1, size))
        reader = stack.enter_context(Rank(daemon.socket, role=Role.READER))
        opened = reader.open()
        assert isinstance(opened, Opened)
        assert reader.load(opened) == (0, payload_of(1, size))
        daemon.armed.touch()
        assert rank.wait(rank.begin(2, payload_of(2, size))).outcome == State.FAILED
        rank.save(3, payload_of(3, size))
        opened = reader.open()
        assert isinstance(opened, Opened)
        assert opened.step == 3 and reader.load(opened) == (0, payload_of(3, size))


def _settled(trainer: object) -> bool:
    handle = trainer.handles[-1]  # type: ignore[attr-defined]
    try:
        handle.wait_durable(60)
    except Exception:
        return False
    return True


def test_after_a_failed_record_the_next_trainer_saves(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon(shim="enospc:record-a:1")
    trainer = start_trainer(daemon)
    trainer.save()
    daemon.armed.touch()
    trainer.step()
    with pytest.raises(RemoteError):
        trainer.wait_durable(trainer.checkpoint())
    trainer.kill()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 1
    assert again.save() == "durable"
