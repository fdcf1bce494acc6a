"""FSDP2 with PCcheck: each rank saves the shards that it holds, and gets back those that it needs.

    export PCCHECK_JOB=fsdp2 PCCHECK_STORAGE=checkpoints
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --autostart
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --autostart --steps 600

The second run has another number of ranks, and continues where the first one ended. Model and
optimizer are attached as they are, and the mesh and the placements may change, too. Where a
pccheckd serves the node, leave PCCHECK_STORAGE and --autostart out.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pccheck import PCcheckClient


def build(seed: int, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 129), nn.ReLU(), nn.Linear(129, 5))  # uneven shards
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1000 * seed + rank)  # other data on every rank
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(options: argparse.Namespace, rank: int) -> None:
    model, optimizer = build(options.seed, rank)
    with PCcheckClient(autostart=options.autostart) as client:
        client.attach(model=model, optimizer=optimizer, rng=True)
        done = client.restore()
        if done and rank == 0:
            print(f"resumed at step {done.step}", flush=True)
        for step in range(done.step + 1 if done else 1, options.steps + 1):
            inputs = torch.randn(8, 16)
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"rank {rank} step {step} loss {loss.item()}", flush=True)
            if options.every and step % options.every == 0:
                client.checkpoint(step=step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps; 0 = no checkpoints at all")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--autostart", action="store_true", help="a private daemon")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
