"""P2, durable: a durable checkpoint survives SIGKILL, and is in a file under the expected name. The
daemon notices in time that files or directories were removed, replaced, moved or truncated."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import _core, catalog
from tests.integration.test_group import end, ranks, restored, save
from tests.support import live, waiting
from tests.support.ctl import Ran
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, RemoteError, Trainer

SEED = int(os.environ.get("SEED", "1"))


def pccheckctl(daemon: Daemon, *words: str) -> Ran:
    ran = subprocess.run(
        [sys.executable, "-m", "pccheckctl", "--socket", str(daemon.socket), *words],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in ran.stderr
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def until(daemon: Daemon, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Waits for a status that fulfils a condition; returns the status."""
    return waiting.until(lambda: found if holds(found := daemon.status()) else {})


def is_there(document: dict[str, Any]) -> bool:
    """The storage directory."""
    away = ("the storage directory", "another file system")
    return not any(warning.startswith(away) for warning in document["warnings"])


def volume_of(daemon: Daemon) -> Path:
    (found,) = daemon.storage.rglob("*.pcc")
    return found


def saved(trainer: Trainer) -> tuple[str, str]:
    """Saves one more checkpoint; returns its last state and the reason."""
    trainer.step()
    handle = trainer.checkpoint()
    return trainer.ended(handle), trainer.reason(handle)


def steps_on_disk(daemon: Daemon) -> set[int]:
    """Steps of the whole checkpoints below a directory. In a copy of a file that was being written,
    older checkpoints may be damaged. A file of which no checkpoint is kept goes meanwhile."""
    found = set()
    for one in catalog.scan(daemon.storage).checkpoints:
        try:
            volume = _core.Volume(one.volume_path, writable=False, allow_buffered=True)
        except FileNotFoundError:
            continue
        with contextlib.suppress(_core.NativeError):
            volume.verify(one.id.sequence)
            found.add(one.id.step)
        volume.close()
    return found


def remove_file(volume: Path) -> None:
    volume.unlink()


def remove_job(volume: Path) -> None:
    live.remove(volume.parent)


def remove_user(volume: Path) -> None:
    live.remove(volume.parent.parent)


def replace(volume: Path) -> None:
    """Replaces a file, as a backup tool or rsync does."""
    copy = volume.with_name("copy")
    shutil.copy(volume, copy)
    copy.rename(volume)


def replace_by_rubbish(volume: Path) -> None:
    other = volume.with_name("other")
    other.write_bytes(b"not a volume" * 10_000)
    other.rename(volume)


