"""Dropping jobs: by their owner through the daemon, without one, and by expiry when finished."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck_native import layout
from pccheck_store.observer import Observer
from pccheck_wire.errors import PccheckError
from pccheckctl import cli
from pccheckd.upkeep import expiry
from tests.support import live
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, Trainer
from tests.support.volumes import UID, Rank, make
from tests.support.waiting import until

Ctl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return make(tmp_path / "storage", 10, 20)


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ctl:
    monkeypatch.setenv("PCCHECK_SOCKET", "/nonexistent/socket")

    def run(place: Daemon | Path, *arguments: object) -> tuple[int, str, str]:
        where = (
            ["--socket", str(place.socket)] if isinstance(place, Daemon)
            else ["--storage", str(place)]
        )  # fmt: skip
        code = cli.main([*where, *map(str, arguments)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def files(storage: Path) -> list[Path]:
    return [file.path for file in layout.list_volumes(storage)]


# -- through the daemon ------------------------------------------------------------------------


def test_a_dry_run_names_files_and_bytes_and_drops_nothing(
    start_daemon: Start, storage: Path, ctl: Ctl
) -> None:
    daemon = start_daemon("--allow-any-filesystem", storage=storage)
    code, out, _ = ctl(daemon, "drop", "job", "--dry-run", "--json")
    document = json.loads(out)
    assert (code, document["dropped"]) == (0, False)
    (file,) = document["files"]
    assert Path(file["path"]) == files(storage)[0]
    assert (file["newest_step"], document["bytes"]) == (20, file["bytes"])
    text = ctl(daemon, "drop", "job", "--dry-run")[1]
    assert file["path"] in text
    assert "would be dropped" in text
    assert len(files(storage)) == 1


def test_dropping_has_to_be_confirmed(start_daemon: Start, storage: Path, ctl: Ctl) -> None:
    daemon = start_daemon("--allow-any-filesystem", storage=storage)
    code, _, err = ctl(daemon, "drop", "job")
    assert code == 2
    assert "--dry-run" in err
    assert files(storage)
    code, out, _ = ctl(daemon, "drop", "job", "--yes", "--json")
    assert (code, json.loads(out)["dropped"]) == (0, True)
    assert files(storage) == []
    assert ctl(daemon, "drop", "job", "--yes")[0] == 13
    assert ctl(daemon, "list")[1] == "no checkpoints\n"


def test_a_job_in_use_is_not_dropped_and_can_begin_anew_afterwards(
    start_daemon: Start, start_trainer: Connect, ctl: Ctl
) -> None:
    daemon = start_daemon("--allow-any-filesystem")
    trainer = start_trainer(daemon)
    trainer.save()
    code, _, err = ctl(daemon, "drop", "job", "--yes")
    assert code == 1
    assert f"in use: rank 0 is pid {trainer.pid}" in err
    trainer.save()
    trainer.close()
    assert ctl(daemon, "drop", "job", "--yes")[0] == 0
    assert files(daemon.storage) == []
    again = start_trainer(daemon)
    assert again.restore()["found"] is False
    assert again.save() == "durable"


def test_one_rank_alone(start_daemon: Start, tmp_path: Path, ctl: Ctl) -> None:
    place = make(tmp_path / "storage", 10, rank=0, world_size=2)
    make(place, 10, rank=1, world_size=2)
    daemon = start_daemon("--allow-any-filesystem", storage=place)
    assert ctl(daemon, "drop", "job", "--rank", 1, "--yes")[0] == 0
    assert [layout.parse_volume_path(place, path).rank for path in files(place)] == [0]
    code, _, err = ctl(daemon, "drop", "job", "--rank", 1, "--yes")
    assert code == 13
    assert "rank 1" in err


def test_a_rank_that_a_loaded_job_never_had(
    start_daemon: Start, start_trainer: Connect, ctl: Ctl
) -> None:
    daemon = start_daemon("--allow-any-filesystem")
    trainer = start_trainer(daemon)
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    trainer.close()
    for options in (["--dry-run"], ["--yes"]):
        code, _, err = ctl(daemon, "drop", "job", "--rank", 3, *options)
        assert code == 13
        assert "there is no volume of job 'job' rank 3" in err
    assert ctl(daemon, "show", "job")[0] == 0


def test_jobs_of_the_same_name_are_told_apart(start_daemon: Start, storage: Path, ctl: Ctl) -> None:
    make(storage, 5, uid=UID + 1)
    daemon = start_daemon("--allow-any-filesystem", storage=storage)
    code, _, err = ctl(daemon, "drop", "job", "--yes")
    assert code == 2
    assert "--uid" in err
    assert ctl(daemon, "drop", "job", "--uid", UID, "--yes")[0] == 0
    assert [layout.parse_volume_path(storage, path).uid for path in files(storage)] == [UID + 1]


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
@pytest.mark.parametrize(("uid", "told"), [(None, "no volume of job"), (UID, "may not drop")])
def test_nobody_drops_anothers(
    uid: int | None, told: str, start_daemon: Start, storage: Path
) -> None:
    daemon = start_daemon("--allow-any-filesystem", storage=storage)
    daemon.open_to_everybody()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
            with Observer(str(daemon.socket)) as observer:
                observer.drop("job", uid=uid, dry_run=False)
        except PccheckError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert told in answer.read()
    assert len(files(storage)) == 1


def test_a_full_disk_names_what_may_be_dropped_finished_jobs_first(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--allow-any-filesystem", "--max-storage", "64MiB")
    for job, done in (("running", False), ("over", True)):
        trainer = start_trainer(daemon, job=job)
        trainer.save()
        trainer.close(done=done)
    trainer = start_trainer(daemon, job="third", counts=[3_000_000])
    trainer.step()
    handle = trainer.checkpoint()
    until(lambda: trainer.state(handle) == "failed")
    told = " ".join([trainer.reason(handle), *trainer.warnings])
    assert f"pccheckctl --socket {daemon.socket} drop over (" in told
    assert told.index("drop over") < told.index("drop running")


# -- without a daemon --------------------------------------------------------------------------


def test_without_a_daemon(storage: Path, ctl: Ctl) -> None:
    code, out, _ = ctl(storage, "drop", "job", "--dry-run")
    assert code == 0
    assert "would be dropped" in out
    assert ctl(storage, "drop", "job", "--yes")[0] == 0
    assert files(storage) == []
    assert not layout.lock_path(storage).exists()  # it would be ours, not the daemon's


def test_not_behind_a_daemons_back(start_daemon: Start, storage: Path, ctl: Ctl) -> None:
    """A dry run finds the same."""
    daemon = start_daemon("--allow-any-filesystem", storage=storage)
    for how in ("--dry-run", "--yes"):
        code, _, err = ctl(storage, "drop", "job", how)
        assert code == 11
        assert f"pid {daemon.pid}" in err
        assert "leave --storage out, or name its socket with --socket PATH\n" in err
    assert files(storage)
    daemon.stop()
    assert ctl(storage, "drop", "job", "--dry-run")[0] == 0
    assert ctl(storage, "drop", "job", "--yes")[0] == 0


def test_the_private_daemon_of_a_directory_drops_its_jobs(
    start_daemon: Start,
    start_trainer: Connect,
    ctl: Ctl,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PCCHECKD_LOG_BYTES", "65536")
    daemon = start_daemon("--allow-any-filesystem")
    trainer = start_trainer(daemon)
    trainer.save()
    code, _, err = ctl(daemon.storage, "drop", "job", "--yes")
    assert code == 1 and f"in use: rank 0 is pid {trainer.pid}" in err
    trainer.close()
    assert ctl(daemon.storage, "drop", "job", "--dry-run")[0] == 0
    assert files(daemon.storage)
    assert ctl(daemon.storage, "drop", "job", "--yes")[0] == 0
    assert files(daemon.storage) == []


def test_the_daemon_of_a_directory_does_not_drop_for_a_copy_of_it(
    start_daemon: Start,
    storage: Path,
    tmp_path: Path,
    ctl: Ctl,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy contains the file that names the socket of the daemon."""
    monkeypatch.setenv("PCCHECKD_LOG_BYTES", "65536")
    start_daemon("--allow-any-filesystem", storage=storage)
    copy = live.copy(storage, tmp_path / "copy")
    assert layout.noted_socket(copy) is not None
    assert ctl(copy, "drop", "job", "--yes")[0] == 0
    assert files(copy) == [] and len(files(storage)) == 1
    assert ctl(copy, "trace")[0] == 12


