"""P7: a job that has checkpoints never begins at step 0 over them by accident."""

from __future__ import annotations

import contextlib

import pytest

from pccheck_native import catalog
from tests.support import live
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, RemoteError, Trainer


def earlier_run(daemon: Daemon, connect: Connect, step: int = 9) -> None:
    trainer = connect(daemon)
    trainer.step(step)
    trainer.wait_durable(trainer.checkpoint())
    trainer.kill()


def forgetful_run(daemon: Daemon, connect: Connect, **options: object) -> Trainer:
    """A run without restore() and without fresh=True, which makes more checkpoints than there are
    slots."""
    trainer = connect(daemon, **options)
    for _ in range(8):
        trainer.save()
    return trainer


def test_the_newest_of_the_run_before_is_kept(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    earlier_run(daemon, start_trainer)
    forgetful = forgetful_run(daemon, start_trainer)
    assert any("restore()" in warning for warning in forgetful.warnings)
    assert forgetful.recover(step=9)["wrong"] == ""


def test_a_checkpoint_that_is_still_written_counts(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """The previous run was killed when its only checkpoint was copied, but not durable."""
    daemon = start_daemon("--max-bandwidth", "1MiB")
    trainer = start_trainer(daemon)
    trainer.step(9)
    trainer.wait_copied(trainer.checkpoint())
    trainer.kill()
    forgetful = start_trainer(daemon)
    forgetful.checkpoint()
    assert any("a checkpoint of step 9 that was NOT restored" in w for w in forgetful.warnings)
    assert forgetful.recover(step=9)["wrong"] == ""


def test_a_run_that_went_on_in_a_new_directory_is_no_earlier_run(
    daemon: Daemon, trainer: Trainer
) -> None:
    """The storage directory was removed while daemon and trainer ran, and then the daemon
    restarted: the checkpoints are those of the same run."""
    trainer.save()
    new = daemon.root / "new"  # made first, so that it has another inode number
    new.mkdir()
    live.remove(daemon.storage)
    new.rename(daemon.storage)
    for _ in range(2):
        trainer.step()
        handle = trainer.checkpoint()
        with contextlib.suppress(RemoteError):  # the first save finds the file gone
            trainer.wait_durable(handle)
    daemon.kill()
    daemon.start()
    trainer.wait_durable(trainer.connects_again())
    assert not [w for w in trainer.warnings if "NOT restored" in w]
    assert not any(one.is_protected for one in catalog.scan(daemon.storage).checkpoints)


def test_what_was_never_copied_does_not_count(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--max-bandwidth", "256KiB", "--dram", "2MiB")
    trainer = start_trainer(daemon, [1_000_000])
    trainer.step()
    assert trainer.watch(trainer.checkpoint(), "copying") == "copying"
    trainer.kill()
    forgetful = start_trainer(daemon, [1000])
    forgetful.checkpoint()
    assert not [w for w in forgetful.warnings if "NOT restored" in w]


def test_fresh_says_that_it_is_meant(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    earlier_run(daemon, start_trainer)
    trainer = forgetful_run(daemon, start_trainer, fresh=True)
    with pytest.raises(RemoteError, match="NoCheckpoint"):
        trainer.recover(step=9)


def test_a_daemon_that_comes_late_does_not_look_empty(
    daemon: Daemon, start_trainer: Connect
) -> None:
    earlier_run(daemon, start_trainer)
    daemon.stop()
    trainer = start_trainer(daemon)
    with pytest.raises(RemoteError, match="DaemonUnreachable"):
        trainer.restore()
    daemon.start()
    assert trainer.restored() == (9, "")


def test_what_a_run_took_over_late_is_not_given_away(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """A run saved, restored that checkpoint, and was killed before its next one; the next run
    forgets to restore."""
    daemon = start_daemon("--slots", "3", "--keep", "2")
    earlier_run(daemon, start_trainer, step=3)
    trainer = start_trainer(daemon)
    trainer.step(4)
    trainer.wait_durable(trainer.checkpoint())
    assert trainer.restore()["step"] == 4
    trainer.kill()
    forgetful = forgetful_run(daemon, start_trainer)
    assert forgetful.recover(step=4)["wrong"] == ""


@pytest.mark.parametrize("part", ["user", "job", "volume"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_place_of_a_job_is_no_empty_job(
    daemon: Daemon, start_trainer: Connect, ctl: Ctl, part: str, there: bool
) -> None:
    """An administrator moved it to another disk, which may not be mounted now."""
    earlier_run(daemon, start_trainer)
    daemon.stop()
    (volume,) = daemon.storage.glob("*/*/*.pcc")
    link = {"user": volume.parent.parent, "job": volume.parent, "volume": volume}[part]
    elsewhere = daemon.root / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere if there else "/mnt/not-mounted")
    daemon.start()
    daemon.logs(f"{link} is a symbolic link")
    trainer = start_trainer(daemon)
    with pytest.raises(RemoteError, match=f"RefusedError.*{link} is a symbolic link"):
        trainer.restore()
    for words in (("show", "job"), ("export", "job", "-o", str(daemon.root / "x.pt"))):
        told = ctl(daemon.storage, *words)
        assert told.code == 1 and "is a symbolic link" in told.err
    assert ctl(daemon.storage, "verify").code == 14
    link.unlink()
    elsewhere.rename(link)
    assert trainer.restore()["step"] == 9
