"""The slowdown of a checkpoint after every step: in memory only, on the disk, and without any.

    python -m bench.memory [--sizes 64MiB] [--rounds 10] [--steps 40] [--directory DIR]

A paced trainer: a step is PACE_S of waiting, which stands for forward and backward, and the update
of an attached optimizer, which waits for the copy. The daemon's writes are limited so that one
checkpoint takes the disk as long as ten steps. A round has every mode once, in a random order, in
a fresh client with a warm connection; `every 20th` is durable_every=20. The ratio is that of a
round's mode and its `none`. Writes bench/results/memory-DATE.{json,md}.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import common
from bench.common import MIB, Spread
from bench.ours import Daemon
from pccheck import PCcheckClient

PACE_S = 0.1
STEPS_OF_A_WRITE = 10
WARM = 3  # first steps, which do not count: chunks are mapped, volumes are made
SEED = 35
#: How a client saves, and its steps that count, as a part of --steps.
MODES: dict[str, tuple[dict[str, Any] | None, float]] = {
    "none": (None, 1.0),
    "auto": ({"durable_every": "auto"}, 1.0),
    "every 20th": ({"durable_every": 20}, 1.0),
    "disk": ({}, 0.25),  # ten times as slow
}


def train(
    daemon: Daemon, mode: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[float, int]:
    """Seconds per step, and the checkpoints that were skipped or failed."""
    options, part = MODES[mode]
    ends = []
    with PCcheckClient(
        job=mode.replace(" ", "-"), socket=str(daemon.socket), fresh=True, **(options or {})
    ) as client:
        client.attach(model=model, optimizer=optimizer)
        optimizer.zero_grad(set_to_none=True)
        for step in range(WARM + int(steps * part)):
            if step == WARM:
                start_s = time.monotonic()
            time.sleep(PACE_S)
            optimizer.step()
            if options is not None:
                ends.append(client.checkpoint(step=step))
        client.gate()
        took_s = (time.monotonic() - start_s) / int(steps * part)
        lost = sum(str(end.state) in ("skipped", "failed") for end in ends[WARM:])
    return took_s, lost


def measure(size_bytes: int, rounds: int, steps: int, directory: Path) -> dict[str, list[Any]]:
    model, optimizer = common.make_training_state(size_bytes)
    payload = common.total_bytes(common.tensors_of(model, optimizer).values())
    rate = int(payload / (STEPS_OF_A_WRITE * PACE_S)) // MIB
    found: dict[str, list[Any]] = {mode: [] for mode in MODES}
    drawn = random.Random(SEED)
    dram = f"{5 * payload * len(MODES) // MIB}MiB"
    daemon = Daemon("--dram", dram, "--max-bandwidth", f"{rate}MiB", storage=directory / "storage")
    daemon.start()
    try:
        for _ in range(rounds):
            for mode in drawn.sample(list(MODES), len(MODES)):
                found[mode].append(train(daemon, mode, model, optimizer, steps))
    finally:
        daemon.stop()
        daemon.cleanup()
    return found


def table(size_bytes: int, found: dict[str, list[Any]]) -> list[str]:
    lines = [
        f"## {size_bytes // MIB} MiB, {PACE_S} s per step, a write takes {STEPS_OF_A_WRITE}", "",
        "| a checkpoint after every step | s per step | slowdown | skipped or failed |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for mode, runs in found.items():
        pairs = zip(runs, found["none"], strict=True)
        slowdown = Spread.of([run[0] / none[0] for run, none in pairs])
        lost = sum(run[1] for run in runs)
        each = Spread.of([run[0] for run in runs])
        lines.append(f"| {mode} | {each.text(4)} | {slowdown.text()} | {lost} |")
    return [*lines, ""]


def main() -> int:
    parser = common.arguments(__doc__, sizes=[64 * MIB], rounds=10)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    facts = common.facts_of(options.directory)
    lines = common.heading("A checkpoint after every step, in memory only", facts)
    document: dict[str, object] = dict(facts)
    for size_bytes in options.sizes:
        with common.scratch(options.directory) as scratch:
            found = measure(size_bytes, options.rounds, options.steps, scratch)
        lines += table(size_bytes, found)
        document[f"{size_bytes // MIB} MiB"] = found
    common.write_results("memory", document, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