def test_not_under_a_writer(storage: Path, ctl: Ctl) -> None:
    with Rank(storage):
        code, _, err = ctl(storage, "drop", "job", "--yes")
    assert code == 1
    assert "in use by another process" in err
    assert files(storage)


# -- expiry ------------------------------------------------------------------------------------


HOUR_S = 3600.0


def finish(daemon: Daemon, trainer: Trainer, *, done: bool = True) -> None:
    """Saves and ends; returns when the daemon has noticed the end."""
    trainer.save()
    trainer.close(done=done)
    until(lambda: daemon.status()["sessions"] == [])


def jobs_of(daemon: Daemon) -> set[str]:
    return {layout.parse_volume_path(daemon.storage, path).job for path in files(daemon.storage)}


def watched(daemon: Daemon) -> dict[str, float]:
    """Finished jobs, and for how long the daemon has seen each of them unused."""
    path = daemon.storage / expiry.STATE_NAME
    rows = json.loads(path.read_text())["jobs"] if path.exists() else []
    return {row["job"]: row["idle_s"] for row in rows}


def restart_later(daemon: Daemon, seconds: float) -> None:
    """Restarts the daemon as if daemons had watched the jobs for that long."""
    daemon.stop()
    path = daemon.storage / expiry.STATE_NAME
    document = json.loads(path.read_text())
    for row in document["jobs"]:
        row["idle_s"] += seconds
    path.write_text(json.dumps(document))
    daemon.start()


