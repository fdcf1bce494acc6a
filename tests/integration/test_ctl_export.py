"""`pccheckctl export` on real volumes: other software loads what was saved."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pccheck_store.reading.state_reader import StateReader
from pccheck_wire.errors import StorageFullError
from pccheckctl.export import command, torch_file
from pccheckctl.output import files
from tests.support.ctl import Ctl
from tests.support.volumes import WIDE, Rank, damage, floats, make, mapping, numbers

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

KINDS = ("safetensors", "torch", "dcp")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load(target: Path, kind: str) -> Any:
    """Loads a file with the loader of its format."""
    if kind == "safetensors":
        from safetensors.torch import load_file

        return load_file(target)
    if kind == "torch":
        return torch.load(target, weights_only=True)
    found = dcp.FileSystemReader(target).read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        if hasattr(entry, "properties")
        else None
        for name, entry in found.items()
    }
    dcp.load(state, checkpoint_id=target, no_dist=True)
    return state


def leftovers(place: Path) -> list[str]:
    return [entry.name for entry in place.iterdir() if entry.name.endswith(".tmp")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_loads_under_its_own_names(
    ctl: Ctl, storage: Path, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "model"
    ran = ctl(
        storage, "export", "job", "-o", target, "--only", "model", "--format", kind, "--step", 20,
        "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.out
    (written,) = ran.json["written"]
    assert (written["format"], written["checkpoint"]["step"]) == (kind, 20)
    found = load(target, kind)
    assert found["wide"].tolist() == numbers(20, WIDE)
    weight = torch.tensor(numbers(20, 12)).reshape(3, 4)
    for name, wanted in {
        "weight": weight, "tied": weight, "transposed": weight.T, "row": weight[1],
        "expanded": weight[0, :3].expand(2, 3),
    }.items():  # fmt: skip
        assert torch.equal(found[name], wanted), name
    assert found["half"].view(torch.uint16).tolist() == [20, 21, 22, 23]
    assert found["empty"].shape == (0, 5)
    assert ("doubles" in found) == (kind != "safetensors")
    assert not any(name.startswith(("model", "optimizer")) for name in found)
    assert leftovers(tmp_path) == []


def test_a_directory_has_the_whole_state_and_its_values(
    ctl: Ctl, storage: Path, tmp_path: Path
) -> None:
    """Also under the names that other software uses: nested, as in the state dict."""
    target = tmp_path / "state"
    assert ctl(storage, "export", "job", "-o", target, "--format", "dcp").code == 0
    state = {
        "model": {"wide": torch.zeros(WIDE), "transposed": torch.zeros(4, 3)},
        "optimizer": {"lr": 0.0},
        "steps": 0,
    }
    dcp.load(state, checkpoint_id=target, no_dist=True)
    assert state["model"]["wide"].tolist() == numbers(30, WIDE)  # type: ignore[index]
    assert state["optimizer"] == {"lr": 0.1}
    assert state["steps"] == 30


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("model.layers", {"0.weight", "1.weight"}),
        ("model.layers.1", {"weight"}),
        ("model.layers.1.weight", {"layers.1.weight"}),
        ("optimizer.state.0", {"exp_avg"}),
        ("extra.1", {"1"}),
    ],
)
def test_a_part_of_a_flat_dict(ctl: Ctl, tmp_path: Path, only: str, names: set[str]) -> None:
    from pccheck_wire.tree import Mapping, Node, Sequence, Tag, Tensor

    def tensor(extent: int) -> Node:
        return Tensor([2], [1], "float32", 0, extent, 0)

    moments = Mapping(Tag.DICT, [(0, mapping(exp_avg=tensor(2)))])
    root = mapping(
        model=Mapping(
            Tag.ORDERED, [("layers.0.weight", tensor(0)), ("layers.1.weight", tensor(1))]
        ),
        optimizer=mapping(state=moments),
        extra=Sequence(Tag.LIST, [tensor(0), tensor(1)]),
    )
    place = tmp_path / "storage"
    with Rank(place) as rank:
        rank.put(1, state=([floats(step, 2) for step in (1, 2, 3)], root))
    target = tmp_path / "part.safetensors"
    ran = ctl(place, "export", "job", "-o", target, "--only", only)
    assert ran.code == 0, ran.err
    found = load(target, "safetensors")
    assert set(found) == names
    wanted = numbers(3 if only.startswith("optimizer") else 2, 2)
    assert found[max(names)].tolist() == wanted


def test_only_what_is_asked_for_is_read(
    ctl: Ctl, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(StateReader, "read_into", lambda _, ranges: read.append(ranges))
    for name in ("a.pt", "a.safetensors"):
        read.clear()
        assert ctl(storage, "export", "job", "-o", tmp_path / name, "--only", "array").code == 0
        lengths = [int.from_bytes(part[16:24], "little") for part in read]
        assert lengths == [12], name


def test_an_unknown_part_names_those_there(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    ran = ctl(storage, "export", "job", "-o", tmp_path / "a.pt", "--only", "modle")
    assert ran.code == 2
    assert "there is no 'modle' in this checkpoint; it has model, optimizer" in ran.err
    assert f"pccheckctl --storage {storage} show job" in ran.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["storage"]


def test_a_sequence_is_chosen_and_damage_of_others_is_no_matter(
    ctl: Ctl, storage: Path, tmp_path: Path
) -> None:
    damage(storage, 30)
    target = tmp_path / "a.safetensors"
    ran = ctl(storage, "export", "job", "-o", target, "--sequence", 1, "--json")
    assert ran.code == 0
    assert ran.json["written"][0]["checkpoint"]["step"] == 10
    assert json.loads(ran.out)["skipped"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_passed_over_or_told(ctl: Ctl, storage: Path, tmp_path: Path, kind: str) -> None:
    damage(storage, 30)
    chosen = ("export", "job", "-o", tmp_path / "a", "--format", kind)
    ran = ctl(storage, *chosen, "--step", 30)
    assert ran.code == 13
    assert "1 checkpoint found damaged" in ran.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["storage"]
    ran = ctl(storage, *chosen)
    assert ran.code == 14
    assert "skipped the checkpoint of step 30" in ran.err
    assert (tmp_path / "a").exists()


def test_a_directory_is_replaced_by_force_only_when_it_is_one(
    ctl: Ctl, storage: Path, tmp_path: Path
) -> None:
    target, home = tmp_path / "state", tmp_path / "home"
    words = ("export", "job", "--format", "dcp", "-o")
    assert ctl(storage, *words, target, "--step", 10).code == 0
    ran = ctl(storage, *words, target)
    assert (ran.code, "--force" in ran.err) == (2, True)
    assert load(target, "dcp")["steps"] == 10
    assert ctl(storage, *words, target, "--force").code == 0
    assert load(target, "dcp")["steps"] == 30
    home.mkdir()
    (home / "thesis.tex").write_text("precious")
    ran = ctl(storage, *words, home, "--force")
    assert ran.code == 2
    assert (home / "thesis.tex").read_text() == "precious"
    for name in (home, tmp_path / "..", "/"):
        assert ctl(storage, "export", "job", "-o", name, "--force").code == 2
    assert leftovers(tmp_path) == []


def test_a_list_is_no_directory(ctl: Ctl, tmp_path: Path) -> None:
    from pccheck_wire.tree import Sequence, Tag, Tensor

    root = Sequence(Tag.LIST, [Tensor([2], [1], "float32", 0, 0, 0)])
    place = tmp_path / "storage"
    with Rank(place) as rank:
        rank.put(1, state=([floats(1, 2)], root))
    ran = ctl(place, "export", "job", "-o", tmp_path / "a", "--format", "dcp")
    assert ran.code == 2
    assert "--format torch" in ran.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["storage"]


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_state_larger_than_memory_lies_beside_the_file(
    ctl: Ctl, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    reserved: list[int] = []

    def reserve(descriptor: int, nbytes: int, where: Path) -> None:
        reserved.append(nbytes)
        assert where == tmp_path
        files.reserve(descriptor, nbytes, where)

    monkeypatch.setattr(torch_file, "available", lambda: (1000, "a test"))
    monkeypatch.setattr(torch_file, "reserve", reserve)
    assert ctl(storage, "export", "job", "-o", tmp_path / "a", "--format", kind).code == 0
    (nbytes,) = reserved
    assert nbytes >= 4 * WIDE
    found = load(tmp_path / "a", kind)
    wide = found["model"]["wide"] if kind == "torch" else found["model.wide"]
    assert wide.tolist() == numbers(30, WIDE)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "storage"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_told_as_such(
    ctl: Ctl, disk: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """torch's writers hide it behind errors of their own."""
    storage = make(tmp_path_factory.mktemp("elsewhere") / "storage", 10)
    with (disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - WIDE)
    ran = ctl(storage, "export", "job", "-o", disk / "a", "--format", kind, "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "STORAGE_FULL"
    assert [entry.name for entry in disk.iterdir()] == ["filler"]


def test_what_does_not_fit_takes_no_space_from_others(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 allocates all free space before it refuses."""
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _fd, _at, nbytes: asked.append(nbytes))
    with (disk / "file").open("wb") as file:
        with pytest.raises(StorageFullError, match=r"no space for 1\.00 GiB"):
            files.reserve(file.fileno(), 1 << 30, disk)
        files.reserve(file.fileno(), 1 << 20, disk)
    assert asked == [1 << 20]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_for_the_import_of_torch(number: signal.Signals) -> None:
    """Modules that torch imports swallow exceptions: the export would go on, or fail at a
    half-imported module."""

    def terminated(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(number, terminated)
    ended = False
    try:
        with pytest.raises(SystemExit), torch_file.signals_held():
            signal.raise_signal(number)
            ended = True
    finally:
        signal.signal(number, before)
    assert ended


def test_every_rank_gets_a_directory(ctl: Ctl, tmp_path: Path) -> None:
    place = make(tmp_path / "storage", 10, 20, 30, rank=0, world_size=2)
    make(place, 10, 20, rank=1, world_size=2)
    words = ("export", "job", "--format", "dcp", "-o", tmp_path / "r{rank}")
    ran = ctl(place, *words, "--all-ranks")
    assert ran.code == 0, ran.err
    assert [load(tmp_path / f"r{rank}", "dcp")["steps"] for rank in (0, 1)] == [20, 20]
    assert ctl(place, *words, "--all-ranks", "--sequence", 1).code == 2
    ran = ctl(place, "export", "job", "-o", tmp_path / "a.pt", "--rank", 0, "--sequence", 3)
    assert (ran.code, "not all 2 ranks" in ran.err) == (0, False)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["steps"] == 30


def test_the_bar_is_about_what_is_read(
    ctl: Ctl, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = []

    class Kept(command.Bar):
        def __exit__(self, *_: object) -> None:
            bars.append(self)

    monkeypatch.setattr(command, "Bar", Kept)
    ctl(storage, "export", "job", "-o", tmp_path / "a.pt", "--only", "array")
    (bar,) = bars
    assert bar.total < 4 * WIDE


def test_a_directory_is_no_name_of_a_file(storage: Path, ctl: Ctl, tmp_path: Path) -> None:
    told = ctl(storage, "export", "job", "-o", f"{tmp_path}/out/")
    assert told.code == 2
    assert "--format dcp" in told.err
    assert not (tmp_path / "out").exists()
