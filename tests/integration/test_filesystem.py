"""`pccheck://` with fsspec: the files are those that `pccheckctl export` writes, byte by byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pccheck import DamagedError, PCcheckClient, UsageError
from pccheck_store.filesystem import PCcheckFileSystem
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon
from tests.support.volumes import Rank, damage, floats

fsspec = pytest.importorskip("fsspec")


def exported(ctl: Ctl, storage: Path, target: Path, *words: object) -> bytes:
    ran = ctl(storage, "export", "job", "-o", target, "--format", "safetensors", *words)
    assert ran.code == 0, ran.err
    return target.read_bytes()


def test_a_file_is_what_an_export_writes(ctl: Ctl, storage: Path, tmp_path: Path) -> None:
    """Strided, tied and empty tensors; whole, and in parts that begin and end anywhere."""
    registered = fsspec.filesystem("pccheck", storage=str(storage))
    assert isinstance(registered, PCcheckFileSystem)  # or Lightning's, which is one
    fs = PCcheckFileSystem(storage=str(storage))
    assert fs.ls("", detail=False) == ["job"]
    assert fs.ls("pccheck://job", detail=False) == ["job/30", "job/20", "job/10"]
    assert [one["sequence"] for one in fs.ls("job")] == [3, 2, 1]
    assert fs.isdir("job/20") and fs.isdir("job/newest") and fs.isdir("")

    whole = exported(ctl, storage, tmp_path / "whole")
    assert fs.ls("job/newest", detail=False) == ["job/newest/state.safetensors"]
    with fsspec.open("pccheck://job/newest/state.safetensors", storage=str(storage)) as file:
        assert file.read() == whole
    model = exported(ctl, storage, tmp_path / "model", "--only", "model", "--step", 20)
    path = "job/20/model.safetensors"
    assert fs.cat(path) == model and fs.size(path) == len(model) and fs.isfile(path)
    fs.get(path, str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == model
    draw = random.Random(1)
    with fs.open(path, cache_type="none") as file:
        for _ in range(200):
            first, end = sorted(draw.choices(range(len(model) + 1), k=2))
            file.seek(first)
            assert file.read(end - first) == model[first:end], (first, end)
    row = exported(ctl, storage, tmp_path / "row", "--only", "model.row")
    assert fs.cat("job/newest/model.row.safetensors") == row


def test_what_is_not_there(storage: Path) -> None:
    fs = PCcheckFileSystem(storage=str(storage))
    for path, said in {
        "other": "job 'other'", "job/7": "it has 30, 20, 10", "job/x/model.safetensors": "step x",
        "job/20/modle.safetensors": "it has model, optimizer", "job/20/model.pt": "JOB/STEP/NAME",
        "job/20/model/x": "JOB/STEP/NAME", "job/20/a.safetensors/b/c": "JOB/STEP/NAME",
    }.items():  # fmt: skip
        assert not fs.exists(path)
        with pytest.raises(FileNotFoundError, match=said):
            fs.info(path)
        with pytest.raises(FileNotFoundError):
            fs.ls(path)
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            fs.open(path)
    with pytest.raises(UsageError, match="pccheckctl import"):
        fs.open("job/20/model.safetensors", "wb")
    with pytest.raises(IsADirectoryError):
        fs.open("job/20")


def test_damage_is_raised(storage: Path) -> None:
    damage(storage, 20, at=5000)
    fs = PCcheckFileSystem(storage=str(storage))
    path = "job/20/model.safetensors"
    with fs.open(path, block_size=16) as file, pytest.raises(DamagedError):
        assert file.read(8)
        file.read()


def test_parts_and_a_state_without_parts(tmp_path: Path) -> None:
    from pccheck_wire.tree import Mapping, Node, Tag, Tensor
    from tests.support.volumes import mapping

    def tensor(extent: int) -> Node:
        return Tensor([2], [1], "float32", 0, extent, 0)

    place = tmp_path / "storage"
    data = [floats(step, 2) for step in (1, 2, 3)]
    parts = mapping(
        model=mapping(w=tensor(0)), state=mapping(w=tensor(1)), values=mapping(a=1), step=3,
        other=Mapping(Tag.DICT, [(0, tensor(2))]),
    )  # fmt: skip
    with Rank(place) as rank:
        rank.put(1, state=(data, parts))
        rank.put(2, state=(data[:1], tensor(0)))
    fs = PCcheckFileSystem(storage=str(place))
    names = ["model", "state", "other"]
    assert fs.ls("job/1", detail=False) == [f"job/1/{name}.safetensors" for name in names]
    for number, name in enumerate(names):
        assert fs.cat(f"job/1/{name}.safetensors").endswith(bytes(data[number]))
    assert fs.ls("job/2", detail=False) == ["job/2/state.safetensors"]
    assert fs.cat("job/2/state.safetensors").endswith(bytes(data[0]))


def test_a_running_job(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    """Through the daemon, which leases the checkpoint of an open file: newer ones do not replace
    it."""
    model = torch.nn.Linear(1000, 300)
    with PCcheckClient("job", 0, 1, socket=daemon.socket, on_error="raise") as client:
        client.attach(model=model)
        client.checkpoint(step=1).wait_durable(60)
        fs = PCcheckFileSystem(socket=str(daemon.socket))
        assert fs.ls("job/newest", detail=False) == ["job/newest/model.safetensors"]
        with fs.open("job/newest/model.safetensors", block_size=100_000) as file:
            start = file.read(1000)
            for step in range(2, 7):
                model.weight.data.fill_(step)
                client.checkpoint(step=step).wait_durable(60)
            found = start + file.read()
        wanted = exported(ctl, daemon.storage, tmp_path / "model", "--only", "model", "--step", 1)
        assert found == wanted
        newest = exported(ctl, daemon.storage, tmp_path / "new", "--only", "model", "--step", 6)
        assert fs.cat("job/newest/model.safetensors") == newest