def looks(daemon: Daemon) -> None:
    """Makes the daemon look for finished jobs once more."""
    path = daemon.storage / expiry.STATE_NAME
    path.unlink(missing_ok=True)  # it is read at the start only
    daemon.kill(signal.SIGHUP)
    until(path.exists)


def test_finished_jobs_expire_and_others_do_not(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """A job that is due is announced first, and dropped at a later look."""
    daemon = start_daemon("--allow-any-filesystem", "--expire-finished", "1h")
    for job, done in (("running", False), ("over", True)):
        finish(daemon, start_trainer(daemon, job=job), done=done)
    looks(daemon)
    assert set(watched(daemon)) == {"over"}
    restart_later(daemon, HOUR_S)
    until(lambda: "'over' of uid" in daemon.log.read_text())
    daemon.logs("are deleted in 450 s, unless the job starts again")
    assert jobs_of(daemon) == {"running", "over"}
    looks(daemon)
    until(lambda: jobs_of(daemon) == {"running"})
    until(lambda: "finished and expired" in daemon.log.read_text())


def test_a_wall_clock_that_jumps_makes_no_job_old(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """A job that was written before the clock was set (1970), or that is read with a clock that is
    ahead."""
    daemon = start_daemon("--allow-any-filesystem", "--expire-finished", "1h")
    finish(daemon, start_trainer(daemon))
    daemon.stop()
    for path in files(daemon.storage):
        os.utime(path, (0, 0))
    daemon.start()
    for _ in range(4):
        looks(daemon)
    assert watched(daemon)["job"] < HOUR_S
    assert jobs_of(daemon) == {"job"}


def test_a_finished_job_that_was_started_anew_does_not_expire(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """Not while a trainer is connected, not after the trainer was killed, and not soon after the
    job has finished again."""
    daemon = start_daemon("--allow-any-filesystem", "--expire-finished", "1h")
    finish(daemon, start_trainer(daemon))
    looks(daemon)
    restart_later(daemon, HOUR_S)
    until(lambda: "are deleted in" in daemon.log.read_text())
    again = start_trainer(daemon)
    assert again.restore()["found"]
    looks(daemon)
    assert watched(daemon) == {} and jobs_of(daemon) == {"job"}
    again.save()
    again.kill()
    other = start_trainer(daemon)
    other.restore()
    finish(daemon, other)
    looks(daemon)
    assert watched(daemon)["job"] < HOUR_S and jobs_of(daemon) == {"job"}


def test_what_an_interrupted_drop_left_is_swept(
    start_daemon: Start, storage: Path, ctl: Ctl
) -> None:
    (path,) = files(storage)
    left = path.rename(path.with_name(path.name + ".dropped.tmp"))
    daemon = start_daemon("--allow-any-filesystem", storage=storage)
    assert not left.exists()
    daemon.kill(signal.SIGKILL)


@pytest.mark.parametrize("how", ["a drop", "a drop without a daemon", "an expiry"])
def test_the_room_of_a_drop_that_failed_is_given_back_by_the_next(
    start_daemon: Start, storage: Path, ctl: Ctl, how: str
) -> None:
    (path,) = files(storage)
    make(storage, 30, job="other")
    flags = ("--expire-finished", "1h") if how == "an expiry" else ()
    place: Daemon | Path = storage
    if how != "a drop without a daemon":
        place = daemon = start_daemon("--allow-any-filesystem", *flags, storage=storage)
    left = path.rename(path.with_name(path.name + ".dropped.tmp"))  # as when unlink fails
    if how == "an expiry":
        looks(daemon)
    else:
        assert ctl(place, "drop", "other", "--yes")[0] == 0
    until(lambda: not left.parent.exists())
