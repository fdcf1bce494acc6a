"""P1, copied: a copied checkpoint, or a newer one, becomes durable, whatever happens to the
trainer. With real daemons, trainers, files and SIGKILL."""

from __future__ import annotations

from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect

MIB = 1 << 18  # float32 elements of one MiB
SLOW = ("--max-bandwidth", "4MiB")


def test_a_restarted_trainer_recovers_from_dram(daemon: Daemon, start_trainer: Connect) -> None:
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
    trainer.save()
    trainer.step()
    handle = trainer.checkpoint()
    assert trainer.watch(handle, "copying") == "copying"
    trainer.kill()

    again = start_trainer(daemon, [8 * MIB])
    assert again.restored() == (1, "")


def test_killed_after_copied_it_becomes_durable(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon(*SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    assert trainer.wait_copied(trainer.checkpoint()) in ("copied", "writing")
    trainer.kill()

    again = start_trainer(daemon, [6 * MIB])
    assert again.restored() == (1, "")


def test_sigterm_drains_what_is_copied(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon(*SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    trainer.wait_copied(trainer.checkpoint())
    assert daemon.stop() == 0
    trainer.kill()
    daemon.start()
    again = start_trainer(daemon, [6 * MIB])
    assert again.restored() == (1, "")
