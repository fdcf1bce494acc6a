"""The promises P1 to P4, with real daemons, trainers, files and SIGKILL."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer

Start = Callable[..., Daemon]
Connect = Callable[..., Trainer]

MIB = 1 << 18  # float32 elements of one MiB
SLOW = ("--max-bandwidth", "12MiB")


def test_a_checkpoint_comes_back_bit_for_bit(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon()
    trainer = start_trainer(daemon)
    assert not trainer.restore()["found"]
    for _ in range(5):
        trainer.step()
        trainer.checkpoint()
    assert trainer.wait_durable(4) in ("durable", "global")
    trainer.kill()

    again = start_trainer(daemon)
    assert again.restore()["step"] == 5
    assert again.check(5) == ""
    assert again.recover()["wrong"] == ""


def test_it_survives_the_daemon_too(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon()
    trainer = start_trainer(daemon)
    trainer.step(3)
    trainer.wait_durable(trainer.checkpoint())
    trainer.kill()
    daemon.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restore() == {
        "found": True, "step": 3, "sequence": 1, "source": "volume", "skipped": [],
    }  # fmt: skip
    assert again.check(3) == ""


def test_a_restarted_trainer_recovers_from_dram(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon()
    trainer = start_trainer(daemon)
    trainer.step(2)
    trainer.wait_durable(trainer.checkpoint())
    trainer.kill()
    again = start_trainer(daemon)
    assert again.restore()["source"] == "dram"
    assert again.check(2) == ""


def test_killed_while_copying_the_one_before_is_recovered(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB])
    trainer.step()
    trainer.wait_durable(trainer.checkpoint())
    trainer.step()
    handle = trainer.checkpoint()
    assert trainer.watch(handle, "copying") == "copying"
    trainer.kill()

    again = start_trainer(daemon, [8 * MIB])
    assert again.restore()["step"] == 1
    assert again.check(1) == ""


def test_killed_after_copied_it_becomes_durable(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon(*SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    assert trainer.wait_copied(trainer.checkpoint()) in ("copied", "writing")
    trainer.kill()

    again = start_trainer(daemon, [6 * MIB])
    assert again.restore()["step"] == 1
    assert again.check(1) == ""


def test_sigterm_drains_what_is_copied(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon(*SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    trainer.wait_copied(trainer.checkpoint())
    assert daemon.stop() == 0
    trainer.kill()
    daemon.start()
    again = start_trainer(daemon, [6 * MIB])
    assert again.restore()["step"] == 1
    assert again.check(1) == ""


def test_the_update_waits_for_the_copy(start_daemon: Start, start_trainer: Connect) -> None:
    """P4: M < m makes the copy slow; every update meanwhile is held by the gate."""
    daemon = start_daemon("--dram", "4MiB", "--max-bandwidth", "48MiB")
    trainer = start_trainer(daemon, [8 * MIB])
    handles = []
    for _ in range(4):
        trainer.step()
        handles.append(trainer.checkpoint())
    trainer.wait_durable(handles[-1])
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (4, "")


def test_without_the_gate_the_snapshot_is_torn(start_daemon: Start, start_trainer: Connect) -> None:
    """Shows that the test above can fail: the same copy, and an update that does not ask, in a way
    that torch does not count."""
    daemon = start_daemon("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB], gate="manual", hook=False)
    trainer.damage_ungated(1)
    handle = trainer.checkpoint(step=1)
    assert trainer.watch(handle, "copying") == "copying"
    trainer.damage_ungated(2)
    trainer.wait_durable(handle)
    assert "off from step 1" in trainer.recover()["wrong"]


def test_a_torn_snapshot_fails_where_torch_counts_the_change(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """P4: the same again, but for the counting."""
    daemon = start_daemon("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB], gate="manual", hook=False)
    trainer.damage_ungated(1)
    handle = trainer.checkpoint(step=1)
    assert trainer.watch(handle, "copying") == "copying"
    trainer.damage_ungated(2, counted=True)
    assert trainer.ended(handle) == "failed"
    assert "model.parts.0" in trainer.reason(handle)


def test_an_abandoned_snapshot_is_never_vouched_for(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """The daemon is stopped past the gate's deadline and continued: the trainer was let go, so the
    snapshot must fail, although the late daemon has all its chunks to copy on."""
    daemon = start_daemon("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB], stall_limit_s=1.0)
    trainer.step()
    trainer.wait_durable(trainer.checkpoint())
    trainer.step()
    handle = trainer.checkpoint()
    assert trainer.watch(handle, "copying") == "copying"
    daemon.kill(signal.SIGSTOP)
    assert trainer.step() == 3  # held for stall_limit_s, then let go
    daemon.kill(signal.SIGCONT)
    assert trainer.state(handle) == "failed"
    trainer.kill()
    again = start_trainer(daemon, [8 * MIB])
    assert again.restore()["step"] == 1
    assert again.check(1) == ""


def test_training_goes_on_without_the_daemon(start_daemon: Start, start_trainer: Connect) -> None:
    """P5: the daemon is SIGKILLed under load; one warning, and a reconnect when it is back."""
    daemon = start_daemon()
    trainer = start_trainer(daemon)
    trainer.step()
    trainer.wait_durable(trainer.checkpoint())
    trainer.step()
    trainer.checkpoint()
    daemon.kill()
    for _ in range(20):
        trainer.step()
        trainer.checkpoint()
    told = [w for w in trainer.warnings if "pccheckd" in w]
    assert len(told) == 1, trainer.warnings
    daemon.start()
    durable = ""
    for _ in range(200):  # the client reconnects with a back-off, at a later checkpoint
        trainer.step()
        handle = trainer.checkpoint()
        if trainer.evaluate(_is_connected):
            durable = trainer.wait_durable(handle)
            break
    assert durable in ("durable", "global", "superseded")


def _is_connected(trainer: object) -> bool:
    return bool(trainer.client.connected)  # type: ignore[attr-defined]
