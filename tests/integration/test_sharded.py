"""DTensors with real ranks: saved, killed, and restored bit by bit in other meshes and by other
numbers of ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from pccheck import PCcheckClient, Reader, Shard
from pccheck_store.filesystem import PCcheckFileSystem
from tests.support.ctl import Ctl, written
from tests.support.daemon import Daemon
from tests.support.shardtraining import equal, launch
from tests.support.torchrun import started
from tests.support.volumes import bases

torch = pytest.importorskip("torch")
torch_dcp = pytest.importorskip("torch.distributed.checkpoint")

STEPS = 3  # of every start


@pytest.mark.long
def test_another_mesh_and_another_number_of_ranks_go_on(
    daemon: Daemon, ctl: Ctl, tmp_path: Path
) -> None:
    """FSDP, tensor parallelism below it (strided shards), replicas, and no sharding at all."""
    last = ""
    starts = [(4, "tp"), (3, "fsdp"), (4, "hsdp"), (1, "none"), (2, "fsdp")]
    for number, (ranks, cut) in enumerate(starts):
        end = (number + 1) * STEPS
        _, said, lines = launch(
            daemon, "job", tmp_path / f"{number}", "--cut", cut, "--frozen", "--steps", "99",
            "--kill-at", str(end), "--expect", str(end - STEPS),
            *["--keep-whole"] * (cut == "tp"), ranks=ranks,
        )  # fmt: skip
        assert len({*map(tuple, lines)}) == 1, said
        assert lines[0][0] == last or not number, said  # what was restored
        last = lines[0][-1]
        assert last.startswith(f"{end} "), said
        written_once(ctl, daemon, ranks, end)
        if cut == "hsdp":
            stored_once(ctl, daemon.storage)
        if cut == "tp":
            whole = torch.load(tmp_path / "0/whole.pt", weights_only=True)
            exported(ctl, daemon.storage, tmp_path, whole)
            exported_as_directories(ctl, daemon, tmp_path, whole)
            imported(ctl, daemon, tmp_path / "0/whole.dcp", whole)
            recovered(daemon, whole["model"])
            read_in_parts(daemon, whole)
    stale = {
        one["rank"]: one["stale"]
        for one in ctl(daemon.storage, "list", "--json").json["checkpoints"]
    }
    assert stale == {0: False, 1: False, 2: True, 3: True}
    assert ", stale" in ctl(daemon.storage, "show", "job", "--rank", 3).out
    assert ", stale" not in ctl(daemon.storage, "show", "job", "--rank", 1).out
    assert ", stale" in ctl(daemon.storage, "status").out


def written_once(ctl: Ctl, daemon: Daemon, ranks: int, step: int) -> None:
    """Frozen tensors are written once: later checkpoints of a rank refer to the first one of its
    start, or to an earlier one."""
    assert {(rank, step) for rank in range(ranks)} <= bases(daemon.storage).keys()
    assert max(written(ctl, daemon.socket)[step][:ranks]) < 1 << 20


def stored_once(ctl: Ctl, storage: Path) -> None:
    """Replicas of a tensor are stored once; their ranks divide the work."""
    shown = [ctl(storage, "show", "job", "--rank", rank, "--json").json for rank in range(4)]
    rows = [
        one["shape"][0]
        for document in shown
        for one in document["tensors"]
        if one["path"] == "model.0.weight"
    ]
    assert rows == [4, 4, 5, 5]


def exported(ctl: Ctl, storage: Path, place: Path, whole: Any) -> None:
    """An export has whole tensors, equal to `full_tensor()`; `show` lists them; a missing rank is
    an error."""
    target = place / "export.pt"
    ran = ctl(storage, "export", "job", "-o", target)
    assert ran.code == 0, ran.err
    found = torch.load(target, weights_only=True)
    assert equal(found["model"], whole["model"])
    assert all(equal(found["optimizer"]["state"][i], entry) for i, entry in whole["state"].items())
    norms = [found["model"][f"{index}.weight"] for index in (3, 4)]
    assert norms[0].data_ptr() == norms[1].data_ptr()  # tied as they were

    target = place / "export.safetensors"
    ran = ctl(storage, "export", "job", "-o", target, "--only", "model", "--rank", 3)
    assert ran.code == 0, ran.err
    assert equal(load_safetensors(target), whole["model"])

    ran = ctl(storage, "show", "job", "--rank", 1)
    assert "5x33 at 9,0 of 18x33" in ran.out
    weight = next(
        one for one in ctl(storage, "show", "job", "--rank", 1, "--json").json["tensors"]
        if one["path"] == "model.0.weight"
    )  # fmt: skip
    assert (weight["shape"], weight["whole_shape"], weight["whole_offsets"]) == (
        [5, 33], [18, 33], [9, 0],
    )  # fmt: skip
    assert ctl(storage, "verify", "job").code == 0

    (volume,) = storage.rglob("rank-2.*.pcc")
    volume.rename(place / "away")
    ran = ctl(storage, "export", "job", "-o", place / "part.pt", "--rank", 0)
    assert ran.code != 0 and "rank 2" in ran.err, ran.err
    assert not (place / "part.pt").exists()
    (place / "away").rename(volume)


def exported_as_directories(ctl: Ctl, daemon: Daemon, place: Path, whole: Any) -> None:
    """An export is one consolidated checkpoint, which loads without ranks, also through fsspec."""
    words = ("export", "job", "--format")
    target = place / "huggingface"
    sizes = ("--only", "model", "--max-shard-size", "1KiB")
    assert ctl(daemon.storage, *words, "huggingface", "-o", target, *sizes).code == 0
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    found = {k: v for file in files for k, v in load_safetensors(target / file).items()}
    found |= {name: found[index["metadata"][name]] for name in ("4.weight", "4.bias")}
    assert equal(found, whole["model"])

    target = place / "dcp"
    assert ctl(daemon.storage, *words, "dcp", "-o", target).code == 0
    state = {
        "model": {name: torch.zeros_like(one) for name, one in whole["model"].items()},
        "optimizer": {
            "state": {
                str(number): {name: torch.zeros_like(one) for name, one in entry.items()}
                for number, entry in whole["state"].items()
            }
        },
    }
    with warnings.catch_warnings(action="ignore"):
        torch_dcp.load(state, checkpoint_id=target, no_dist=True)
    assert equal(state["model"], whole["model"])
    moments = state["optimizer"]["state"]
    assert all(equal(moments[str(i)], entry) for i, entry in whole["state"].items())

    for options in ({"storage": str(daemon.storage)}, {"socket": str(daemon.socket)}):
        fs = PCcheckFileSystem(**options)
        data = fs.cat("job/newest/model.safetensors")
        assert equal(pytest.importorskip("safetensors.torch").load(data), whole["model"])


def imported(ctl: Ctl, daemon: Daemon, place: Path, whole: Any) -> None:
    """A checkpoint of four ranks by torch.distributed.checkpoint becomes a job with whole
    tensors."""
    assert len(list(place.glob("*.distcp"))) == 4
    ran = ctl(None, "--socket", daemon.socket, "import", "imported", place, "--step", "3")
    assert ran.code == 0, ran.err
    with PCcheckClient(job="imported", socket=daemon.socket) as client:
        found = client.recover()
    assert found.step == 3 and equal(found.state["model"], whole["model"])
    moments = found.state["optimizer"]["state"]
    assert all(equal(moments[i], entry) for i, entry in whole["state"].items())


def load_safetensors(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = pytest.importorskip("safetensors.torch").load_file(file)
    return found


def recovered(daemon: Daemon, whole: dict[str, Any]) -> None:
    """recover() in another process, with nothing attached, returns the blocks of rank 0."""
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        found = client.recover().state["model"]
    assert found.keys() == whole.keys()
    for name, block in found.items():
        assert isinstance(block, Shard) and block.shape == tuple(whole[name].shape)
        sizes = zip(block.offsets, block.tensor.shape, strict=True)
        window = tuple(slice(at, at + size) for at, size in sizes)
        assert torch.equal(block.tensor.detach(), whole[name][window].detach()), name


def read_in_parts(daemon: Daemon, whole: dict[str, Any]) -> None:
    """A reader reads whole tensors, blocks across several ranks, and the blocks of one rank."""
    with Reader("job", socket=daemon.socket) as reader, reader.open() as one:
        state = one.read()
        assert one.ranks == (0, 1, 2, 3) and equal(state["model"], whole["model"])
        assert all(equal(state["optimizer"]["state"][i], e) for i, e in whole["state"].items())
        norms = [state["model"][f"{index}.weight"] for index in (3, 4)]
        assert norms[0].data_ptr() == norms[1].data_ptr()  # tied as they were
        assert equal(one.read("model", rank=None), whole["model"])

        weight = whole["model"]["0.weight"]  # 18 x 33, of which rank 1 has 5 rows from row 9 on
        part = torch.zeros(20, 11).t()
        one.read_into("model.0.weight", part, offsets=[4, 10])
        assert torch.equal(part, weight[4:15, 10:30])
        info = one.leaves(1)["model.0.weight"]
        assert (info.shape, info.whole_shape, info.offsets) == ((5, 33), (18, 33), (9, 0))
        assert info.is_shard and info.mesh == (2, 2) and len(info.placements) == 2
        row = torch.zeros(2, 33)
        one.read_into("model.0.weight", row, rank=1, offsets=[2, 0])
        assert torch.equal(row, weight[11:13])
        mine = one.read("model.0.weight", rank=1)
        assert isinstance(mine, Shard) and torch.equal(mine.tensor, weight[9:14])


FSDP1 = """
import sys, torch, torch.distributed as dist, warnings
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from pccheck import PCcheckClient, UsageError

