"""`pccheckctl` on real volumes, without a daemon: listings and errors."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck_store import directory  # noqa: F401
from pccheck_wire.tree import Sequence, Tag
from pccheckctl import cli
from pccheckctl.commands import listing, show, status, verify  # noqa: F401
from tests.support.ctl import Ctl
from tests.support.volumes import Rank, damage, make, mapping

# -- status, list, show ------------------------------------------------------------------------


def test_status_says_what_the_volumes_say(ctl: Ctl, storage: Path) -> None:
    ran = ctl(storage, "status", "--json")
    assert ran.code == 0
    (rank,) = ran.json["ranks"]
    assert (rank["job"], rank["rank"], rank["newest"]["step"]) == ("job", 0, 30)
    assert ran.json["daemon"] is None
    assert "30" in ctl(storage, "status").out


def test_list_is_newest_first(ctl: Ctl, storage: Path) -> None:
    ran = ctl(storage, "list", "--json")
    assert ran.code == 0
    assert [c["step"] for c in ran.json["checkpoints"]] == [30, 20, 10]
    lines = ctl(storage, "list", "job").out.splitlines()
    assert [line.split()[3] for line in lines[1:]] == ["30", "20", "10"]


def test_the_storage_may_come_from_the_environment(
    ctl: Ctl, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCHECK_STORAGE", str(storage))
    assert ctl(None, "list").code == 0


def test_show_has_tensors_leaves_and_metadata(ctl: Ctl, storage: Path) -> None:
    ran = ctl(storage, "show", "job", "--step", 20, "--json")
    assert ran.code == 0
    assert ran.json["step"] == 20
    assert ran.json["metadata"] == {"note": "step 20"}
    tensors = {t["path"]: t for t in ran.json["tensors"]}
    assert tensors["model.transposed"]["strides"] == [1, 4]
    assert tensors["model.half"]["dtype"] == "bfloat16"
    assert tensors["model.expanded"]["bytes"] == 24
    leaves = {leaf["path"]: leaf["text"] for leaf in ran.json["leaves"]}
    assert leaves["optimizer.lr"] == "0.1"
    text = ctl(storage, "show", "job").out
    assert "step 30, sequence 3" in text
    assert "model.wide" in text
    assert ctl(storage, "show", "job", "--sequence", 1, "--json").json["step"] == 10


def test_show_passes_over_damage_and_says_so(ctl: Ctl, storage: Path) -> None:
    from pccheck_native import catalog

    one = catalog.scan(storage).checkpoints[0]
    data = bytearray(one.volume_path.read_bytes())
    at = data.rindex(b"pccheck-tree")
    wanted = [i for i in range(len(data)) if data.startswith(b"pccheck-tree", i)]
    assert at in wanted
    for place in wanted:
        if b"step 30" in data[place : place + 200]:
            data[place] ^= 1
    one.volume_path.write_bytes(data)
    ran = ctl(storage, "show", "job")
    assert ran.code == 14
    assert "step 20" in ran.out
    assert "damaged" in ran.err
    assert ctl(storage, "show", "job", "--step", 30).code == 14


def test_a_long_list_of_values_has_one_line(ctl: Ctl, tmp_path: Path) -> None:
    """Otherwise the state of Python's random generator would fill the screen."""
    twenty = Sequence(Tag.TUPLE, list(range(100, 120)))
    root = mapping(seed=Sequence(Tag.TUPLE, [3, twenty, None]), names=Sequence(Tag.LIST, ["a"]))
    place = tmp_path / "storage"
    with Rank(place) as rank:
        rank.put(1, state=([], root))
    lines = [line.split(maxsplit=1) for line in ctl(place, "show", "job").out.splitlines()]
    told = dict(line for line in lines if len(line) == 2)
    assert told["seed.1.*"].split() == ["20", "x", "int", "100,", "101,", "102,", "..."]
    assert told["names.0"].endswith("'a'") and "seed.0" in told and "seed.1.0" not in told
    assert len(ctl(place, "show", "job", "--json").json["leaves"]) == 23


def test_what_there_is_none_of_is_named(ctl: Ctl, storage: Path) -> None:
    ran = ctl(storage, "verify", "job", "--step", 7, "--rank", 2)
    assert ran.code == 13
    assert "there is no checkpoint of job 'job' of rank 2 of step 7 in" in ran.err
    damage(storage, 20)
    (bad,) = [one for one in ctl(storage, "verify", "--json").json["checkpoints"] if one["reason"]]
    assert bad["reason"] == "a checksum does not fit"
    assert bad["result"] == "damaged" and "damaged" not in bad


# -- errors ------------------------------------------------------------------------------------


def test_no_such_directory_is_ten(ctl: Ctl, tmp_path: Path) -> None:
    ran = ctl(tmp_path / "nothing", "list")
    assert ran.code == 10
    assert "hint: " in ran.err
    (tmp_path / "file").touch()
    ran = ctl(tmp_path / "file", "list")
    assert ran.code == 10
    assert f"{tmp_path}/file is not a directory" in ran.err


