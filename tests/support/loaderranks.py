"""Ranks that train over a loader whose data is divided among them, to be started by torchrun.

    python -m tests.support.loaderranks KIND WORKERS [KILL_AFTER]

KIND: ddp or fsdp. A loop over epochs, and over the batches of the loader. Every rank prints the
items of each batch. After step KILL_AFTER the ranks wait until the checkpoint of that step is
global, and kill themselves.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]

from pccheck import PCcheckClient

ITEMS, BATCH, EPOCHS = 48, 4, 3


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def main() -> None:
    kind, workers, *kill_after = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # ranks that differ wait
    rank = dist.get_rank()

    def say(*words: object) -> None:
        os.write(1, f"RANK {rank} {' '.join(map(str, words))}\n".encode())  # in one piece

    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    items = TensorDataset(torch.arange(ITEMS, dtype=torch.float32))
    sampler = DistributedSampler(items, seed=3)
    loader = StatefulDataLoader(items, BATCH, sampler=sampler, num_workers=int(workers))
    progress = {"epoch": 0, "step": 0}
    torch.manual_seed(100 + rank)
    with PCcheckClient(replicated=kind == "ddp") as client:
        client.attach(
            model=model, optimizer=optimizer, loader=loader, rng=True, progress=progress
        )  # fmt: skip
        client.restore()
        say("FROM", progress["epoch"], progress["step"])
        say("GENERATOR", hashlib.sha256(torch.get_rng_state().numpy()).hexdigest())
        for epoch in range(progress["epoch"], EPOCHS):
            progress["epoch"] = epoch
            sampler.set_epoch(epoch)
            for (batch,) in loader:
                say("BATCH", epoch, *map(int, batch))
                model(batch.unsqueeze(1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                progress["step"] += 1
                handle = client.checkpoint(step=progress["step"])
                if kill_after and progress["step"] == int(kill_after[0]):
                    say("GENERATOR", hashlib.sha256(torch.get_rng_state().numpy()).hexdigest())
                    handle.wait_global(60)
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
