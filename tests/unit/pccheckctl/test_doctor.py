"""Findings: the effect and the fix of each, what they come to, and checks that cannot run."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck_native import mounts
from pccheck_wire.basics import with_options
from pccheckctl import cli
from pccheckctl.doctor import command, daemon, gpu, machine, nodes, storage
from pccheckctl.doctor.finding import OK, PROBLEM, WARNING, Finding, guarded, ok, problem, warning
from pccheckctl.measure import disk


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PCCHECK_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.delenv("PCCHECK_STORAGE", raising=False)


FINE = ok("a", "fine")
SLOW = warning("b", "slow", effect="time", fix="wait")
WEAK = warning("c", "weak", effect="data", fix="repair", promise="durable")
BROKEN = problem("d", "broken", effect="all", fix="repair")


@pytest.mark.parametrize(
    ("found", "code"),
    [([FINE], 0), ([FINE, SLOW], 0), ([SLOW, WEAK], 3), ([WEAK, BROKEN], 1)],
)
def test_the_exit_code_is_what_the_worst_comes_to(found: list[Finding], code: int) -> None:
    assert command.exit_code(found) == code


def test_the_text_says_effect_and_fix_as_json_does() -> None:
    _, weak = command.document(Path("/x"), [FINE, WEAK])["findings"]  # type: ignore[misc]
    assert (weak["effect"], weak["fix"]) == ("data", "repair")
    text = command.as_text(Path("/x"), [FINE, WEAK])
    assert "effect: data\n" in text
    assert "fix: repair\n" in text
    assert text.endswith("0 problems, 1 warning; weakened promises: durable")
    assert command.as_text(Path("/x"), [FINE]).endswith("everything is fine")
    assert "--storage DIR" in command.as_text(None, [FINE])


def test_a_check_that_fails_says_so_and_stops_no_other() -> None:
    def failing() -> Iterator[Finding]:
        yield FINE
        raise ZeroDivisionError("by nothing")

    (found,) = guarded("x", failing)
    assert found.level == WARNING
    assert "by nothing" in found.found


@pytest.mark.parametrize("check", [
    machine.open_files, lambda: machine.memory(0),
])  # fmt: skip
def test_every_check_runs_here_and_says_the_effect_of_its_finding(check: object) -> None:
    found = list(check())  # type: ignore[operator]
    assert found
    for one in found:
        assert one.found
        assert (one.level == OK) == (not one.effect) == (not one.fix)


def test_more_memory_than_there_is_costs_a_promise() -> None:
    (found,) = machine.memory(1 << 60)
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
    (finding,) = storage.file_system(tmp_path)
    assert finding.level == level
    assert told in finding.found


def test_a_disk_that_returns_other_bytes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "reads_back", lambda fd, size: False)
    (found,) = storage.direct_io(tmp_path)
    assert (found.level, found.check) == (PROBLEM, "disk")


def test_a_disk_that_fails_names_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, size: int) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "reads_back", broken)
    (found,) = storage.direct_io(tmp_path)
    assert found.level == PROBLEM
    assert "EIO" in found.found


def test_a_slow_flush_is_a_warning() -> None:
    found = storage._judged(True, [0.1, 0.2, 0.3])
    assert found.level == WARNING
    assert "200 ms" in found.found


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    list(storage.direct_io(tmp_path))
    assert list(tmp_path.iterdir()) == []


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
        "open files",
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


def answer(**changed: object) -> daemon.Answer:
    made = daemon.Answer.__new__(daemon.Answer)
    made.path, made.error = Path("/nonexistent/attach.sock"), None
    values = {"version": "0.1.0", "pid": 1, "uptime_s": 5, "keep": 2, "transfer": "pull",
              "transfer_reason": "CUDA IPC"}  # fmt: skip
    made.status = {"daemon": values | changed, "warnings": [], "sessions": []}
    return made


def test_another_version_and_a_single_kept_checkpoint_are_told() -> None:
    (fine,) = daemon.reachable(answer())
    assert fine.level == OK
    (version,) = daemon.reachable(answer(version="9.9.9"))
    assert "9.9.9" in version.found
    _, keep = daemon.reachable(answer(keep=1))
    assert keep.promise == "newest wins"


def test_a_warning_names_the_status_of_the_daemon_that_was_asked() -> None:
    """Which is the node's where the directory of --storage has no private daemon."""
    degraded = answer()
    degraded.path = Path("/run/a b/attach.sock")
    degraded.status["warnings"] = ["job 'x' rank 0 of uid 0: checkpoints were NOT saved"]
    _, found = daemon.reachable(degraded)
    effect = with_options(found.effect, ["--storage", "/mnt/ssd"])
    assert effect.endswith("see pccheckctl --socket '/run/a b/attach.sock' status")


