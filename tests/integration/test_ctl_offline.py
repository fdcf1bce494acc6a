"""`pccheckctl` on real volumes, without a daemon."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pccheckctl import cli, listing, offline, recover, show, status, verify  # noqa: F401
from tests.support import volumes
from tests.support.volumes import WIDE, Rank, make, numbers, scribble

safetensors = pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")

Ctl = Callable[..., "Ran"]


class Ran:
    """An exit code, and what was said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ctl:
    monkeypatch.delenv("PCCHECK_STORAGE", raising=False)
    monkeypatch.setenv("PCCHECK_SOCKET", "/nonexistent/socket")

    def run(storage: Path | None, *arguments: object) -> Ran:
        place = [] if storage is None else ["--storage", str(storage)]
        code = cli.main([*place, *map(str, arguments)])
        told = capsys.readouterr()
        return Ran(code, told.out, told.err)

    return run


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return make(tmp_path / "storage", 10, 20, 30)


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


# -- errors ------------------------------------------------------------------------------------


def test_no_such_directory_is_ten(ctl: Ctl, tmp_path: Path) -> None:
    ran = ctl(tmp_path / "nothing", "list")
    assert ran.code == 10
    assert "hint: " in ran.err


def test_a_directory_that_is_no_store_is_ten(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl(tmp_path, "status").code == 10


def test_an_empty_store_lists_nothing_and_recovers_nothing(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / ".pccheckd.lock").touch()
    assert ctl(tmp_path, "list").out == "no checkpoints\n"
    assert ctl(tmp_path, "recover", "job", "-o", tmp_path / "x").code == 13
    assert ctl(tmp_path, "verify").code == 13


def test_an_unknown_job_names_those_there(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    ran = ctl(storage, "recover", "other", "-o", tmp_path / "x", "--json")
    assert ran.code == 13
    assert ran.json["error"]["code"] == "NO_CHECKPOINT"


def test_an_unknown_step_is_thirteen(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    assert ctl(storage, "show", "job", "--step", 11).code == 13
    assert ctl(storage, "recover", "job", "--step", 11, "-o", tmp_path / "x").code == 13


def test_a_job_name_cannot_leave_the_directory(ctl: Ctl, storage: Path) -> None:
    assert ctl(storage, "show", "../../etc").code == 2


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
@pytest.mark.parametrize("command", ["list", "status", "show job", "verify"])
def test_anothers_volumes_are_refused_with_a_hint(
    command: str, storage: Path, tmp_path: Path
) -> None:
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(0o755)
    out = (tmp_path / "out").open("w+")
    pid = os.fork()  # an interpreter of root's may not be started by another user
    if pid == 0:
        os.dup2(out.fileno(), 2)
        os.setgroups([])
        os.setresuid(65534, 65534, 65534)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        try:
            code = cli.main(["--storage", str(storage), *command.split()])
        except BaseException:
            code = 99
        sys.stderr.flush()
        os._exit(code)
    _, ended = os.waitpid(pid, 0)
    told = (tmp_path / "out").read_text()
    assert os.waitstatus_to_exitcode(ended) == 1, told
    assert "may not be read by uid 65534" in told
    assert "hint: " in told


# -- verify ------------------------------------------------------------------------------------


def test_verify_reads_everything(ctl: Ctl, storage: Path) -> None:
    ran = ctl(storage, "verify", "--json")
    assert ran.code == 0
    assert [c["result"] for c in ran.json["checkpoints"]] == ["ok"] * 3


def test_verify_finds_damage(ctl: Ctl, storage: Path) -> None:
    scribble(storage, 20)
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
    assert "unreadable" in ran.out
    assert ctl(storage, "show", "job").code == 14
    assert ctl(storage, "status").code == 3


# -- recover -----------------------------------------------------------------------------------


def check_wide(values: Any, step: int) -> None:
    assert values.tolist() == numbers(step, WIDE)


def test_recover_safetensors(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    target = tmp_path / "model.safetensors"
    ran = ctl(storage, "recover", "job", "--output", target, "--json")
    assert ran.code == 0, ran.err
    (written,) = ran.json["written"]
    assert (written["format"], written["checkpoint"]["step"]) == ("safetensors", 30)
    assert written["bytes"] == target.stat().st_size
    assert any("model.doubles (complex128)" in change for change in written["changed"])
    with safe_open(target, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    check_wide(found["model.wide"], 30)
    weight = torch.tensor(numbers(30, 12)).reshape(3, 4)
    assert torch.equal(found["model.weight"], weight)
    assert torch.equal(found["model.tied"], weight)
    assert torch.equal(found["model.transposed"], weight.T)
    assert torch.equal(found["model.row"], weight[1])
    assert torch.equal(found["model.expanded"], weight[0, :3].expand(2, 3))
    assert found["model.half"].dtype is torch.bfloat16
    assert found["model.half"].view(torch.uint16).tolist() == [30, 31, 32, 33]
    assert found["model.scalar"].item() == numbers(30, 2)[1]
    assert found["model.empty"].shape == (0, 5)
    assert found["array"].tolist() == [30, -1, 2]
    assert metadata["format"] == "pt"
    assert metadata["pccheck.step"] == "30"
    values = json.loads(metadata["pccheck.values"])
    assert values["optimizer.lr"] == 0.1
    assert values["steps"] == 30
    assert json.loads(metadata["pccheck.metadata"]) == {"note": "step 30"}


def test_recover_torch(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    target = tmp_path / "state.pt"
    assert ctl(storage, "recover", "job", "-o", target, "--step", 20).code == 0
    state = torch.load(target, weights_only=True)
    model = state["model"]
    check_wide(model["wide"], 20)
    assert isinstance(model["wide"], torch.nn.Parameter)
    assert model["tied"].data_ptr() == model["weight"].data_ptr()
    assert model["transposed"].stride() == (1, 4)
    assert model["doubles"].dtype is torch.complex128
    assert state["optimizer"] == {"lr": 0.1, "name": "adamw", "betas": (0.9, 0.999)}
    assert state["array"].tolist() == [20, -1, 2]
    assert state["factor"] == 2.5
    assert state["counts"] == {"a": 1}
    assert state["kind"] is torch.float32
    assert state["raw"] == b"\x00\x01"


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_damage_takes_the_one_before_and_says_so(
    ctl: Ctl, storage: Path, tmp_path: Path, name: str
) -> None:
    scribble(storage, 30)
    ran = ctl(storage, "recover", "job", "-o", tmp_path / name, "--json")
    assert ran.code == 14
    assert ran.json["written"][0]["checkpoint"]["step"] == 20
    assert [s["checkpoint"]["step"] for s in ran.json["skipped"]] == [30]
    assert (tmp_path / name).exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    ran = ctl(storage, "recover", "job", "-o", tmp_path / name, "--force")
    assert "passed over the checkpoint of step 30" in ran.err


def test_when_all_is_damaged_nothing_is_written(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        scribble(storage, step)
    ran = ctl(storage, "recover", "job", "-o", tmp_path / "a.safetensors")
    assert ran.code == 13
    assert "3 checkpoints found damaged" in ran.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["storage"]


def test_an_existing_file_is_kept_without_force(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    target.write_text("precious")
    ran = ctl(storage, "recover", "job", "-o", target)
    assert ran.code == 2
    assert "--force" in ran.err
    assert target.read_text() == "precious"
    assert ctl(storage, "recover", "job", "-o", target, "--force").code == 0
    assert target.read_bytes()[8:9] == b"{"


def test_no_such_output_directory(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    ran = ctl(storage, "recover", "job", "-o", tmp_path / "no" / "a.pt")
    assert ran.code == 1
    assert "Traceback" not in ran.err


def test_a_header_is_padded_and_without_holes(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    ctl(storage, "recover", "job", "-o", target)
    data = target.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    end = 0
    for begin, stop in sorted(entry["data_offsets"] for entry in header.values()):
        assert begin == end
        end = stop
    assert 8 + length + end == len(data)


# -- ranks -------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """Two ranks that have steps 10 and 20 in common; rank 0 also has 30."""
    place = make(tmp_path / "storage", 10, 20, 30, rank=0, world_size=2)
    return make(place, 10, 20, rank=1, world_size=2)


def test_recovering_a_group_asks_which_rank(ctl: Ctl, group: Path, tmp_path: Path) -> None:
    ran = ctl(group, "recover", "job", "-o", tmp_path / "x.pt")
    assert ran.code == 2
    assert "ranks 0, 1; the newest step of all is 20" in ran.err


def test_all_ranks_get_the_newest_common_step(ctl: Ctl, group: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    ran = ctl(group, "recover", "job", "-o", target, "--all-ranks", "--json")
    assert ran.code == 0, ran.err
    assert [w["checkpoint"]["step"] for w in ran.json["written"]] == [20, 20]
    assert (tmp_path / "x.rank-0.safetensors").exists()
    assert (tmp_path / "x.rank-1.safetensors").exists()
    pattern = tmp_path / "r{rank}.pt"
    assert ctl(group, "recover", "job", "-o", pattern, "--all-ranks").code == 0
    assert torch.load(tmp_path / "r1.pt", weights_only=True)["steps"] == 20


def test_one_rank_of_a_group_gets_the_common_step(ctl: Ctl, group: Path, tmp_path: Path) -> None:
    ran = ctl(group, "recover", "job", "-o", tmp_path / "x.pt", "--rank", 0, "--json")
    assert ran.json["written"][0]["checkpoint"]["step"] == 20


def test_damage_on_one_rank_moves_the_whole_group(ctl: Ctl, group: Path, tmp_path: Path) -> None:
    scribble(group, 20, rank=1)
    target = tmp_path / "x.safetensors"
    ran = ctl(group, "recover", "job", "-o", target, "--all-ranks", "--json")
    assert ran.code == 14
    assert [w["checkpoint"]["step"] for w in ran.json["written"]] == [10, 10]
    assert [(s["checkpoint"]["rank"], s["checkpoint"]["step"]) for s in ran.json["skipped"]] == [
        (1, 20)
    ]
    assert len(list(tmp_path.glob("*rank*"))) == 2


def test_a_missing_rank_is_never_made_up_for(ctl: Ctl, tmp_path: Path) -> None:
    place = make(tmp_path / "storage", 10, rank=0, world_size=2)
    ran = ctl(place, "recover", "job", "-o", tmp_path / "x.pt", "--all-ranks")
    assert ran.code == 13
    assert "no step that all 2 ranks" in ran.err
    ran = ctl(place, "recover", "job", "-o", tmp_path / "x.pt", "--rank", 0)
    assert ran.code == 0
    assert "not all 2 ranks" in ran.err


# -- beside a writer ---------------------------------------------------------------------------


def test_reads_while_the_volume_is_open_for_writing(
    ctl: Ctl, storage: Path, tmp_path: Path
) -> None:
    with Rank(storage) as writer:
        assert ctl(storage, "verify").code == 0
        writer.put(40)
        assert ctl(storage, "show", "job", "--json").json["step"] == 40


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_no_damage(
    storage: Path, ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice and the reading a writer goes once around its slots."""
    original = recover.write
    rounds = []

    def late(*arguments: Any) -> Any:
        if not rounds:
            rounds.append(1)
            with Rank(storage) as writer:
                for step in (40, 50, 60, 70, 80, 90):
                    writer.put(step)
        return original(*arguments)

    monkeypatch.setattr(recover, "write", late)
    ran = ctl(storage, "recover", "job", "-o", tmp_path / "a.safetensors", "--json")
    assert ran.code == 0, ran.out
    assert ran.json["written"][0]["checkpoint"]["step"] == 90
    assert ran.json["skipped"] == []


def test_names_that_coincide_are_told_apart(ctl: Ctl, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from pccheck_wire.tree import Tensor

    extents = [volumes.floats(1, 2), volumes.floats(2, 2)]
    inner = volumes.mapping(b=Tensor([2], [1], "float32", 0, 0, 0))
    root = volumes.mapping(**{"a": inner, "a.b": Tensor([2], [1], "float32", 0, 1, 0)})
    place = tmp_path / "storage"
    with Rank(place) as rank:
        rank.put(1, state=(extents, root))
    assert ctl(place, "recover", "job", "-o", tmp_path / "x.safetensors").code == 0
    found = load_file(tmp_path / "x.safetensors")
    assert found["a.b"].tolist() == numbers(1, 2)
    assert found["a.b~2"].tolist() == numbers(2, 2)
