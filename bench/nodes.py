"""What it costs that several nodes agree: from durable on the slowest rank to global on all.

    python -m bench.nodes [--nodes 2 4] [--size 1MiB] [--steps 40] [--rounds 3] [--directory DIR]

Each node is a daemon with one rank; all are on this machine, and the torch store is in a process of
its own. A step takes 20 ms, and has a checkpoint. In each round every number of nodes is tried with
agreement, and with ranks that save alone, each under a job name of its own. The round trip of the
store is measured between the steps, through another connection.
Writes bench/results/nodes-DATE.{json,md}.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from bench import common
from bench.common import MIB, Spread
from bench.ours import Daemon
from pccheck import PCcheckClient
from tests.support.torchstore import TorchStore

STEP_S = 0.02
WARM = 5


def train(rank: int, world: int, alone: bool, socket: Path, size: int, steps: int,
          board: memoryview, port: int) -> dict[str, Any]:  # fmt: skip
    """Of each step: seconds to durable and to global, CLOCK_MONOTONIC; and how long all took."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(size // 4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    store: Any = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False
    )
    named: dict[str, Any] = {"job": f"alone-{rank}", "solo": True} if alone else {"job": "bench"}
    client = PCcheckClient(rank=rank, world_size=world, socket=socket, **named)
    client.attach(model=model, optimizer=optimizer)
    client.restore()
    times, trips, began_s = [], [], 0.0
    for step in range(1, 2 * steps + WARM + 1):
        waits = step <= steps + WARM  # later steps show what agreement costs the training
        if step == steps + WARM + 1:
            began_s = time.monotonic()
        board[rank] = step
        while min(board[:world]) < step:
            time.sleep(0.0002)
        model.weight.grad = torch.ones_like(model.weight)
        time.sleep(STEP_S)
        optimizer.step()
        handle = client.checkpoint(step=step)
        if waits and not alone:
            handle.wait_durable(60)
            durable_s = time.monotonic()
            handle.wait_global(60)
            times.append((durable_s, time.monotonic()))
            asked_s = time.monotonic()
            store.add("bench", 1)
            trips.append(time.monotonic() - asked_s)
    ended_s = time.monotonic()
    client.close()
    return {"times": times[WARM:], "trips": trips[WARM:], "step_s": (ended_s - began_s) / steps}


def once(nodes: int, alone: bool, options: Any) -> dict[str, Any]:
    """One rank on each of so many nodes."""
    (size,), board = options.size, mmap.mmap(-1, 4096)
    flags = ("--chunk", "1MiB", "--dram", "64MiB", "--engine", "pwrite")
    with common.scratch(options.directory) as directory, TorchStore() as store:
        daemons = [Daemon(*flags, storage=directory / str(n)).start() for n in range(nodes)]
        try:
            pipes = []
            for rank, daemon in enumerate(daemons):
                ours, theirs = os.pipe()
                if os.fork() == 0:
                    try:
                        os.environ |= store.environment("bench", 1, 0)
                        view = memoryview(board).cast("q")
                        took = train(rank, nodes, alone, daemon.socket, size, options.steps, view,
                                     store.port)  # fmt: skip
                        os.write(theirs, json.dumps(took).encode())
                    finally:
                        os._exit(0)
                os.close(theirs)
                pipes.append(ours)
            if not alone:
                board_view = memoryview(board).cast("q")
                while min(board_view[:nodes]) < 2 * options.steps + WARM:
                    time.sleep(0.01)
            rows = [row for d in daemons for row in d.status().get("nodes", [])]
            found = [json.loads(os.fdopen(pipe, "rb").read()) for pipe in pipes]
        finally:
            for daemon in daemons:
                daemon.cleanup()
    per_global = [row["operations_per_global"] for row in rows if row["operations_per_global"]]
    lags = [
        max(ends[1] for ends in step) - max(ends[0] for ends in step)
        for step in zip(*(one["times"] for one in found), strict=True)
    ]
    return {
        "lag_s": lags, "trip_s": [trip for one in found for trip in one["trips"]],
        "step_s": [one["step_s"] for one in found], "operations": sum(per_global),
    }  # fmt: skip


def main() -> None:
    parser = common.arguments(__doc__, rounds=3)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=common.parse_sizes, default=[MIB])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    facts = common.facts_of(options.directory)
    cases = [(nodes, alone) for nodes in options.nodes for alone in (False, True)]
    found: dict[tuple[int, bool], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case, runs in found.items():
            runs.append(once(*case, options))
    lines = common.heading("Several nodes of one job", facts)
    lines += [
        f"{options.rounds} rounds of {options.steps} checkpoints, {options.size[0] // MIB} MiB per "
        "rank, one rank per node; all nodes, their ranks and the store share this machine.", "",
        "| nodes | slowest durable to global, ms | the store's round trip, ms "
        "| store operations per global checkpoint, all nodes | s per step "
        "| s per step, ranks that save alone |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for nodes in options.nodes:
        wide, alone = found[nodes, False], found[nodes, True]
        lag = Spread.of([1e3 * one for run in wide for one in run["lag_s"]])
        trip = Spread.of([1e3 * one for run in wide for one in run["trip_s"]])
        operations = statistics.median(run["operations"] for run in wide)
        steps = [
            Spread.of([one for run in runs for one in run["step_s"]]) for runs in (wide, alone)
        ]
        lines.append(
            f"| {nodes} | {lag.text(2)} | {trip.text(3)} | {operations:.1f} | "
            f"{steps[0].text(4)} | {steps[1].text(4)} |"
        )
    document = {f"{nodes} {'alone' if alone else 'agree'}": runs
                for (nodes, alone), runs in found.items()}  # fmt: skip
    common.write_results("nodes", facts | {"runs": document}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
