"""Unreadable directories, and other files in place of a volume: the job is refused, and every place
that a user looks at reports the cause. Other jobs and users are not affected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pccheck import (
    CheckpointFailedError,
    PCcheckClient,
    PccheckError,
    PccheckWarning,
    UnreadableError,
)
from pccheck_native import layout
from pccheck_wire.messages import CheckpointState
from tests.conftest import SMALL
from tests.integration.test_refusals import NOBODY, as_user, refused
from tests.support.ctl import Ctl, Ran
from tests.support.daemon import Daemon, Start
from tests.support.handpage import Page, block_of
from tests.support.rank import Rank
from tests.support.volumes import lose_record, wipe_records
from tests.support.waiting import until

#: Without these capabilities file permissions apply to a process of root as well.
CONFINED = (
    "setpriv", "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override,-dac_read_search", "--",
)  # fmt: skip


class Confined(Daemon):
    def command(self, *flags: str) -> list[str]:
        return [*CONFINED, *super().command(*flags)]


@pytest.fixture
def confined() -> Iterator[Confined]:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, and root")
    with Confined(*SMALL) as daemon:
        yield daemon


def save(daemon: Daemon, job: str, *steps: int) -> None:
    with PCcheckClient(job, socket=daemon.socket) as client:
        for step in steps:
            client.checkpoint({"step": step}, step=step).wait_durable(60)


def status(daemon: Daemon, ctl: Ctl) -> Ran:
    return ctl(None, "--socket", daemon.socket, "status")


def restored(daemon: Daemon, job: str) -> int | None:
    with PCcheckClient(job, socket=daemon.socket) as client:
        return client.recover().step


@pytest.mark.parametrize("whose", ["job", "user"])
def test_a_directory_that_cannot_be_read_hides_no_other(confined: Confined, whose: str) -> None:
    daemon = confined.start()
    for job in ("good", "bad"):
        save(daemon, job, 1)
    daemon.stop()
    closed = daemon.storage / "0" / "bad"
    if whose == "user":
        closed = closed.parent.rename(daemon.storage / "1234")
        (daemon.storage / "0").mkdir()
        (closed / "good").rename(daemon.storage / "0" / "good")
    (closed / "rank-0.7.pcc.x.tmp").touch()
    closed.chmod(0)

    def offline(command: str) -> tuple[int, str]:
        words = "-m", "pccheckctl", "--storage", str(daemon.storage), *command.split()
        ran = subprocess.run(
            [*CONFINED, sys.executable, *words], capture_output=True, text=True, check=False
        )
        assert "Traceback" not in ran.stderr
        return ran.returncode, ran.stdout + ran.stderr

    for command, code in (("list", 14), ("status", 3)):
        ended, told = offline(command)
        assert (ended, "good" in told, str(closed) in told) == (code, True, True), told
    codes = [offline(f"verify {job}")[0] for job in ("", "good", "bad")]
    assert codes == [14, 0 if whose == "job" else 14, 1]  # that user may have a job "good", too
    daemon.start()
    daemon.logs(f"{closed} cannot be read: Permission denied")
    assert restored(daemon, "good") == 1
    if whose == "job":
        with pytest.raises(PccheckError, match=f"{closed}: Permission denied.*chown 0"):
            restored(daemon, "bad")


def test_a_job_whose_directory_is_closed_while_it_saves_is_told_the_fix(
    confined: Confined,
) -> None:
    daemon = confined.start()
    with PCcheckClient("job", socket=daemon.socket) as client:
        client.checkpoint({"step": 1}, step=1).wait_durable(60)
        closed = daemon.storage / "0" / "job"
        closed.chmod(0)
        for step in (2, 3):
            fix = "chown 0"
            with pytest.raises(CheckpointFailedError, match=fix):
                client.checkpoint({"step": step}, step=step).wait_durable(60)
        closed.chmod(0o700)
        client.checkpoint({"step": 4}, step=4).wait_durable(60)


def test_an_immutable_volume_is_named_with_its_attribute(daemon: Daemon) -> None:
    """The owner and the mode that such a file needs are those that it has."""
    with PCcheckClient("job", socket=daemon.socket) as client:
        client.checkpoint({"step": 1}, step=1).wait_durable(60)
        (volume,) = daemon.storage.glob("*/job/*.pcc")
        if subprocess.run(["chattr", "+i", volume], capture_output=True, check=False).returncode:
            pytest.skip("needs root, and a file system with the attributes of ext4")
        try:
            for step in (2, 3):
                with pytest.raises(CheckpointFailedError, match="chattr -i"):
                    client.checkpoint({"step": step}, step=step).wait_durable(60)
        finally:
            subprocess.run(["chattr", "-i", volume], check=True)
        client.checkpoint({"step": 4}, step=4).wait_durable(60)


def test_a_lock_file_that_is_none_is_to_be_removed() -> None:
    with Daemon(*SMALL) as daemon:
        layout.lock_path(daemon.storage).mkdir()
        code, told = refused(daemon)
        assert (code, f"remove {layout.lock_path(daemon.storage)}" in told) == (10, True), told


def test_an_impossible_request_ends_one_checkpoint(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(4096)
        page = Page(rank.attachment.page_fd)
        page.request(1, block_of(1, 4096, tree_offset=4089))
        daemon.logs("failed: the tree does not lie in the payload")
        page.request(2, block_of(2, 4096, level=2))
        daemon.logs("failed: this pccheckd saves it to disk or memory, and not to level 2")
        assert rank.describe(2).state is CheckpointState.FAILED
        page.request(3, block_of(2, 4096))  # another one's block
        daemon.logs("ended: it violated the protocol")
        page.close()


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "file": Path.touch,
    "directory": Path.mkdir,
}


@pytest.mark.parametrize(
    ("place", "kind"),
    [("0", "file"), ("0/job", "file"), ("0/job", "fifo"), ("0/job/rank-0.0.pcc", "directory"),
     ("0/job/rank-0.0.pcc", "fifo"), ("0/job/rank-0.1.pcc", "fifo")],
)  # fmt: skip
def test_something_else_in_place_of_a_job_is_no_empty_job(
    daemon: Daemon, ctl: Ctl, place: str, kind: str
) -> None:
    save(daemon, "job", 1)
    daemon.stop()
    path = daemon.storage / place.replace("0", str(os.getuid()), 1)
    away = daemon.root / "away"
    if path.exists():
        path.rename(away)
    KINDS[kind](path)
    what = f"{path} is not a {'regular file' if path.suffix else 'directory'}"
    daemon.start()
    daemon.logs(what)
    for fresh in (False, True):
        with (
            pytest.raises(PccheckError, match=f"{what}.*move it away"),
            PCcheckClient("job", socket=daemon.socket, fresh=fresh) as client,
        ):
            client.recover()
    listed = ctl(daemon.storage, "list")
    assert (listed.code, what in listed.err) == (14, True), listed.err
    told = status(daemon, ctl)
    assert (told.code, what in told.out) == (3, True), told.out
    assert ctl(daemon.storage, "verify").code == 14
    if away.exists():
        path.rmdir() if kind == "directory" else path.unlink()
        away.rename(path)
    else:
        path.unlink()
    until(lambda: status(daemon, ctl).code == 0)
    assert restored(daemon, "job") == 1


@pytest.mark.parametrize("lost", ["volume", "record"])
def test_what_was_found_at_the_start_is_told_until_it_is_mended(
    daemon: Daemon, ctl: Ctl, lost: str
) -> None:
    """Status reports the problem before the job is started again: users do not read the log until
    then."""
    save(daemon, "job", 1, 2)
    daemon.stop()
    (volume,) = daemon.storage.glob("*/*/*.pcc")
    whole = volume.read_bytes()
    if lost == "volume":
        volume.write_bytes(bytes(4096))
    else:
        lose_record(volume)
    daemon.start()
    told = status(daemon, ctl)
    assert (told.code, str(volume) in told.out) == (3, True), told.out
    daemon.open_to_everybody()
    ran = subprocess.run(
        as_user(NOBODY, "pccheckctl.cli", "--socket", str(daemon.socket), "status"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, str(volume) in ran.stdout) == (0, False), ran.stdout + ran.stderr
    volume.write_bytes(whole)
    until(lambda: status(daemon, ctl).code == 0)
    assert restored(daemon, "job") == 2


def test_a_volume_that_cannot_be_read_is_no_empty_volume(daemon: Daemon, ctl: Ctl) -> None:
    """A daemon has the volume open. Its checkpoints are durable, and may become readable again."""
    save(daemon, "other", 5)
    with PCcheckClient("job", socket=daemon.socket) as client:
        client.checkpoint({"step": 1}, step=1).wait_durable(60)
        (volume,) = daemon.storage.glob("*/job/*.pcc")
        write_back = wipe_records(volume)
        with pytest.raises(
            UnreadableError, match=f"{volume} cannot be read: no valid.*are not known"
        ):
            client.steps()
        for place in ("--socket", daemon.socket), ("--storage", daemon.storage):
            for words in ("list",), ("list", "job"), ("list", "--json"), ("list", "--rank", "0"):
                assert ctl(None, *place, *words).code == 14, (place, words)
            assert ctl(None, *place, "list", "job").out == "no checkpoint can be read\n"
            assert ctl(None, *place, "list", "other").code == 0
            assert ctl(None, *place, "list", "job", "--rank", "1").code == 13
            assert ctl(None, *place, "list", "--rank", "1").code == 0
        write_back()
        assert [one.step for one in client.steps()] == [1]
        assert ctl(None, "--socket", daemon.socket, "list").code == 0


def test_what_can_be_read_beside_such_a_volume_is_listed(daemon: Daemon) -> None:
    save(daemon, "job", 1)
    (volume,) = daemon.storage.glob("*/job/*.pcc")
    later = volume.with_name("rank-0.1.pcc")
    later.write_bytes(bytes(1 << 20))
    with PCcheckClient("job", socket=daemon.socket) as client:
        with pytest.warns(PccheckWarning, match=f"{later} cannot be read.*not among the steps"):
            assert [one.step for one in client.steps()] == [1]
        later.unlink()


def test_a_run_does_not_end_with_the_claim_that_nothing_is_durable(start_daemon: Start) -> None:
    daemon = start_daemon(shim="dead:data:1")
    with (
        pytest.warns(PccheckWarning, match="1 checkpoint failed since step 1") as told,
        PCcheckClient("job", socket=daemon.socket) as client,
    ):
        client.checkpoint({"step": 1}, step=1).wait_durable(60)
        daemon.armed.touch()
        with pytest.raises(CheckpointFailedError):
            client.checkpoint({"step": 2}, step=2).wait_durable(60)
        (volume,) = daemon.storage.glob("*/job/*.pcc")
        wipe_records(volume)
    assert not any("no durable checkpoint" in str(one.message) for one in told)
