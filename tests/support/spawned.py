"""`python -m tests.support.spawned SOCKET HOW`: ranks of mp.spawn, which have no RANK; each prints
a line."""

import sys
from tempfile import TemporaryDirectory

import torch
from torch import distributed, multiprocessing

from pccheck import PCcheckClient, PccheckError

RANKS = 2


def work(rank: int, socket: str, how: str, meeting: str) -> None:
    torch.set_num_threads(1)
    early = PCcheckClient("spawned", socket=socket) if how == "early" else None
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
    )
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, rank)
    with early or PCcheckClient("spawned", socket=socket) as client:
        client.attach(model=model)
        try:
            step = client.restore().step
            client.checkpoint(step=step + 1).wait_global(60)
            print(f"{rank}: {step} {model.weight[0, 0].item():g}\n", end="", flush=True)
        except PccheckError as error:
            print(f"{rank}: {error}\n", end="", flush=True)
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        multiprocessing.spawn(work, (*sys.argv[1:3], f"{place}/meeting"), nprocs=RANKS)  # type: ignore[no-untyped-call]
