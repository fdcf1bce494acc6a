"""A rank that trains with FSDP2 and torch.distributed.checkpoint, to be started by torchrun.

`save PLACE`: three steps into job "job", several checkpoints in flight; one by torch's save() into
"planned", one of what is attached into "attached". Rank 0 writes the whole state of the last step
to PLACE/whole.pt, then all ranks kill themselves.
`load PLACE`: another mesh continues from "planned", then from "job", and compares with that file.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load as torch_load
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pccheck import CheckpointState, PCcheckClient
from pccheck.integrations import dcp

LAST = 3


def built(seed: int = 0) -> nn.Sequential:
    """The last layer has fewer rows than there are ranks: some ranks hold nothing of it."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 18), nn.GELU(), nn.Linear(18, 1), nn.BatchNorm1d(1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "progress": Progress()}


class Progress:
    """A Stateful whose values are not tensors."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "steps": 0, "seen": [], "pair": (0, ""), "rate": 0.0, "rank": -1,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


def whole(value: Any) -> Any:
    """The state with whole tensors, without objects."""
    if isinstance(value, Progress):
        return whole(value.values)
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """The paths at which two whole states differ in a bit."""
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        return [
            line for key in wanted for line in differences(found[key], wanted[key], f"{path}.{key}")
        ]
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}.{i}")]
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        same = found.dtype == wanted.dtype and torch.equal(found, wanted)
    else:
        same = type(found) is type(wanted) and found == wanted
    return [] if same else [f"{path}: {found!r} instead of {wanted!r}"]


def save(place: Path) -> None:
    model, mesh = built(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    client, attached = PCcheckClient(), PCcheckClient(job="attached")
    client.attach(optimizer=optimizer)
    attached.attach(model=model, optimizer=optimizer)
    handles = []
    for step in range(1, LAST + 1):
        batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = state_of(model, optimizer)
        state["progress"].values = {
            "steps": step, "seen": [step, step + 1], "pair": (step, "a"), "rate": 0.1,
            "rank": dist.get_rank(),
        }  # fmt: skip
        if step < LAST:
            handles.append(dcp.async_save(state, client=client, step=step))
    planned = PCcheckClient(job="planned", on_error="raise")
    writer = dcp.PCcheckWriter(planned, LAST)
    torch_save(state, storage_writer=writer)
    assert writer.checkpoint is not None
    try:
        torch_save(state, storage_writer=writer)
    except CheckpointException as error:
        assert "has saved step 3 already" in str(error), error
    else:
        raise AssertionError("a writer saves once")
    found = whole(state)
    if dist.get_rank() == 0:
        torch.save(found, place / "whole.pt")
    handles += [dcp.async_save(state, client=client, step=LAST), attached.checkpoint(step=LAST)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # belongs to no checkpoint
    for handle in handles:
        handle.wait_global(60)
    assert writer.checkpoint.state is CheckpointState.GLOBAL, writer.checkpoint
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def load(place: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    wanted = torch.load(place / "whole.pt", weights_only=True)
    if dist.get_rank() == 1:
        wanted["progress"]["rank"] = 1  # its own; ranks that have saved nothing get the first one's

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = built(seed=1)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        optimizer = optimizer_of(model)
        return model, optimizer, state_of(model, optimizer)

    _, _, state = fresh()
    torch_load(state, storage_reader=dcp.PCcheckReader("planned"))
    assert not (lines := differences(whole(state), wanted)), lines

    model, optimizer, state = fresh()
    client = PCcheckClient()
    client.attach(optimizer=optimizer)
    done = dcp.load(state, client=client)
    assert done.step == LAST, done
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    again = state_of(model, optimizer) | {"progress": state["progress"]}
    assert not (lines := differences(whole(again), wanted)), lines
    handle = dcp.save(again, client=client, step=LAST + 1)
    assert handle.state is CheckpointState.GLOBAL, (handle, handle.reason)
    try:
        dcp.load(state, client=client, step=77)
    except Exception as error:
        assert "77" in str(error), error
    else:
        raise AssertionError("there is no step 77")
    client.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
