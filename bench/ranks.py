"""The times of several ranks of a job: from the request to durable, and to durable on all ranks.

    python -m bench.ranks [--size 64MiB] [--steps 30] [--rounds 5] [--directory DIR]

Cases: one rank alone with `size` bytes; two ranks of `size` each, in lockstep, a checkpoint every
step as soon as the previous one is durable on both; the same with replicated=True and with the
DTensors of HSDP (two replicas), where two and four ranks store `size` bytes together. Real daemon,
real trainers, a barrier per step. Each case runs in a new interpreter.
Writes bench/results/ranks-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench import common
from bench.common import MIB, Spread
from bench.ours import Daemon
from pccheck import PCcheckClient

CASES = {
    "1 rank": (1, ""), "2 ranks": (2, ""), "2 ranks, replicated": (2, "replicated"),
    "4 ranks, replicated": (4, "replicated"), "2 ranks, HSDP": (2, "HSDP"),
    "4 ranks, HSDP": (4, "HSDP"),
}  # fmt: skip
WARM = 5


def replicas(rank: int, world_size: int, socket: Path, size: int) -> list[Any]:
    """What HSDP makes of eight parameters: each is sharded within each of two replicas."""
    dist.init_process_group(
        "gloo", init_method=f"file://{socket.with_name('ranks')}", rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    parts = torch.zeros(size // 4 // (world_size // 2)).chunk(8)
    return [DTensor.from_local(part, mesh, [Replicate(), Shard(0)]) for part in parts]


def train(rank: int, world_size: int, how: str, socket: Path, size: int, steps: int,
          board: memoryview) -> list[tuple[float, float]]:  # fmt: skip
    """Seconds to durable, and to durable on every rank."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    if how == "HSDP":
        pieces = replicas(rank, world_size, socket, size)
    else:
        pieces = [*torch.zeros(size // 4).chunk(8 if how else 1)]
    model = torch.nn.ParameterList([torch.nn.Parameter(piece) for piece in pieces])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    more: dict[str, Any] = {"replicated": True} if how == "replicated" else {}
    took: list[tuple[float, float]] = []
    client = PCcheckClient("bench", rank, world_size, socket=socket, **more)
    client.attach(model=model, optimizer=optimizer)
    for step in range(1, steps + WARM + 1):
        for one in model:
            one.grad = torch.ones_like(one)
        optimizer.step()
        board[rank] = step  # nobody asks before all have come
        while min(board[:world_size]) < step:
            time.sleep(0.0002)
        began = time.monotonic()
        handle = client.checkpoint(step=step)
        handle.wait_durable(60)
        durable = time.monotonic() - began
        board[8 + rank] = step
        while min(board[8 : 8 + world_size]) < step:
            time.sleep(0.0002)
        took.append((durable, time.monotonic() - began))
    client.close()
    return took[WARM:]


def once(case: str, size: int, steps: int, directory: Path) -> list[tuple[float, float]]:
    """Times of all ranks, in one process each."""
    world_size, how = CASES[case]
    board = mmap.mmap(-1, 4096)
    flags = ("--chunk", "4MiB", "--dram", "1GiB", "--engine", "pwrite")
    with common.scratch(directory) as storage, Daemon(*flags, storage=storage) as daemon:
        daemon.start()
        pipes = []
        for rank in range(world_size):
            ours, theirs = os.pipe()
            if os.fork() == 0:
                try:
                    view = memoryview(board).cast("q")
                    took = train(rank, world_size, how, daemon.socket, size, steps, view)
                    os.write(theirs, json.dumps(took).encode())
                finally:
                    os._exit(0)
            os.close(theirs)
            pipes.append(ours)
        return [tuple(item) for pipe in pipes for item in json.loads(os.fdopen(pipe, "rb").read())]


def main() -> None:
    parser = common.arguments(__doc__, rounds=5)
    parser.add_argument("--size", type=common.parse_sizes, default=[64 * MIB])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--once", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (size,) = options.size
    if options.once:
        print(json.dumps(once(options.once, size, options.steps, options.directory)))
        return
    facts = common.facts_of(options.directory)
    command = [sys.executable, "-m", "bench.ranks", *sys.argv[1:], "--once"]
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in options.cases}
    for _ in range(options.rounds):
        for case, times in found.items():
            done = subprocess.run([*command, case], check=True, stdout=subprocess.PIPE)
            times += json.loads(done.stdout.splitlines()[-1])
    lines = common.heading("Several ranks of one job", facts)
    lines += [
        f"{size // MIB} MiB per rank, or for all ranks together where replicated or HSDP; "
        f"{options.rounds} rounds of {options.steps} checkpoints, the cases in turn.", "",
        "| case | to durable, ms, median [min-max] | to durable on all ranks |", "|---|---|---|",
    ]  # fmt: skip
    for case, times in found.items():
        spreads = (Spread.of([1e3 * one[part] for one in times]).text(1) for part in (0, 1))
        lines.append(f"| {case} | {' | '.join(spreads)} |")
    common.write_results("ranks", facts | {"seconds": found}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
