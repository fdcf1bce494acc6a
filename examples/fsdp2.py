"""FSDP2 with PCcheck: each rank saves the shards that it holds, and gets back those that it needs.

    export PCCHECK_STORAGE=checkpoints   # with a pccheckd on this node leave it and --autostart out
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --autostart --steps 40
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --autostart --steps 80

The second run has another number of ranks, and continues where the first one ended. Model and
optimizer are attached as they are, and the mesh and the placements may change, too.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pccheck import PCcheckClient


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
    with PCcheckClient(autostart=options.autostart) as client:
        client.attach(model=model, optimizer=optimizer, rng=True)
        done = client.restore()
        for step in range(done.step + 1 if done else 1, options.steps + 1):
            inputs = torch.randn(8, 16)
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
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