def test_why_the_daemon_does_not_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_driver", lambda: True)
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    (found,) = gpu.cuda(answer(transfer="push", transfer_reason="no driver: MIG").status)
    assert "no driver: MIG" in found.found
    assert f"{tmp_path}/nvidia-uvm is missing" in found.found
    (found,) = gpu.cuda(answer().status)
    assert found.level == OK


def test_a_socket_that_others_can_replace_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (found,) = daemon.socket_access(tmp_path / "attach.sock")
    assert found.promise == "apart"
    tmp_path.chmod(0o750)
    (found,) = daemon.socket_access(tmp_path / "attach.sock")
    assert found.level == OK


def a_wide_job(**changed: object) -> dict[str, object]:
    """The status of a daemon with a job on two nodes."""
    places = [("a", "11", True), ("b", "22", False)]
    names = ("host", "node", "here")
    every = [dict(zip(names, one, strict=True), ranks=[0], version="2") for one in places]
    job = {"uid": 0, "job": "gpt", "phase": "running", "refused": None, "silent_reason": "",
           "waits_for": "", "nodes": every, **changed}  # fmt: skip
    ranks = [{"uid": 0, "job": "gpt", "rank": 0, "volume": {"slots": 5}}]
    return {"daemon": {"in_flight": 2, "keep": 2}, "nodes": [job], "ranks": ranks}


def test_a_job_on_several_nodes_that_is_well_says_which_node_this_is() -> None:
    (found,) = nodes.agreement(a_wide_job())
    assert (found.level, list(nodes.spare_slot(a_wide_job()))) == (OK, [])
    assert "2 nodes agree" in found.found and "this node is 11" in found.found
    assert not list(nodes.agreement({})) and not list(nodes.spare_slot({}))


@pytest.mark.parametrize(
    ("changed", "level", "told"),
    [
        ({"refused": {"message": "one id", "hint": "h"}}, PROBLEM, "refused: one id"),
        ({"silent_reason": "timed out"}, WARNING, "does not answer: timed out"),
        ({"phase": "calling", "waits_for": "rank 1 did not come"}, WARNING, "rank 1 did not come"),
    ],
)
def test_what_keeps_nodes_from_agreeing(changed: dict[str, object], level: str, told: str) -> None:
    (found,) = nodes.agreement(a_wide_job(**changed))
    assert found.level == level and told in found.found and found.effect and found.fix


def test_nodes_of_several_versions_are_named() -> None:
    every = [{"host": "a", "version": "1"}, {"host": "b", "version": "2"}, {"host": "c"}]
    _, found = nodes.agreement(a_wide_job(nodes=every))
    assert found.level == WARNING and "1 on host a, 2 on host b" in found.found


def test_a_volume_without_the_spare_slot_of_several_nodes() -> None:
    status = a_wide_job()
    status["ranks"][0]["volume"]["slots"] = 4  # type: ignore[index]
    (found,) = nodes.spare_slot(status)
    assert found.level == WARNING and "has 4 slots" in found.found and "needs 5" in found.found
    alone = status | {"nodes": []}
    assert not list(nodes.spare_slot(alone))