def test_a_directory_that_is_no_store_is_ten(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl(tmp_path, "status").code == 10


def test_an_empty_store_lists_nothing_and_recovers_nothing(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / ".pccheckd.lock").touch()
    assert ctl(tmp_path, "list").out == "no checkpoints\n"
    assert ctl(tmp_path, "recover", "job", "-o", tmp_path / "x").code == 13
    assert ctl(tmp_path, "verify").code == 13


@pytest.mark.parametrize("of", ["other", "other --rank 1", "job --rank 1"])
def test_list_and_show_name_what_there_is_none_of_alike(ctl: Ctl, storage: Path, of: str) -> None:
    listed, shown = (ctl(storage, command, *of.split()) for command in ("list", "show"))
    assert (listed.code, listed.out, shown.code) == (13, "", 13)
    assert listed.err.splitlines()[0] == shown.err.splitlines()[0]
    listed, shown = (ctl(storage, command, *of.split(), "--json") for command in ("list", "show"))
    assert (listed.code, shown.code) == (13, 13)
    assert listed.json["error"]["message"] == shown.json["error"]["message"]
    assert listed.json["error"]["code"] == "NO_CHECKPOINT"


def test_an_unknown_job_is_thirteen(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    ran = ctl(storage, "recover", "other", "-o", tmp_path / "x", "--json")
    assert ran.code == 13
    assert ran.json["error"]["code"] == "NO_CHECKPOINT"


def test_an_unknown_step_is_thirteen(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    assert ctl(storage, "show", "job", "--step", 11).code == 13
    assert ctl(storage, "export", "job", "--step", 11, "-o", tmp_path / "x").code == 13


def test_a_job_name_cannot_leave_the_directory(ctl: Ctl, storage: Path) -> None:
    assert ctl(storage, "show", "../../etc").code == 2


@pytest.mark.parametrize(
    ("command", "see"),
    [("show bog", "list"), ("list bog", "list"), ("drop bog --yes", "list"),
     ("show job --step 7", "list job")],
)  # fmt: skip
@pytest.mark.parametrize("before", [True, False])
def test_a_hint_names_commands_that_can_be_pasted(
    ctl: Ctl, tmp_path: Path, command: str, see: str, before: bool
) -> None:
    """The commands name the same daemon or directory as the failed command, with any characters in
    the path."""
    place = make(tmp_path / "a b", 10)
    given = ["--storage", str(place)]
    words = [*given, *command.split()] if before else [*command.split(), *given]
    hint = ctl(None, *words).err.partition("hint: ")[2]
    assert f"pccheckctl --storage '{place}' {see}" in hint
    for found in re.findall(r"pccheckctl ([^;\n]*)", hint):
        assert ctl(None, *shlex.split(found)).code in (0, 3)
    error = ctl(None, *words, "--json").json["error"]
    assert error["hint"] == hint.strip()


@pytest.fixture
def public() -> Iterator[Path]:
    """A storage directory that other users have access to; the directories above `tmp_path` are
    closed."""
    with tempfile.TemporaryDirectory(prefix="pcc-") as place:
        Path(place).chmod(0o755)
        yield make(Path(place) / "storage", 10)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
@pytest.mark.parametrize("command", ["list", "status", "show job", "verify"])
def test_anothers_volumes_are_refused_with_a_hint(
    command: str, public: Path, tmp_path: Path
) -> None:
    out = (tmp_path / "out").open("w+")
    pid = os.fork()  # an interpreter of root's may not be started by another user
    if pid == 0:
        os.dup2(out.fileno(), 2)
        os.setgroups([])
        os.setresuid(65534, 65534, 65534)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        try:
            code = cli.main(["--storage", str(public), *command.split()])
        except BaseException:
            code = 99
        sys.stderr.flush()
        os._exit(code)
    _, ended = os.waitpid(pid, 0)
    told = (tmp_path / "out").read_text()
    assert os.waitstatus_to_exitcode(ended) == 1, told
    assert "uid 65534 may not read" in told
    assert "hint: " in told


# -- verify ------------------------------------------------------------------------------------


def test_verify_reads_everything(ctl: Ctl, storage: Path) -> None:
    ran = ctl(storage, "verify", "--json")
    assert ran.code == 0
    assert [c["result"] for c in ran.json["checkpoints"]] == ["ok"] * 3


def test_verify_finds_damage(ctl: Ctl, storage: Path) -> None:
    damage(storage, 20)
    ran = ctl(storage, "verify", "job", "--json")
    assert ran.code == 14
    assert {c["step"]: c["result"] for c in ran.json["checkpoints"]} == {
        30: "ok", 20: "damaged", 10: "ok",
    }  # fmt: skip
    assert ctl(storage, "verify", "job", "--step", 30).code == 0
    assert "1 damaged" in ctl(storage, "verify").out


def test_a_volume_without_records_is_damage(ctl: Ctl, storage: Path) -> None:
    (volume,) = storage.rglob("*.pcc")
    volume.write_bytes(b"\xff" * volume.stat().st_size)
    ran = ctl(storage, "verify")
    assert ran.code == 14
    assert "0 ok, 1 damaged" in ran.out and "unreadable" not in ran.out
    assert ctl(storage, "show", "job").code == 14
    assert ctl(storage, "status").code == 3


def test_a_volume_that_cannot_be_read_is_no_damage(ctl: Ctl, storage: Path) -> None:
    (volume,) = storage.rglob("*.pcc")
    volume.rename(storage / "away")
    volume.mkdir()
    ran = ctl(storage, "verify")
    assert (ran.code, "0 ok, 0 damaged, 1 unreadable" in ran.out) == (14, True), ran.out


# -- beside a writer ---------------------------------------------------------------------------


def test_reads_while_the_volume_is_open_for_writing(
    ctl: Ctl, storage: Path, tmp_path: Path
) -> None:
    with Rank(storage) as writer:
        assert ctl(storage, "verify").code == 0
        writer.put(40)
        assert ctl(storage, "show", "job", "--json").json["step"] == 40


def test_several_jobs_are_verified_at_once(tmp_path: Path, ctl: Ctl) -> None:
    storage = tmp_path / "s"
    for job in ("one", "two", "three"):
        make(storage, 10, job=job)
    told = ctl(storage, "verify", "one", "three")
    assert (told.code, told.out.count(" ok"), "two" in told.out) == (0, 3, False)
    assert ctl(storage, "verify", "one", "none").code == 13
