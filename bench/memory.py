"""The slowdown of a checkpoint after every step: in memory only, on the disk, and without any.

    python -m bench.memory [--trainers paced gpt] [--sizes 64MiB] [--rounds 10] [--steps 40]
                           [--directory DIR]

Two trainers of bench.figures: steps of PACE_S that overwrite a state of the given size, and a small
GPT, which computes on the CPUs that the daemon uses, too. Its copy is shorter than its forward and
backward pass. The daemon's writes are limited so that one checkpoint takes the disk as long as ten
steps. A round has every mode once, in a random order, in a fresh client with a warm connection;
`every 20th` is durable_every=20. The ratio is that of a round's mode and its `none`. Writes
bench/results/memory-DATE.{json,md}.
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
from bench.figures import measure
from bench.figures.trainers import Gpt, Paced, Trainer
from bench.ours import Daemon
from pccheck import PCcheckClient

PACE_S = 0.1
TRAINERS = ("paced", "gpt")
WIDTH, LAYERS = 192, 3
STEPS_OF_A_WRITE = 10
WARM = 3  # first steps, which do not count: chunks are mapped, volumes are made
SEED = 35
#: How a client saves, and its steps that count, as a part of --steps.
MODES: dict[str, tuple[dict[str, Any] | None, float]] = {
    "none": (None, 1.0),
    "auto": ({"durable_every": "auto"}, 1.0),
    "every 20th": ({"durable_every": 20}, 1.0),
    "disk": ({}, 0.125),  # ten times as slow
}


def train(daemon: Daemon, mode: str, trainer: Trainer, steps: int) -> tuple[float, int]:
    """Seconds per step, and the checkpoints that were skipped or failed."""
    options, part = MODES[mode]
    steps = max(1, int(steps * part))
    ends = []
    with PCcheckClient(
        job=mode.replace(" ", "-"), socket=str(daemon.socket), fresh=True, **(options or {})
    ) as client:
        client.attach(model=trainer.state.model, optimizer=trainer.state.optimizer)
        for step in range(WARM + steps):
            if step == WARM:
                start_s = time.monotonic()
            trainer.step(client.gate)
            if options is not None:
                ends.append(client.checkpoint(step=step))
        client.gate()
        took_s = (time.monotonic() - start_s) / steps
        lost = sum(str(end.state) in ("skipped", "failed") for end in ends[WARM:])
    return took_s, lost


def compare(trainer: Trainer, rounds: int, steps: int, directory: Path) -> dict[str, Any]:
    """The runs of each mode, and what is true of all: bytes of the state, seconds of a step."""
    payload = trainer.payload_bytes
    step_s = measure.bare_step(trainer, 10)
    rate = int(payload / (STEPS_OF_A_WRITE * step_s))
    found: dict[str, list[Any]] = {mode: [] for mode in MODES}
    drawn = random.Random(SEED)
    dram = f"{5 * payload * len(MODES) // MIB}MiB"
    daemon = Daemon("--dram", dram, "--max-bandwidth", str(rate), storage=directory / "storage")
    daemon.start()
    try:
        for _ in range(rounds):
            for mode in drawn.sample(list(MODES), len(MODES)):
                found[mode].append(train(daemon, mode, trainer, steps))
    finally:
        daemon.stop()
        daemon.cleanup()
    return {"payload_bytes": payload, "step_s": step_s, "runs": found}


def table(name: str, made: dict[str, Any]) -> list[str]:
    found = made["runs"]
    lines = [
        f"## {name}: {made['payload_bytes'] / MIB:.0f} MiB, {made['step_s']:.3f} s per step, a "
        f"write takes {STEPS_OF_A_WRITE} steps", "",
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
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as many as the daemon leaves
    facts = common.facts_of(options.directory)
    lines = common.heading("A checkpoint after every step, in memory only", facts)
    document: dict[str, object] = dict(facts)
    trainers: dict[str, Trainer] = {}
    if "paced" in options.trainers:
        trainers = {f"paced, {size // MIB} MiB": Paced(size, PACE_S) for size in options.sizes}
    if "gpt" in options.trainers:
        trainers["gpt"] = Gpt(WIDTH, LAYERS)
    for name, trainer in trainers.items():
        with common.scratch(options.directory) as scratch:
            document[name] = made = compare(trainer, options.rounds, options.steps, scratch)
        lines += table(name, made)
    common.write_results("memory", document, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
