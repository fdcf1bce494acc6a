"""The times of several ranks of a job: from the request to durable, and to durable on all ranks.

    python -m bench.ranks [--size 64MiB] [--steps 30] [--rounds 5] [--other DIR]

Cases: one rank alone with `size` bytes; two ranks of `size` each, in lockstep, a checkpoint every
step as soon as the previous one is durable on both; the same with replicated=True and with the
DTensors of HSDP (two replicas), where two and four ranks store `size` bytes together. Real daemon,
real trainers, a barrier per step. `--other` names another checkout with its extension built (pip
install --target does it): the cases in which each rank stores its own run in turn with both, and
the ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = {
    "1 rank": (1, ""), "2 ranks": (2, ""), "2 ranks, replicated": (2, "replicated"),
    "4 ranks, replicated": (4, "replicated"), "2 ranks, HSDP": (2, "HSDP"),
    "4 ranks, HSDP": (4, "HSDP"),
}  # fmt: skip
WARM = 5


def replicas(rank: int, world_size: int, socket: Path, size: int) -> list[Any]:
    """What HSDP makes of eight parameters: each is sharded within each of two replicas."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group(
        "gloo", init_method=f"file://{socket.with_name('ranks')}", rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    parts = torch.zeros(size // 4 // (world_size // 2)).chunk(8)
    return [DTensor.from_local(part, mesh, [Replicate(), Shard(0)]) for part in parts]


def train(rank: int, world_size: int, how: str, socket: Path, size: int, steps: int,
          board: memoryview) -> list[tuple[float, float]]:  # fmt: skip
    """Seconds to durable, and to durable on every rank."""
    import torch

    from pccheck import PCcheckClient

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


def once(case: str, size: int, steps: int) -> list[tuple[float, float]]:
    """Times of all ranks, in one process each."""
    import torch  # noqa: F401  (once, before the ranks are forked)

    from bench.ours import Daemon

    world_size, how = CASES[case]
    board = mmap.mmap(-1, 4096)
    with Daemon("--chunk", "4MiB", "--dram", "1GiB", "--engine", "pwrite") as daemon:
        daemon.start()
        pipes = []
        for rank in range(world_size):
            ours, theirs = os.pipe()
            if os.fork() == 0:
                view = memoryview(board).cast("q")
                took = train(rank, world_size, how, daemon.socket, size, steps, view)
                os.write(theirs, json.dumps(took).encode())
                os._exit(0)
            os.close(theirs)
            pipes.append(ours)
        return [tuple(item) for pipe in pipes for item in json.loads(os.fdopen(pipe, "rb").read())]


def run(case: str, size: int, steps: int, place: str) -> list[tuple[float, float]]:
    """In a fresh interpreter, with the code at `place` ("": this one's)."""
    root = Path(place).absolute() if place else Path(__file__).parents[1]
    paths = ":".join(str(root / path) for path in ("client", "native", ""))
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).resolve()), "--once", case, "--size", str(size),
               "--steps", str(steps)]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def spread(times: list[float]) -> str:
    scaled = [1e3 * one for one in times]
    return f"{statistics.median(scaled):.1f} [{min(scaled):.1f}-{max(scaled):.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--size", default="64MiB")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--other", default="")
    parser.add_argument("--once", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(once(given.once, int(given.size), given.steps)))
        return
    from bench import common

    (size,) = common.parse_sizes(given.size)
    load = os.getloadavg()[0]
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for case in given.cases:
            places = {"": case}
            if given.other and not CASES[case][1]:
                places[given.other] = f"{case}, other"
            for place, name in places.items():
                found.setdefault(name, []).extend(run(case, size, given.steps, place))
    lines = common.heading("Several ranks of one job", common.facts_of(Path.cwd()))
    lines += [
        f"{given.size} per rank, or for all ranks together where replicated or HSDP; "
        f"{given.rounds} rounds of {given.steps} checkpoints, the cases in turn. "
        f"Load average at the beginning: {load:.1f}.", "",
        "| case | to durable, ms, median [min-max] | to durable on all ranks |", "|---|---|---|",
    ]  # fmt: skip
    for name, times in found.items():
        durable, together = ([one[part] for one in times] for part in (0, 1))
        lines.append(f"| {name} | {spread(durable)} | {spread(together)} |")
    for case in CASES:
        if f"{case}, other" in found:
            ours, other = (
                statistics.median(one[0] for one in found[name])
                for name in (case, f"{case}, other")
            )
            lines.append(f"\n{case}: this to other, medians to durable: {ours / other:.3f}")
    document = {"size_bytes": size, "steps": given.steps, "seconds": found}
    common.write_results("ranks", document, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