dist.init_process_group("gloo")
torch.manual_seed(0)
wrap = lambda module: FSDP(module, device_id=torch.device("cpu"), use_orig_params=True)
model = wrap(nn.Sequential(nn.Linear(8, 8), wrap(nn.Linear(8, 8))))
optimizer = torch.optim.AdamW(model.parameters())
if dist.get_rank() == 0:
    try:
        with PCcheckClient(job="alone", solo=True) as client:
            client.attach(model=model, optimizer=optimizer)
    except UsageError as error:
        print("REFUSED", error)
with PCcheckClient() as client:
    client.attach(model=model, optimizer=optimizer)
    first = client.restore().step + 1
    for step in range(first, first + 2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        client.checkpoint(step=step).wait_durable(60)
    with FSDP.summon_full_params(model):
        total = sum(p.double().sum().item() for p in model.parameters())
        sys.stdout.write(f"SUM {step} {total}\\n")  # at once: both ranks write to one pipe
dist.destroy_process_group()
"""


def test_fsdp1_is_told_what_it_costs_and_resumes(daemon: Daemon) -> None:
    said = []
    for _ in range(2):
        with started(daemon, "job", 2, "tests.support.snippet", FSDP1) as launcher:
            said.append(launcher.finish())
        assert launcher.returncode == 0, said[-1]
    for text, step in zip(said, (2, 4), strict=True):
        assert text.count("each checkpoint() gathers the whole model") == 1, text
        assert text.count("REFUSED solo=True saves on one rank") == 1, text
        sums = [line for line in text.splitlines() if line.startswith(f"SUM {step} ")]
        assert len(sums) == 2 and len(set(sums)) == 1, text