def cut(volume: Path) -> None:
    os.truncate(volume, volume.stat().st_size // 2)


def empty(volume: Path) -> None:
    os.truncate(volume, 0)


DEEDS = (remove_file, remove_job, remove_user, replace, replace_by_rubbish, cut, empty)


@pytest.mark.parametrize("deed", DEEDS)
def test_what_is_told_durable_lies_in_a_file_that_can_be_found(
    daemon: Daemon, start_trainer: Connect, deed: Callable[[Path], None]
) -> None:
    trainer = start_trainer(daemon)
    assert saved(trainer)[0] == "durable"
    path = volume_of(daemon)
    deed(path)
    end, reason = saved(trainer)
    if end == "failed":  # else the daemon noticed before the record, and made another file
        assert str(path) in reason or "volume" in reason
        assert pccheckctl(daemon, "status").code == 3
        assert str(path) in " ".join(daemon.status()["warnings"])
        end, reason = saved(trainer)
    assert end == "durable", reason
    newest = trainer.step(0)
    assert newest in steps_on_disk(daemon)
    daemon.kill()
    daemon.start()
    trainer.kill()
    again = start_trainer(daemon)
    assert again.restored() == (newest, "")


@pytest.mark.parametrize("deed", DEEDS)
def test_a_file_that_goes_while_its_volume_has_stopped_is_replaced(
    start_daemon: Start, start_trainer: Connect, deed: Callable[[Path], None]
) -> None:
    """A commit record failed, so the next save opens the file again, and finds another file."""
    daemon = start_daemon(shim="eio:record-a:1")
    trainer = start_trainer(daemon)
    assert saved(trainer)[0] == "durable"
    daemon.armed.touch()
    assert saved(trainer)[0] == "failed"
    deed(volume_of(daemon))
    ends = [saved(trainer) for _ in range(2)]
    assert ends[-1][0] == "durable", ends
    newest = trainer.step(0)
    assert newest in steps_on_disk(daemon)
    trainer.kill()
    daemon.kill()
    daemon.armed.unlink()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restored() == (newest, "")


def test_nothing_is_told_durable_that_a_restart_does_not_find(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """Changes of the storage directory, one after another, at random moments of a training that
    saves each step."""
    chance = random.Random(SEED)
    trainer = start_trainer(daemon)
    for _ in range(12):
        for _ in range(chance.randrange(1, 4)):
            trainer.step()
            trainer.checkpoint()
        files = sorted(daemon.storage.rglob("*.pcc"))
        if files:
            chance.choice(DEEDS)(files[-1])
        reasons = []
        while not reasons or reasons[-1][0] != "durable":
            reasons.append(saved(trainer))
            assert len(reasons) < 20, f"SEED={SEED}: {reasons}"
        assert trainer.step(0) in steps_on_disk(daemon), f"SEED={SEED}"
    newest = trainer.step(0)
    trainer.kill()
    daemon.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restored() == (newest, "")


@pytest.mark.parametrize("deed", [remove_file, remove_job, remove_user])
def test_a_restore_does_not_come_out_of_a_file_that_was_removed(
    daemon: Daemon, start_trainer: Connect, deed: Callable[[Path], None]
) -> None:
    first = start_trainer(daemon)
    assert saved(first)[0] == "durable"
    first.kill()
    deed(volume_of(daemon))
    again = start_trainer(daemon)
    assert not again.restore()["found"]
    assert saved(again)[0] == "durable"
    assert steps_on_disk(daemon) == {1}


def test_a_removed_file_is_noticed_without_a_checkpoint(daemon: Daemon, trainer: Trainer) -> None:
    assert saved(trainer)[0] == "durable"
    path = volume_of(daemon)
    path.unlink()
    until(daemon, lambda document: document["daemon"]["state"] == "degraded")
    found = until(daemon, lambda document: document["ranks"][0]["newest"] is None)
    assert str(path) in " ".join(found["warnings"])
    assert saved(trainer)[0] == "durable"
    found = until(daemon, lambda document: document["daemon"]["state"] == "ok")
    assert found["notices"] == []


def test_a_job_whose_files_were_removed_is_listed_until_it_is_dropped(
    daemon: Daemon, trainer: Trainer
) -> None:
    assert saved(trainer)[0] == "durable"
    trainer.close()
    path = volume_of(daemon)
    remove_job(path)
    found = until(daemon, lambda document: document["ranks"][0]["newest"] is None)
    (note,) = found["notices"]
    assert f"{path} was removed or moved away" in note
    for state in ("durable", "copied"):
        told = pccheckctl(daemon, "wait", "job", "--newest", "--for", state, "--timeout", "60")
        assert told.code == 1 and "step 1 was durable, and is lost" in told.err, told.err
        assert str(path) in told.err
    told = pccheckctl(daemon, "drop", "job", "--yes")
    assert (told.code, told.out) == (0, "0 files, 0 B: dropped\n")
    told = pccheckctl(daemon, "status")
    assert (told.code, "NO CHECKPOINT" in told.out, "note:" in told.out) == (0, False, False)
    assert pccheckctl(daemon, "drop", "job", "--yes").code == 13


def test_a_replaced_file_is_read_as_what_it_is(daemon: Daemon, start_trainer: Connect) -> None:
    trainer = start_trainer(daemon)
    assert saved(trainer)[0] == "durable"
    path = volume_of(daemon)
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    assert saved(trainer)[0] == "durable"
    trainer.kill()
    copy.rename(path)
    again = start_trainer(daemon)
    assert again.restored() == (1, "")
    assert saved(again)[0] == "durable"
    assert steps_on_disk(daemon) >= {1, 2}


def test_a_job_whose_broken_volume_was_removed_starts_without_a_new_daemon(
    daemon: Daemon, start_trainer: Connect
) -> None:
    first = start_trainer(daemon)
    assert saved(first)[0] == "durable"
    first.kill()
    cut(volume_of(daemon))
    refused = start_trainer(daemon)
    with pytest.raises(RemoteError, match="rank-0"):
        refused.restore()
    refused.kill()
    remove_job(volume_of(daemon))
    again = start_trainer(daemon)
    assert not again.restore()["found"]
    assert saved(again)[0] == "durable"


def test_a_storage_directory_that_was_moved_away_and_back(
    daemon: Daemon, start_trainer: Connect
) -> None:
    trainer = start_trainer(daemon)
    assert saved(trainer)[0] == "durable"
    away = daemon.storage.with_name("away")
    daemon.storage.rename(away)
    end, _ = saved(trainer)
    assert end == "failed"
    end, reason = saved(trainer)
    assert (end, str(daemon.storage) in reason) == ("failed", True), reason
    told = pccheckctl(daemon, "status")
    assert told.code == 3
    assert f"{daemon.storage} is not there" in told.out
    for command in ("list", "verify", "show job", "drop job --yes"):
        told = pccheckctl(daemon, *command.split())
        assert told.code == 10, (command, told.err)
        assert f"{daemon.storage} is not there" in told.err, (command, told.err)
    with pytest.raises(RemoteError, match=f"{daemon.storage} is not there"):
        start_trainer(daemon, job="late", on_error="raise")
    away.rename(daemon.storage)
    until(daemon, is_there)
    assert saved(trainer)[0] == "durable"
    newest = trainer.step(0)
    assert {1, newest} <= steps_on_disk(daemon)
    trainer.kill()
    again = start_trainer(daemon)
    assert again.restored() == (newest, "")


def test_a_storage_directory_that_was_made_anew_is_used(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """rm -rf and mkdir: the usual way to start over."""
    trainer = start_trainer(daemon)
    assert saved(trainer)[0] == "durable"
    live.remove(daemon.storage)
    daemon.storage.mkdir()
    again = start_trainer(daemon, job="other")
    assert not again.restore()["found"]
    assert saved(again)[0] == "durable"
    ends = [saved(trainer)[0] for _ in range(2)]
    assert ends[-1] == "durable"
    assert pccheckctl(daemon, "list", "job").code == 0
    with Daemon(storage=daemon.storage) as second:
        ran = subprocess.run(
            second.command(), capture_output=True, text=True, env=second.environment(), timeout=120
        )
        assert str(daemon.pid) in ran.stderr  # the new directory is locked as well


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_a_disk_that_is_mounted_over_the_storage_directory_gets_no_checkpoint(
    daemon: Daemon, trainer: Trainer
) -> None:
    assert saved(trainer)[0] == "durable"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", str(daemon.storage)], check=False)
    if mounted.returncode != 0:
        pytest.skip("may not mount")
    try:
        assert saved(trainer)[0] == "failed"
        end, reason = saved(trainer)
        assert end == "failed"
        assert "mounted" in reason
        assert list(daemon.storage.iterdir()) == []
        assert "mounted" in pccheckctl(daemon, "status").out
    finally:
        subprocess.run(["umount", "-l", str(daemon.storage)], check=True)
    until(daemon, is_there)
    assert saved(trainer)[0] == "durable"  # in the volume that is there again
    assert {1, trainer.step(0)} <= steps_on_disk(daemon)


@pytest.mark.parametrize("deed", [remove_file, replace, cut])
def test_ranks_agree_again_when_the_file_of_one_is_gone(
    daemon: Daemon, start_trainer: Connect, deed: Callable[[Path], None]
) -> None:
    group = ranks(start_trainer, daemon, "0")
    for _ in range(3):
        save(group)
    deed(next(daemon.storage.rglob("rank-1.*.pcc")))
    for _ in range(2):  # the first one may fail
        for trainer in group:
            trainer.step()
        handles = [trainer.checkpoint() for trainer in group]
        ends = [trainer.ended(at) for trainer, at in zip(group, handles, strict=True)]
    assert set(ends) <= {"durable", "global"}
    newest = group[0].step(0)
    assert newest in steps_on_disk(daemon)
    end(group)
    daemon.kill()
    daemon.start()
    assert restored(ranks(start_trainer, daemon, "1")) == [newest, newest]


def test_what_replaced_an_outgrown_file_is_not_removed(
    daemon: Daemon, start_trainer: Connect
) -> None:
    small = start_trainer(daemon, [1000])
    assert saved(small)[0] == "durable"
    old = volume_of(daemon)
    small.kill()
    large = start_trainer(daemon, [900_000], fresh=True)
    replace(old)
    inode = old.stat().st_ino
    for _ in range(3):
        saved(large)
    assert saved(large)[0] == "durable"
    assert large.step(0) in steps_on_disk(daemon)
    assert old.exists() is False or old.stat().st_ino == inode


def test_a_checkpoint_comes_back_bit_for_bit(daemon: Daemon, start_trainer: Connect) -> None:
    trainer = start_trainer(daemon)
    assert not trainer.restore()["found"]
    for _ in range(5):
        trainer.step()
        trainer.checkpoint()
    assert trainer.wait_durable(4) in ("durable", "global")
    trainer.kill()

    again = start_trainer(daemon)
    assert again.restored() == (5, "")
    assert again.recover()["wrong"] == ""


def test_it_survives_the_daemon_too(daemon: Daemon, start_trainer: Connect) -> None:
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
