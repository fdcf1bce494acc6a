"""`python -m tests.support.spawned SOCKET HOW METHOD`: ranks of torch.multiprocessing, which do not
have the variable RANK. Each prints a line. METHOD is "spawn", as of mp.spawn, or "fork"."""

import contextlib
import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed, multiprocessing

from pccheck import CheckpointFailedError, PCcheckClient, PccheckError

RANKS = 2


def kit() -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # spawned ranks need none

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(made: dict[str, Any]) -> None:
    made["optimizer"].zero_grad()
    made["model"](torch.ones(2, 4)).square().mean().backward()
    made["optimizer"].step()
    made["scheduler"].step()


def zero(rank: int, socket: str) -> None:
    """Half of the optimizer's state on each rank."""
    straight = kit()
    for step in range(4):
        train(straight)
        made = kit()
        with PCcheckClient("zero", socket=socket, on_error="raise") as client:
            client.attach(**made)
            assert client.restore().step == step
            train(made)
            client.checkpoint(step=step + 1).wait_global(60)
    one, other = (list(found["model"].parameters()) for found in (straight, made))
    same = all(map(torch.equal, one, other))
    rates = [found["optimizer"].param_groups[0]["lr"] for found in (straight, made)]
    print(f"{rank}: {same and rates[0] == rates[1]}\n", end="", flush=True)


def interrupted(rank: int, socket: str) -> None:
    """Ctrl-C, or the end of another rank, in the exchange of the new parameters: those of the other
    rank are still of the step before."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    made = kit()
    with PCcheckClient("interrupted", socket=socket) as client:
        client.attach(**made)
        train(made)
        client.checkpoint(step=1).wait_global(60)
        made["optimizer"]._sync_params = interrupt
        with contextlib.suppress(KeyboardInterrupt):
            train(made)
        before = {name: p.clone() for name, p in made["model"].named_parameters()}
        with contextlib.suppress(CheckpointFailedError):
            client.checkpoint(step=2).wait_global(60)
        step = client.restore().step
        changed = any(not torch.equal(p, before[n]) for n, p in made["model"].named_parameters())
    print(f"{rank}: {step} {changed}\n", end="", flush=True)


def work(rank: int, socket: str, how: str, meeting: str) -> None:
    torch.set_num_threads(1)
    early = PCcheckClient("spawned", socket=socket) if how == "early" else None
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
    )
    if how in ("zero", "interrupted"):
        (zero if how == "zero" else interrupted)(rank, socket)
        distributed.destroy_process_group()
        return
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


def main() -> None:
    socket, how, method = sys.argv[1:]
    with TemporaryDirectory() as place:
        multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            work, (socket, how, f"{place}/meeting"), nprocs=RANKS, start_method=method
        )
