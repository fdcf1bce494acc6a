"""FSDP2 with PCcheck: each rank saves the shards that it holds, and gets them back.

    export PCCHECK_STORAGE=checkpoints   # with a pccheckd on this node leave it and --autostart out
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --autostart --steps 40

PCcheck stores plain tensors and refuses DTensors. `Shards` stands between: what a rank holds goes
in as it lies in memory, with a note of how it was cut. It comes back into the very same cut only:
as many ranks, the same mesh, the same placements; other ones need an export with torch.distributed
.checkpoint. PCcheck does not see the optimizer through it, hence gate="manual": the loop calls
gate() before each update, and checkpoint() returns at once.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pccheck import PCcheckClient


def cut_of(value: DTensor) -> list[Any]:
    """All that has to be the same again; plain values."""
    mesh = value.device_mesh
    names = list(mesh.mesh_dim_names or ())
    return [mesh.mesh.tolist(), names, str(value.placements), list(value.shape)]


def local(value: Any, path: str, cuts: dict[str, Any]) -> Any:
    """The value with DTensors replaced by what this rank has of them, noted in `cuts`."""
    if isinstance(value, DTensor):
        cuts[path] = cut_of(value)
        return value.to_local().detach()
    if isinstance(value, dict):
        return {key: local(item, f"{path}/{key}", cuts) for key, item in value.items()}
    return value


class Shards:
    """What this rank holds of a sharded model, or of its optimizer; to be attached."""

    def __init__(self, thing: nn.Module | torch.optim.Optimizer) -> None:
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        cuts: dict[str, Any] = {}
        return {"local": local(self.thing.state_dict(), "", cuts), "cuts": cuts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.thing, nn.Module):
            self._load_model(self.thing, state)
        else:
            self._load_optimizer(self.thing, state)

    @staticmethod
    def _load_model(model: nn.Module, state: dict[str, Any]) -> None:
        cuts: dict[str, Any] = {}
        here = local(model.state_dict(), "", cuts)
        require_same(state["cuts"], cuts)
        for name, tensor in here.items():
            tensor.copy_(state["local"][name])

    @staticmethod
    def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Moments are cut as their parameters are; they may not be there yet."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved = state["local"]
        for index, entry in saved["state"].items():
            like = parameters[index]
            for key in entry:
                path = f"/state/{index}/{key}"
                if path in state["cuts"]:
                    require_same({path: state["cuts"][path]}, {path: cut_of(like)})
                    entry[key] = DTensor.from_local(
                        entry[key], like.device_mesh, like.placements, run_check=False,
                        shape=like.shape, stride=like.stride(),
                    )  # fmt: skip
        optimizer.load_state_dict(saved)


def require_same(saved: dict[str, Any], here: dict[str, Any]) -> None:
    for path in sorted(saved.keys() | here.keys()):
        if saved.get(path) != here.get(path):
            raise ValueError(
                f"{path} was cut as {saved.get(path)}, here it is {here.get(path)}: mesh, "
                "placements or shapes have changed, and PCcheck does not reshard"
            )


def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 129), nn.ReLU(), nn.Linear(129, 5))  # uneven shards
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1000 + rank)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(options: argparse.Namespace, rank: int) -> None:
    model, optimizer = build(rank)
    with PCcheckClient(autostart=options.autostart, gate="manual") as client:
        client.attach(weights=Shards(model), moments=Shards(optimizer), rng=True)
        done = client.restore()
        for step in range(done.step + 1 if done else 1, options.steps + 1):
            inputs = torch.randn(8, 16)
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            client.gate()
            optimizer.step()
            if options.losses is not None:
                with (options.losses / str(rank)).open("a") as file:
                    file.write(f"{step} {loss.item().hex()}\n")
            if step % options.every == 0:
                client.checkpoint(step=step)
            if step == options.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            print(f"step {options.steps}, loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--kill-at", type=int, default=0, help="the step at which all ranks die")
    parser.add_argument("--losses", type=Path, help="a directory: every loss, one file per rank")
    parser.add_argument("--autostart", action="store_true", help="a private daemon")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
