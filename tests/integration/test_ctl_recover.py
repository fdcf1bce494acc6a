"""`pccheckctl recover` on real volumes, without a daemon."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pccheckctl.export import command
from tests.support import volumes
from tests.support.ctl import Ctl
from tests.support.volumes import WIDE, Rank, damage, make, numbers

safetensors = pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")


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
    assert ctl(storage, "recover", "job", "-o", target).code == 0
    state = torch.load(target, weights_only=True)
    model = state["model"]
    check_wide(model["wide"], 30)
    assert isinstance(model["wide"], torch.nn.Parameter)
    assert model["tied"].data_ptr() == model["weight"].data_ptr()
    assert model["transposed"].stride() == (1, 4)
    assert model["doubles"].dtype is torch.complex128
    assert state["optimizer"] == {"lr": 0.1, "name": "adamw", "betas": (0.9, 0.999)}
    assert state["array"].tolist() == [30, -1, 2]
    assert state["factor"] == 2.5
    assert state["counts"] == {"a": 1}
    assert state["kind"] is torch.float32
    assert state["raw"] == b"\x00\x01"


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_damage_takes_the_one_before_and_says_so(
    ctl: Ctl, storage: Path, tmp_path: Path, name: str
) -> None:
    damage(storage, 30)
    ran = ctl(storage, "recover", "job", "-o", tmp_path / name, "--json")
    assert ran.code == 14
    assert ran.json["written"][0]["checkpoint"]["step"] == 20
    assert [s["checkpoint"]["step"] for s in ran.json["skipped"]] == [30]
    assert (tmp_path / name).exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    ran = ctl(storage, "recover", "job", "-o", tmp_path / name, "--force")
    assert "skipped the checkpoint of step 30" in ran.err


def test_when_all_is_damaged_nothing_is_written(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        damage(storage, step)
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
    """Two ranks with common steps 10 and 20; rank 0 also has 30."""
    place = make(tmp_path / "storage", 10, 20, 30, rank=0, world_size=2)
    return make(place, 10, 20, rank=1, world_size=2)


def test_recovering_a_group_asks_which_rank(ctl: Ctl, group: Path, tmp_path: Path) -> None:
    ran = ctl(group, "recover", "job", "-o", tmp_path / "x.pt")
    assert ran.code == 2
    assert "ranks 0, 1; the newest step that all have is 20" in ran.err


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
    damage(group, 20, rank=1)
    target = tmp_path / "x.safetensors"
    ran = ctl(group, "recover", "job", "-o", target, "--all-ranks", "--json")
    assert ran.code == 14
    assert [w["checkpoint"]["step"] for w in ran.json["written"]] == [10, 10]
    assert [(s["checkpoint"]["rank"], s["checkpoint"]["step"]) for s in ran.json["skipped"]] == [
        (1, 20)
    ]
    assert len(list(tmp_path.glob("*rank*"))) == 2


@pytest.fixture
def shrunk(group: Path) -> Path:
    """After a restart with one rank, which saved 40; what rank 1 has is stale."""
    return make(group, 40, rank=0, world_size=1, incarnation=2)


def test_ranks_that_the_last_run_did_not_have_are_left_out(
    ctl: Ctl, shrunk: Path, tmp_path: Path
) -> None:
    ran = ctl(shrunk, "recover", "job", "-o", tmp_path / "x.pt")
    assert ran.code == 0, ran.err
    assert torch.load(tmp_path / "x.pt", weights_only=True)["steps"] == 40
    assert "rank 1 is left out: the run that saved last did not have it" in ran.err
    ran = ctl(shrunk, "recover", "job", "-o", tmp_path / "y.pt", "--all-ranks", "--json")
    assert ran.code == 0, ran.err
    (written,) = ran.json["written"]
    assert (written["checkpoint"]["rank"], written["checkpoint"]["step"]) == (0, 40)


def test_a_rank_that_is_left_out_can_be_chosen(ctl: Ctl, shrunk: Path, tmp_path: Path) -> None:
    ran = ctl(shrunk, "recover", "job", "-o", tmp_path / "x.pt", "--rank", 1, "--json")
    assert ran.json["written"][0]["checkpoint"]["step"] == 20
    ran = ctl(
        shrunk, "export", "job", "-o", tmp_path / "y.pt", "--all-ranks", "--step", 20, "--json"
    )
    assert {w["checkpoint"]["rank"] for w in ran.json["written"]} == {0, 1}


def test_a_missing_rank_is_never_made_up_for(ctl: Ctl, tmp_path: Path) -> None:
    place = make(tmp_path / "storage", 10, rank=0, world_size=2)
    ran = ctl(place, "recover", "job", "-o", tmp_path / "x.pt", "--all-ranks")
    assert ran.code == 13
    assert "no step that all 2 ranks" in ran.err
    ran = ctl(place, "recover", "job", "-o", tmp_path / "x.pt", "--rank", 0)
    assert ran.code == 0
    assert "some of the 2 ranks do not have this step" in ran.err


# -- beside a writer ---------------------------------------------------------------------------


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_no_damage(
    storage: Path, ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between choice and read a writer uses each slot once."""
    original = command.write
    rounds = []

    def late(*arguments: Any) -> Any:
        if not rounds:
            rounds.append(1)
            with Rank(storage) as writer:
                for step in (40, 50, 60, 70, 80, 90):
                    writer.put(step)
        return original(*arguments)

    monkeypatch.setattr(command, "write", late)
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
