"""A rank that trains a sharded model, to be started by torchrun.

Writes a line for every step to DIGESTS/RANK: `step digest common`. The digest is of the whole
parameters and moments, gathered from all ranks. `common` is the newest step that the rank knows to
be global. The first line is for the restored step, 0 if nothing was restored.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from pccheck import Checkpoint, CheckpointState, PCcheckClient

from .daemon import Daemon
from .torchrun import started

COUNTED = 16  # handles that are looked at
FROZEN = 36_000_300 // 28 * 28  # bytes, with --frozen
#: The states of a checkpoint that all ranks have: with several ranks, and with one.
ENDED = ((CheckpointState.GLOBAL,), (CheckpointState.DURABLE, CheckpointState.GLOBAL))


def built(cut: str, size: int, *, frozen: bool = False) -> nn.Module:
    """`cut`: fsdp, hsdp (two replicas), tp (two ranks share a layer) or none. No number of ranks
    divides the sizes. `frozen`: with a large table that is not trained."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(7)  # used twice: its parameters are tied
    model = nn.Sequential(nn.Linear(33, 18), nn.GELU(), nn.Linear(18, 7), norm, norm)
    if frozen:
        table = torch.arange(FROZEN // 4, dtype=torch.float32).view(-1, 7)
        model.register_parameter("table", nn.Parameter(table, requires_grad=False))
    if cut == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    elif cut == "tp":
        whole = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, whole["tp"], plan)
        mesh = whole["dp"]
    elif cut == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
    else:
        return model
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, *, trained: bool) -> str:
    """Of what is trained, or of what is frozen."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.requires_grad is not trained:
            continue
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            found.update(whole(tensor.detach()).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def keep_whole(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes what an export must equal (whole tensors, gathered by torch), and what an import reads
    (the shards, saved by torch)."""
    parameters = optimizer.param_groups[0]["params"]
    found = {
        "model": {name: whole(tensor) for name, tensor in model.state_dict().items()},
        "state": {
            index: {key: whole(tensor) for key, tensor in optimizer.state[parameter].items()}
            for index, parameter in enumerate(parameters) if parameter in optimizer.state
        },
    }  # fmt: skip
    if dist.get_rank() == 0:
        torch.save(found, place)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=place.with_suffix(".dcp"))


def launch(
    daemon: Daemon, job: str, digests: Path, *flags: str, ranks: int
) -> tuple[int, str, list[list[str]]]:
    """Runs the ranks; returns how they ended, and the steps and digests that each printed."""
    digests.mkdir()
    program = ("tests.support.shardtraining", digests)
    with started(daemon, job, ranks, *program, *flags) as launcher:
        said = launcher.finish()
    printed = [(digests / str(rank)) for rank in range(ranks)]
    lines = [path.read_text().splitlines() if path.exists() else [] for path in printed]
    kept = [[line.rpartition(" ")[0] for line in one] for one in lines]
    assert launcher.returncode is not None
    return launcher.returncode, said, kept


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key], wanted[key]) for key in wanted
    )


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("digests", type=Path)
    flags.add_argument("--cut", default="fsdp")
    flags.add_argument("--frozen", action="store_true")
    flags.add_argument("--keep-whole", action="store_true", help="before the kill: see there")
    flags.add_argument("--on-busy", default="wait")
    flags.add_argument("--replicated", action="store_true", help="each node stores a whole copy")
    flags.add_argument("--steps", type=int, default=6)
    flags.add_argument("--kill-at", type=int, default=-1)
    flags.add_argument("--expect", type=int, default=-1, help="the step that must be restored")
    given = flags.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = built(given.cut, size, frozen=given.frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    client = PCcheckClient(on_busy=given.on_busy, replicated=given.replicated)
    client.attach(model=model, optimizer=optimizer)
    restored = client.restore()
    with (given.digests / str(rank)).open("a", buffering=1) as out:
        frozen = digest(model, optimizer, trained=False)
        print(
            restored.step, frozen + digest(model, optimizer, trained=True), restored.step, file=out
        )
        (given.digests / f"{rank}.pid").write_text(str(os.getpid()))
        handles: list[Checkpoint] = []
        common = restored.step
        assert given.expect < 0 or restored.step == given.expect, restored
        for step in range(restored.step + 1, given.steps + 1):
            batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(step, frozen + digest(model, optimizer, trained=True), common, file=out)
            handle = client.checkpoint(step=step)
            handles.append(handle)
            done = [one.step for one in handles if one.state in ENDED[size == 1]]
            common = max(done, default=common)
            del handles[:-COUNTED]
            if given.frozen:  # so that it depends on no timing which checkpoint is written whole
                handle.wait_global(60)
            if step == given.kill_at:
                if given.keep_whole:
                    keep_whole(given.digests / "whole.pt", model, optimizer)
                handle.wait_global(60)
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
