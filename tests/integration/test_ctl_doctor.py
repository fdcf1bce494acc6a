"""doctor, bench and tune on a real disk, and with a real daemon."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pccheckctl import cli
from pccheckctl.commands import config
from pccheckctl.doctor import machine
from pccheckctl.measure import bench, disk
from tests.integration.test_refusals import NOBODY, as_user
from tests.support import forked
from tests.support.ctl import Ctl, Ran
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, Trainer
from tests.support.waiting import until


@pytest.fixture
def daemon(start_daemon: Start) -> Daemon:
    return start_daemon("--allow-any-filesystem")


@pytest.fixture
def ask(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Ctl:
    def run(*arguments: object) -> Ran:
        code = cli.main(["--socket", str(daemon.socket), *map(str, arguments)])
        told = capsys.readouterr()
        return Ran(code, told.out, told.err)

    return run


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_LIMIT_S", "PASS_LIMIT_S", "READ_LIMIT_S", "FLUSH_LIMIT_S"):
        monkeypatch.setattr(bench, name, 0.2)


def test_doctor_finds_the_daemon_and_its_disk(ask: Ctl, daemon: Daemon) -> None:
    ran = ask("doctor", "--json")
    found = {one["check"]: one for one in ran.json["findings"]}
    assert ran.json["storage"] == str(daemon.storage)
    assert str(daemon.pid) in found["daemon"]["found"]
    assert found["daemon"]["level"] == "ok"
    assert found["socket"]["level"] == "ok"
    assert "used of 64.0 MiB" in found["daemon"]["found"]
    assert ran.code == (1 if ran.json["counts"]["problem"] else ran.code)
    assert list(daemon.storage.rglob("*.tmp")) == []


def test_doctor_asks_the_private_daemon_of_a_directory(
    start_daemon: Start, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCHECKD_LOG_BYTES", "65536")  # as autostart=True starts it
    daemon = start_daemon("--allow-any-filesystem")
    found = {one["check"]: one for one in ctl(daemon.storage, "doctor", "--json").json["findings"]}
    assert f"pid {daemon.pid}" in found["daemon"]["found"]
    assert str(daemon.socket.parent) in found["socket"]["found"]
    daemon.stop()
    found = {one["check"]: one for one in ctl(daemon.storage, "doctor", "--json").json["findings"]}
    assert "not checked: no daemon listens" in found["daemon"]["found"]


def test_doctor_and_the_log_name_misspelt_variables(
    start_daemon: Start, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Daemon.environment
    monkeypatch.setattr(
        Daemon, "environment", lambda self: plain(self) | {"PCCHECK_MAX_BANDWITH": "1GiB"}
    )
    daemon = start_daemon("--allow-any-filesystem")
    daemon.logs("did you mean PCCHECK_MAX_BANDWIDTH?")
    monkeypatch.setenv("PCCHECK_JOBB", "gpt")
    ran = ctl(None, "--socket", daemon.socket, "doctor", "--json")
    told = [one for one in ran.json["findings"] if one["check"] == "environment"]
    assert [one["level"] for one in told] == ["warning"] * 2
    assert "PCCHECK_JOBB" in told[0]["found"] and "did you mean PCCHECK_JOB?" in told[0]["found"]
    assert told[1]["found"].startswith("of the daemon: PCCHECK_MAX_BANDWITH")
    ran = ctl(None, "--socket", daemon.socket, "config", "show")
    assert "PCCHECK_MAX_BANDWITH" in ran.err


def test_doctor_names_a_volume_that_cannot_be_read(
    ask: Ctl, daemon: Daemon, trainer: Trainer
) -> None:
    trainer.save()
    trainer.close()
    (volume,) = daemon.storage.rglob("*.pcc")
    volume.write_bytes(b"\xff" * 8192)
    ran = ask("doctor")
    assert ran.code == 1
    assert f"{volume} cannot be read" in ran.out
    assert f"pccheckctl --socket {daemon.socket} drop" in ran.out


def test_a_directory_that_this_user_or_container_cannot_see(
    start_daemon: Start, tmp_path: Path
) -> None:
    """The daemon works, and checks its disk itself."""
    hidden = tmp_path / "private" / "storage"
    hidden.mkdir(parents=True)
    daemon = start_daemon("--allow-any-filesystem", "--storage", str(hidden))
    socket = ("--socket", str(daemon.socket), "doctor", "--json")
    unseen = f"{hidden} of the daemon cannot be seen from here (no permission, or a container)"

    def doctor(*command: str) -> tuple[int, dict[str, dict[str, str]]]:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.stdout, ran.stderr
        found = json.loads(ran.stdout)["findings"]
        return ran.returncode, {one["check"]: one for one in found if one["check"] != "open files"}

    if os.geteuid() == 0:
        daemon.open_to_everybody()
        hidden.parent.chmod(0o700)
        code, found = doctor(*as_user(NOBODY, "pccheckctl.cli", *socket))
        assert (code, found["storage"]["level"]) == (0, "ok"), found
        assert unseen in found["storage"]["found"] and "disk" not in found
        assert found["daemon"]["level"] == "ok"
        code, found = doctor(
            *as_user(NOBODY, "pccheckctl.cli", "--storage", str(hidden), "doctor", "--json")
        )
        assert code == 1
        assert "may not enter a directory above" in found["storage"]["found"]
    hidden.rename(tmp_path / "elsewhere")  # a container that does not mount it sees none either
    until(lambda: "it was removed, moved" in str(daemon.status()))
    code, found = doctor(sys.executable, "-m", "pccheckctl", *socket)
    assert unseen in found["storage"]["found"]
    assert "it was removed, moved" in found["daemon"]["found"]  # the daemon's own warning
    assert code == 3


def test_a_trainer_takes_as_many_files_as_doctor_says(
    start_daemon: Start, start_trainer: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "fronts", False)  # what tests start has another pipe
    daemon = start_daemon("--allow-any-filesystem")

    def files() -> int:
        return sum(1 for _ in Path(f"/proc/{daemon.pid}/fd").iterdir())

    before = files()
    for trainers, job in enumerate(("first", "second", "third"), start=1):
        trainer = start_trainer(daemon, job=job)
        for _ in range(3):
            trainer.save()
        least = machine.FILES_OF_A_USER + trainers * machine.FILES_OF_A_TRAINER
        allowed = range(least - 1, least + 2)  # one may come or go at any time
        # Memory still comes, and a hang-up is on its way.
        until(lambda allowed=allowed: files() - before in allowed, files)


@pytest.mark.usefixtures("_quick")
def test_bench_measures_and_leaves_nothing(ask: Ctl, daemon: Daemon) -> None:
    ran = ask("bench", "--size", "8MiB", "--chunk", "1MiB", "--json")
    assert ran.code == 0, ran.err
    document = ran.json
    assert document["file_bytes"] == 8 << 20
    assert set(document["write_bytes_per_s"]) == {"1", "2", "4"}
    assert all(rate > 0 for rate in document["write_bytes_per_s"].values())
    assert document["read_bytes_per_s"] > 0
    assert list(daemon.storage.glob("*pccheckctl*")) == []
    text = ask("bench", "--size", "8MiB", "--chunk", "1MiB", "--writers", 2).out
    assert "durable after" in text
    assert "--writers 2" in text


def test_bench_does_not_fill_the_disk(ctl: Ctl, tmp_path: Path) -> None:
    ran = ctl(tmp_path, "bench", "--size", "1024TiB")
    assert ran.code == 1
    assert "would leave less than a tenth" in ran.err
    assert ctl(tmp_path / "gone", "bench").code == 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_quick")
def test_a_directory_without_direct_io_is_measured_all_the_same(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_make_direct", lambda fd: False)
    ran = ctl(tmp_path, "bench", "--size", "8MiB", "--chunk", "1MiB")
    assert ran.code == 0
    assert "direct I/O is refused" in ran.out


@pytest.mark.usefixtures("_quick")
def test_tune_by_measuring(ctl: Ctl, tmp_path: Path) -> None:
    ran = ctl(tmp_path, "tune", "--checkpoint", "1GiB", "--step-time", "1s", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["interval_steps"] >= 1
    assert ran.json["rates"]["source"].startswith("measured now")


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("how", [(), ("--bandwidth", "1GiB")])
def test_tune_prints_a_command_that_pccheckd_takes(
    ctl: Ctl, tmp_path: Path, how: tuple[str, ...]
) -> None:
    place = tmp_path / "a b"
    place.mkdir()
    out = ctl(place, "tune", "--checkpoint", "1GiB", "--step-time", "1s", *how).out
    (line,) = [line for line in out.splitlines() if "pccheckd " in line]
    command, *flags = shlex.split(line)
    assert command == "pccheckd" and str(place) in flags
    assert "error" not in config.check([*flags, "--allow-any-filesystem"])


def test_tune_by_what_the_daemon_has_seen(ask: Ctl, daemon: Daemon, start_trainer: Connect) -> None:
    far = ("tune", "--checkpoint", "1GiB", "--step-time", "1s")
    ran = ask(*far)
    assert (ran.code, "fewer than 3 checkpoints" in ran.err) == (1, True)  # a daemon answers: no 12
    trainer = start_trainer(daemon)
    for _ in range(4):
        trainer.save()
    ran = ask(*far)
    assert (ran.code, "of about that size" in ran.err) == (1, True)
    (rank,) = json.loads(ask("status", "--json").out)["ranks"]
    size_bytes = rank["checkpoints"][-1]["payload_bytes"]
    words = ("tune", "--checkpoint", str(size_bytes), "--step-time", "1s")
    ran = ask(*words)
    assert ran.code == 0, ran.err
    assert "the daemon's last" in ran.out and f"--storage {daemon.storage} " in ran.out
    assert "f*   = ceil(T_w/(N q t))" in ran.out
    for _ in range(40):  # which status shows instead of those that were written
        trainer.step()
        trainer.wait_copied(trainer.checkpoint(to="memory"))
    document = json.loads(ask(*words, "--json").out)
    assert document["rates"]["write_bytes_per_s"] > 0
