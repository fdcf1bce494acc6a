"""Plain DDP with PCcheck: the ranks store one copy together, and any number of ranks restores it.

    export PCCHECK_STORAGE=checkpoints
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --autostart

Kill it and run it again: it continues at the next step. Parameters and optimizer state are the same
on every rank; each rank has generators of its own (data, dropout). Where a pccheckd serves the
node, leave PCCHECK_STORAGE and --autostart out.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pccheck import PCcheckClient

WIDTH, BATCH = 512, 64


def train(options: argparse.Namespace, rank: int) -> None:
    torch.manual_seed(options.seed)
    net = nn.Sequential(
        nn.Linear(64, WIDTH), nn.GELU(), nn.Dropout(0.1),
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1000 * options.seed + rank)  # other data on every rank

    with PCcheckClient(replicated=True, autostart=options.autostart) as client:
        client.attach(model=model, optimizer=optimizer, rng=True)
        done = client.restore()
        if done and rank == 0:
            print(f"resumed at step {done.step}", flush=True)
        for step in range(done.step + 1 if done else 1, options.steps + 1):
            inputs = torch.randn(BATCH, 64)
            loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the ranks
            optimizer.step()
            print(f"rank {rank} step {step} loss {loss.item()}", flush=True)
            if options.every and step % options.every == 0:
                client.checkpoint(step=step)  # every rank, the same steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=20, help="steps; 0 = no checkpoints at all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--autostart", action="store_true", help="a private daemon")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
