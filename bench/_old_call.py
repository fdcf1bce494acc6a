"""How long `checkpoint()` holds the calling thread: attached state of 1,000 tensors.

    python -m bench.call_overhead [--calls 300]

A real daemon; 250 small parameters with AdamW's three tensors each, so that the copy itself is
short. Each call is timed from outside; in between the optimizer steps and the checkpoint becomes
durable. Prints median, minimum, maximum and the 95th percentile in milliseconds, without and with
scheduler and generators attached.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench import common
from pccheck import PCcheckClient
from tests.support.daemon import Daemon


def model_of(layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    update(model, optimizer)
    return model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def measure(daemon: Daemon, job: str, calls: int, *, everything: bool) -> dict[str, Any]:
    model, optimizer = model_of(125)
    more: dict[str, Any] = {}
    if everything:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        more = {"scheduler": scheduler, "rng": True}
    took: list[float] = []
    with PCcheckClient(job=job, socket=daemon.socket) as client:
        client.attach(model=model, optimizer=optimizer, **more)
        for step in range(calls + 20):
            begin = time.perf_counter_ns()
            last = client.checkpoint(step=step)
            took.append((time.perf_counter_ns() - begin) / 1e6)
            update(model, optimizer)
            last.wait_durable(60)  # the call alone is the question, not back-pressure
    took = took[20:]  # the first ones make the volume and the plan
    tensors = len(model.state_dict()) + sum(len(e) for e in optimizer.state.values())
    return {
        "attached": "model, optimizer" + (", scheduler, rng" if everything else ""),
        "tensors": tensors, "calls": calls,
        "median_ms": round(statistics.median(took), 4), "min_ms": round(min(took), 4),
        "max_ms": round(max(took), 4), "p95_ms": round(statistics.quantiles(took, n=20)[-1], 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=300)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    facts = common.facts_of(Path.cwd())
    with Daemon("--chunk", "1MiB", "--dram", "64MiB") as daemon:
        daemon.start()
        found = [
            measure(daemon, f"call-{everything}", calls, everything=everything)
            for everything in (False, True)
        ]
    lines = common.heading("How long checkpoint() holds the calling thread", facts)
    lines += ["| attached | tensors | ms, median [min-max] | calls |", "|---|---|---|---|"]
    lines += [
        f"| {one['attached']} | {one['tensors']} | {one['median_ms']} "
        f"[{one['min_ms']}-{one['max_ms']}] | {one['calls']} |"
        for one in found
    ]
    common.write_results("call_overhead", facts | {"runs": found}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
