"""`pccheckctl` against a running daemon, which has volumes of an earlier run."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

import pccheckctl
from pccheck_native import SLOT_HEALTHY, SLOT_NOT_FINITE, Volume
from pccheck_store.remote import DaemonSource
from pccheck_wire import basics
from pccheck_wire.errors import DaemonUnreachableError
from pccheckctl import cli, source
from pccheckctl.commands import verify
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect
from tests.support.volumes import UID, WIDE, damage, floats, make

Ctl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def daemon(start_daemon: Start, tmp_path: Path) -> Daemon:
    return start_daemon("--allow-any-filesystem", storage=make(tmp_path / "storage", 10, 20, 30))


@pytest.fixture
def ctl(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Ctl:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["--socket", str(daemon.socket), *map(str, arguments)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture(params=["files", "daemon"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Reads checkpoints from the files, or through the daemon as a user who may not open the
    files."""
    if request.param == "daemon":
        monkeypatch.setattr(source, "_may_read", lambda _: False)
    return str(request.param)


def test_status_and_list_have_what_nobody_connected_to(ctl: Ctl, daemon: Daemon) -> None:
    code, out, _ = ctl("status", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["daemon"]["pid"] == daemon.pid
    (rank,) = document["ranks"]
    assert (rank["uid"], rank["job"], rank["newest"]["step"]) == (UID, "job", 30)
    code, out, _ = ctl("list", "--json")
    assert [one["step"] for one in json.loads(out)["checkpoints"]] == [30, 20, 10]
    assert ctl("status")[0] == 0
    assert ctl("list", "--uid", 8)[1] == "no checkpoints\n"


def test_show_names_start_digest_and_marks_either_way(
    start_daemon: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    storage = make(tmp_path / "marked", 10)
    (path,) = storage.rglob("*.pcc")
    volume = Volume(path, writable=True)
    (stored,) = (entry for entry in volume.table() if entry.sequence)
    volume.flag(stored.sequence, set=SLOT_HEALTHY | SLOT_NOT_FINITE, now=True)
    volume.close()
    daemon = start_daemon("--allow-any-filesystem", storage=storage)
    shown = []
    for may_read in (True, False):
        monkeypatch.setattr(source, "_may_read", lambda _, may=may_read: may)
        assert cli.main(["--socket", str(daemon.socket), "show", "job", "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    files, through_daemon = shown
    named = ("uid", "job", "rank", "sequence", "step", "incarnation", "start", "world_size",
             "digest", "kind", "marks")  # fmt: skip
    assert [files[name] for name in named] == [through_daemon[name] for name in named]
    assert files["digest"] == stored.digest.hex()
    assert (files["kind"], files["marks"]) == ("tensors", ["healthy", "not_finite"])


def test_a_job_without_checkpoints_is_thirteen(ctl: Ctl, way: str) -> None:
    listed, shown = ctl("list", "nosuch"), ctl("show", "nosuch")
    assert (listed[0], listed[1], shown[0]) == (13, "", 13)
    assert listed[2] == shown[2] != ""


def test_documents_have_the_same_keys_without_the_daemon(
    ctl: Ctl, daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    online = json.loads(ctl("list", "--json")[1])
    cli.main(["--storage", str(daemon.storage), "list", "--json"])
    offline = json.loads(capsys.readouterr().out)
    assert online.keys() == offline.keys()
    assert online["checkpoints"] == offline["checkpoints"]
    assert [v.keys() for v in online["volumes"]] == [v.keys() for v in offline["volumes"]]


#: All that `status` needs to ask a daemon.
STANDARD = (
    "__future__, argparse, array, contextlib, errno, gettext, importlib, locale, msgpack, os, "
    "socket, time"
)
OURS = {
    "pccheckctl", "pccheckctl.arguments", "pccheckctl.cli", "pccheckctl.commands",
    "pccheckctl.commands.listing", "pccheckctl.commands.status", "pccheckctl.output",
    "pccheckctl.output.documents", "pccheckctl.output.render", "pccheckctl.source",
    "pccheck_store", "pccheck_store.documents", "pccheck_store.observer", "pccheck_store.ranks",
    "pccheck_wire", "pccheck_wire.basics", "pccheck_wire.connection", "pccheck_wire.errors",
    "pccheck_wire.packing",
}  # fmt: skip


@pytest.mark.parametrize("command", ["status", "list"])
def test_asking_the_daemon_imports_what_it_needs_and_no_more(daemon: Daemon, command: str) -> None:
    """The user waits for every import: pathlib and json take a third of the start of bare Python,
    dataclasses as much, torch a second. The test compares lists of modules, because times vary."""
    places = {str(Path(module.__file__).parents[1]) for module in (pccheckctl, msgpack)}
    asking = f"['--socket', {str(daemon.socket)!r}, {command!r}]"
    code = (
        f"import sys; sys.path[:0] = {sorted(places)!r}\n"
        f"import {STANDARD}; before = set(sys.modules)\n"
        f"from pccheckctl import cli; code = cli.main({asking})\n"
        "print(code, *sorted(set(sys.modules) - before))"
    )  # -S: what is installed for editing imports modules of its own
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    answer, *imported = ran.stdout.splitlines()[-1].split()
    assert answer == "0"
    assert set(imported) - OURS == set()


@pytest.mark.usefixtures("way")
def test_show(ctl: Ctl) -> None:
    code, out, _ = ctl("show", "job", "--step", 20, "--json")
    assert code == 0
    assert json.loads(out)["metadata"] == {"note": "step 20"}


@pytest.mark.usefixtures("way")
def test_verify_finds_damage(ctl: Ctl, daemon: Daemon) -> None:
    assert ctl("verify", "job")[0] == 0
    damage(daemon.storage, 20)
    code, out, _ = ctl("verify", "job", "--json")
    assert code == 14
    assert {c["step"]: c["result"] for c in json.loads(out)["checkpoints"]} == {
        30: "ok", 20: "damaged", 10: "ok",
    }  # fmt: skip


@pytest.mark.usefixtures("way")
def test_verify_reads_a_part_and_says_which(ctl: Ctl, daemon: Daemon) -> None:
    """Twenty runs together read everything; each run reads the tree."""
    damage(daemon.storage, 20)
    payload = {c["step"]: c["payload_bytes"] for c in json.loads(ctl("list", "--json")[1])[
        "checkpoints"]}  # fmt: skip
    found, read = [], 0
    for part in range(1, 21):
        code, out, _ = ctl("verify", "job", "--read-data-subset", f"{part}/20", "--json")
        document = json.loads(out)
        bad = [c["step"] for c in document["checkpoints"] if c["result"] == "damaged"]
        assert (code == 14) == bool(bad)
        found += bad
        read += document["read_bytes"]
        assert 0 < document["read_bytes"] < sum(payload.values())
    assert found == [20] and read > payload[10] + payload[30]
    code, out, _ = ctl("verify", "job", "--step", 10, "--read-data-subset", "50%", "--seed", 7)
    assert code == 0 and "(50%; --seed 7 reads the same again)" in out
    out = ctl("verify", "job", "--step", 10, "--read-data-subset", "100%", "--json")[1]
    assert json.loads(out)["read_bytes"] == payload[10]  # the tree lies in a piece, too
    for wrong in (["--read-data-subset", "0%"], ["--read-data-subset", "5%", "--seed", "-1"]):
        assert ctl("verify", *wrong)[0] == 2


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_recover_is_the_same_either_way(
    ctl: Ctl, daemon: Daemon, tmp_path: Path, name: str
) -> None:
    assert ctl("recover", "job", "-o", tmp_path / name)[0] == 0
    other = tmp_path / f"offline-{name}"
    assert cli.main(["--storage", str(daemon.storage), "recover", "job", "-o", str(other)]) == 0
    if name.endswith(".safetensors"):
        assert filecmp.cmp(tmp_path / name, other, shallow=False)


@pytest.mark.usefixtures("way")
def test_export_a_part_of_an_older_one(ctl: Ctl, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    chosen = ("--step", 20, "--only", "model")
    code, out, err = ctl("export", "job", "-o", target, *chosen, "--json")
    assert code == 0, err
    assert json.loads(out)["written"][0]["checkpoint"]["step"] == 20
    data = target.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin, end = header["wide"]["data_offsets"]
    body = data[-header_bytes(header) :]
    assert body[begin:end] == bytes(floats(20, WIDE))


def header_bytes(header: dict[str, dict[str, list[int]]]) -> int:
    """The number of bytes of all tensors."""
    return max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_")


@pytest.mark.usefixtures("way")
def test_recover_passes_over_damage(ctl: Ctl, daemon: Daemon, tmp_path: Path) -> None:
    damage(daemon.storage, 30)
    code, out, _ = ctl("recover", "job", "-o", tmp_path / "a.safetensors", "--json")
    assert code == 14
    document = json.loads(out)
    assert document["written"][0]["checkpoint"]["step"] == 20
    assert [s["checkpoint"]["step"] for s in document["skipped"]] == [30]
    # A reader of another checkpoint is not warned, although the daemon has flagged the newest one.
    assert ctl("export", "job", "-o", tmp_path / "b.safetensors", "--step", 20)[0] == 0


def test_a_trace_in_a_file_is_told_of(ctl: Ctl, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    code, out, _ = ctl("trace", "--output", target, "--json")
    assert code == 0
    assert json.loads(out) == {"schema": 1, "path": str(target), "checkpoints": 0}
    assert json.loads(target.read_text())["traceEvents"] == []


def test_a_report_needs_a_trace(ctl: Ctl, tmp_path: Path) -> None:
    target, other = tmp_path / "report.html", tmp_path / "other.json"
    code, out, _ = ctl("report", "--output", target, "--json")
    assert code == 0
    assert json.loads(out) == {"schema": 1, "path": str(target), "checkpoints": 0}
    code, _, err = ctl("report", "--output", target)
    assert code == 2 and "exists" in err
    for text in ("no json", "[]", '{"traceEvents": []}'):
        other.write_text(text)
        code, _, err = ctl("report", "--trace", other, "--output", target, "--force")
        assert code == 2 and "is not a trace of pccheckctl\nhint: make one" in err
    for endless in ("/dev/zero", "/dev/urandom"):
        code, _, err = ctl("report", "--trace", endless, "--output", target, "--force")
        assert code == 2 and f"{endless} is not a trace of pccheckctl" in err
    code, _, err = ctl("report", "--trace", tmp_path / "none", "--output", target, "--force")
    assert code == 1 and "cannot read" in err
    assert target.exists()


def test_wait(ctl: Ctl) -> None:
    assert ctl("wait", "job", "--step", 25)[:2] == (0, "step 30 is durable, later than 25\n")
    code, _, err = ctl("wait", "job", "--step", 31, "--timeout", 0)
    assert code == 1
    assert "step 31 of job 'job' rank 0, or a later step, is not durable yet" in err
    assert "newest durable step: 30" in err
    code, _, err = ctl("wait", "jbo", "--newest", "--timeout", 0)
    assert code == 1
    assert "does not know job 'jbo' rank 0 yet (visible jobs: job)" in err


@pytest.mark.parametrize("command", ["wait job --newest", "trace", "report -o", "tune --job job"])
def test_what_only_a_daemon_knows_is_asked_of_the_private_daemon_of_a_directory(
    start_daemon: Start,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
) -> None:
    """A pccheckd that autostart=True did not start leaves no file with its socket."""
    words = [*command.split(), *([str(tmp_path / "x.html")] * command.startswith("report"))]
    words += ["--timeout", "0"] * command.startswith("wait")
    monkeypatch.setenv("PCCHECK_SOCKET", "/nonexistent/socket")
    daemon = start_daemon("--allow-any-filesystem", storage=make(tmp_path / "storage", 10))
    words += ["--storage", str(daemon.storage)]
    assert cli.main(words) == 12
    told = capsys.readouterr().err
    assert "no private daemon of uid" in told and "--socket PATH names another" in told
    few = "tune" in command
    assert cli.main([*words, "--socket", str(daemon.socket)]) == few
    daemon.stop()
    monkeypatch.setenv("PCCHECKD_LOG_BYTES", "65536")
    daemon.start()
    words += ["--force"] * command.startswith("report")
    assert cli.main(words) == few
    assert ("fewer than 4 checkpoints of job 'job'" in capsys.readouterr().err) == few
    daemon.stop()
    assert cli.main(words) == 12
    assert cli.main([*words[:-1], str(tmp_path / "none")]) == 10 or "report" in command


def test_without_a_daemon_the_private_ones_are_named_by_their_directories(
    start_daemon: Start,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PCCHECK_SOCKET", "/nonexistent/socket")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # no private daemon of this machine
    monkeypatch.setattr(basics, "TEMPORARY", str(tmp_path))
    monkeypatch.setenv("PCCHECKD_LOG_BYTES", "65536")
    for name in ("a b", "c"):
        private = start_daemon("--allow-any-filesystem", storage=make(tmp_path / name, 10))
        (tmp_path / "pccheck" / name).mkdir(parents=True)
        (tmp_path / "pccheck" / name / "attach.sock").symlink_to(private.socket)
    gone = tmp_path / "pccheck" / "gone"
    gone.mkdir()
    (gone / "attach.sock").symlink_to(tmp_path / "nothing")
    named = (
        f"or ask your private daemon: pccheckctl --storage '{tmp_path}/a b' status, pccheckctl "
        f"--storage {tmp_path}/c status"
    )
    for command in ("status", "drop job --yes", "trace", "wait job --newest --timeout 0", "doctor"):
        assert cli.main(command.split()) in (1, 12)
        told = capsys.readouterr()
        assert named in told.out + told.err
    for place in ("a b", "c"):
        assert cli.main(["--storage", str(tmp_path / place), "status", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["daemon"] and document["storage"]["path"] == str(tmp_path / place)


def test_wait_for_global_and_for_the_newest(
    ctl: Ctl, daemon: Daemon, start_trainer: Connect
) -> None:
    assert ctl("wait", "job", "--newest", "--uid", UID)[:2] == (0, "step 30 is durable\n")
    assert ctl("wait", "job", "--step", 5, "--for=global")[:2] == (
        0,
        "step 10 is global, later than 5\n",
    )
    trainer = start_trainer(daemon, job="fresh")
    trainer.step()
    trainer.checkpoint()
    code, out, _ = ctl("wait", "fresh", "--newest", "--for=copied", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 1
    assert ctl("wait", "fresh", "--newest", "--for=global")[:2] == (0, "step 1 is global\n")


def test_wait_for_what_an_ended_trainer_left(
    ctl: Ctl, daemon: Daemon, start_trainer: Connect
) -> None:
    """A trainer that lives keeps its steps in memory, and is not waited for."""
    for name in ("ended", "lives"):
        trainer = start_trainer(daemon, job=name, durable_every=1000)
        for _ in range(2):
            trainer.step()
            trainer.wait_copied(trainer.checkpoint())
        if name == "ended":
            trainer.kill()
    done = "everything is written that ended trainers have left\n"
    assert ctl("wait", "--ended") == (0, done, "")
    code, out, _ = ctl("--json", "wait", "ended", "--ended")
    assert (code, json.loads(out)) == (0, {"schema": 1, "job": "ended", "left": []})
    assert ctl("wait", "ended", "--step", 2, "--timeout", 0)[0] == 0
    assert ctl("wait", "--newest")[0] == 2


def test_the_storage_flag_asks_no_daemon(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--socket", str(daemon.socket), "--storage", str(daemon.storage)]
    assert cli.main([*flags, "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["daemon"] is None


def test_a_daemon_that_ended_is_twelve(ctl: Ctl, daemon: Daemon) -> None:
    daemon.stop()
    assert ctl("status")[0] == 12


def test_a_daemon_that_ends_during_verify_is_no_damage(daemon: Daemon) -> None:
    source = DaemonSource(str(daemon.socket), daemon.storage)
    one = source.held().checkpoints[0]
    daemon.stop()
    with pytest.raises(DaemonUnreachableError):
        verify.check(source, one, None)
