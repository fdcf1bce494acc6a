"""Ranks of an FSDP2 model some of whose parameters are shorter than the number of ranks.

    started(daemon, job, ranks, "tests.support.emptyshards")

continues for three steps. Rank 0 prints a digest of the whole parameters and moments: `READ` as
rank 0 alone has read and broadcast them, `FROM` as restored, and `AT` after the last step."""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pccheck import PCcheckClient, Reader
from tests.support.shardtraining import whole

STEPS = 3


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 1), nn.Linear(1, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.05)


def tell(what: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found, tensors = hashlib.sha256(), 0
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            found.update(whole(tensor.detach()).contiguous().numpy().tobytes())
            tensors += 1
    if dist.get_rank() == 0:
        print(what, step, tensors, found.hexdigest(), flush=True)


def read_by_rank_0() -> None:
    """Into another model: the others have nothing but what rank 0 broadcasts."""
    model, optimizer = made()
    parameters, state = {}, {}
    with Reader(os.environ["PCCHECK_JOB"]) as reader:
        checkpoint = reader.open()
        if dist.get_rank() == 0:
            parameters, saved = checkpoint.read("model"), checkpoint.read("optimizer")
            (group,) = saved["param_groups"]
            names = group.pop("param_names")
            state = {"state": {name: saved["state"][at] for at, name in enumerate(names)}}
            state["param_groups"] = [group | {"params": names}]
        step = checkpoint.step
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, parameters, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    tell("READ", step, model, optimizer)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = made()
    with PCcheckClient() as client:
        client.attach(model=model, optimizer=optimizer)
        first = client.restore().step
        if first:
            read_by_rank_0()
            tell("FROM", first, model, optimizer)
        for step in range(first + 1, first + STEPS + 1):
            batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = client.checkpoint(step=step)
        handle.wait_global(60)
        tell("AT", step, model, optimizer)
    dist.destroy_process_group()
