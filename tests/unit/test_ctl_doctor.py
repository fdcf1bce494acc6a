"""Findings: what each costs and how it is mended, what they come to, and checks that cannot run."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck_native import mounts
from pccheckctl import checks_daemon, checks_disk, checks_kernel, checks_memory, cli, disk, doctor
from pccheckctl.findings import OK, PROBLEM, WARNING, Finding, guarded, ok, problem, warning


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PCCHECK_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.delenv("PCCHECK_STORAGE", raising=False)


FINE = ok("a", "fine")
SLOW = warning("b", "slow", costs="time", mend="wait")
WEAK = warning("c", "weak", costs="data", mend="mend", promise="durable")
BROKEN = problem("d", "broken", costs="all", mend="repair")


@pytest.mark.parametrize(
    ("found", "code"),
    [([FINE], 0), ([FINE, SLOW], 0), ([SLOW, WEAK], 3), ([WEAK, BROKEN], 1)],
)
def test_the_exit_code_is_what_the_worst_comes_to(found: list[Finding], code: int) -> None:
    assert doctor.exit_code(found) == code


def test_the_text_says_costs_and_mend() -> None:
    text = doctor.as_text(Path("/x"), [FINE, WEAK])
    assert "costs: data\n" in text
    assert "mend: mend\n" in text
    assert text.endswith("0 problems, 1 warning; weakened: durable")
    assert doctor.as_text(Path("/x"), [FINE]).endswith("all is well")
    assert "--storage DIR" in doctor.as_text(None, [FINE])


def test_a_check_that_fails_says_so_and_stops_no_other() -> None:
    def failing() -> Iterator[Finding]:
        yield FINE
        raise ZeroDivisionError("by nothing")

    (found,) = guarded("x", failing)
    assert found.level == WARNING
    assert "by nothing" in found.found


@pytest.mark.parametrize("check", [
    checks_kernel.kernel, checks_kernel.limits, checks_kernel.clocks,
    checks_memory.huge_pages, lambda: checks_memory.shared_memory(0),
])  # fmt: skip
def test_every_check_runs_here_and_says_what_its_finding_costs(check: object) -> None:
    found = list(check())  # type: ignore[operator]
    assert found
    for one in found:
        assert one.found
        assert (one.level == OK) == (not one.costs) == (not one.mend)


def test_more_memory_than_there_is_costs_a_promise() -> None:
    (found,) = checks_memory.shared_memory(1 << 60)
    assert (found.level, found.promise) == (WARNING, "copied")


@pytest.mark.parametrize(
    ("kind", "options", "level", "told"),
    [
        ("ext4", ("rw",), OK, "ext4"),
        ("nfs4", ("rw",), PROBLEM, "network"),
        ("overlay", ("rw",), PROBLEM, "layer"),
        ("ext4", ("rw", "nobarrier"), WARNING, "nobarrier"),
        ("xfs", ("ro",), PROBLEM, "read-only"),
    ],
)
def test_file_systems(
    kind: str, options: tuple[str, ...], level: str, told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = mounts.Mount("0:0", "/mnt", kind, options)
    monkeypatch.setattr(mounts, "mount_of", lambda path, table: found)
    (finding,) = checks_disk.file_system(tmp_path)
    assert finding.level == level
    assert told in finding.found


def test_a_disk_that_returns_other_bytes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "reads_back", lambda fd, size: False)
    (found,) = checks_disk.direct_io(tmp_path)
    assert (found.level, found.check) == (PROBLEM, "disk")


def test_a_disk_that_fails_names_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, size: int) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "reads_back", broken)
    (found,) = checks_disk.direct_io(tmp_path)
    assert found.level == PROBLEM
    assert "EIO" in found.found


def test_a_slow_flush_is_a_warning() -> None:
    (found,) = checks_disk._judged(True, [0.1, 0.2, 0.3], disk.Alignment(512, 4096))
    assert found.level == WARNING
    assert "200 ms" in found.found
    assert "4096 bytes on disk" in found.found


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    list(checks_disk.direct_io(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_numa_nodes_are_counted_with_what_is_placed(tmp_path: Path) -> None:
    for name, cpus in (("node0", "0-7\n"), ("node1", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    (one,) = checks_memory.numa(str(tmp_path))  # node1 is memory alone
    (tmp_path / "node1" / "cpulist").write_text("8-15\n")
    (two,) = checks_memory.numa(str(tmp_path))
    assert (one.level, two.level) == (OK, OK)
    assert "one node" in one.found
    assert "2 nodes" in two.found
    assert "--cpunodebind" in two.found


def test_without_a_daemon_the_disk_alone_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = mounts.Mount("0:0", "/", "ext4", ("rw",))
    monkeypatch.setattr(mounts, "mount_of", lambda path, table: fine)
    code = cli.main(["doctor", "--storage", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["storage"] == str(tmp_path)
    problems = [one for one in document["findings"] if one["level"] == PROBLEM]
    assert (code in (0, 3)) == (not problems)
    assert document["counts"][PROBLEM] == len(problems)
    assert {
        "kernel",
        "huge pages",
        "numa",
        "clock",
        "file system",
        "daemon",
        "cuda",
    } <= {one["check"] for one in document["findings"]}


def test_no_daemon_is_a_problem_when_it_is_the_question(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "no daemon listens at" in out
    assert "pccheckd --storage DIR" in out


def answer(**daemon: object) -> checks_daemon.Answer:
    made = checks_daemon.Answer.__new__(checks_daemon.Answer)
    made.path, made.error = Path("/nonexistent/attach.sock"), None
    values = {"version": "0.1.0", "pid": 1, "uptime_s": 5, "keep": 2, "transfer": "pull",
              "transfer_reason": "CUDA IPC"}  # fmt: skip
    made.status = {"daemon": values | daemon, "warnings": [], "sessions": []}
    return made


def test_another_version_and_a_single_kept_checkpoint_are_told() -> None:
    (fine,) = checks_daemon.reachable(answer())
    assert fine.level == OK
    (version,) = checks_daemon.reachable(answer(version="9.9.9"))
    assert "9.9.9" in version.found
    _, keep = checks_daemon.reachable(answer(keep=1))
    assert keep.promise == "newest wins"


def test_why_the_daemon_does_not_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_daemon, "_has_driver", lambda: True)
    monkeypatch.setattr(checks_daemon, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    found, files = checks_daemon.cuda(answer(transfer="push", transfer_reason="no driver: MIG"))
    assert "no driver: MIG" in found.found
    assert files.found == f"{tmp_path}/nvidia-uvm not there"
    monkeypatch.setattr(checks_daemon.Answer, "uid", 4711)
    (found,) = checks_daemon.cuda(answer())
    assert "uid 4711" in found.found
    assert "another user's GPU memory" in found.costs
    monkeypatch.setattr(checks_daemon.Answer, "uid", 0)
    (found,) = checks_daemon.cuda(answer())
    assert found.level == OK


@pytest.mark.parametrize(
    ("release", "told"), [("6.10.9", 0), ("6.11.0-9-generic", 1), ("6.13", 1), ("6.14.1", 0)]
)
def test_kernels_that_pin_badly_are_told(release: str, told: int) -> None:
    assert len(list(checks_daemon._pinning(release))) == told


def test_a_socket_that_others_can_replace_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    asked = answer()
    asked.path = tmp_path / "attach.sock"
    (found,) = checks_daemon.socket_access(asked)
    assert found.promise == "apart"
    tmp_path.chmod(0o750)
    (found,) = checks_daemon.socket_access(asked)
    assert found.level == OK
