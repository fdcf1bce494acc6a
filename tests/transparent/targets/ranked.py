"""One rank of a DistributedDataParallel training over gloo, to be started by torchrun; rank 0
writes the lines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.transparent.targets.steps import Log, words


def main() -> None:
    options = words().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    log = Log(options) if rank == 0 else None
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.2))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, options.steps + 1):
        inputs = torch.randn(16, 64)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if log is not None:
            log.step(step, total.item().hex())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
