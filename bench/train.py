"""What does checkpointing every f steps cost a real training loop?

    python -m bench.train [--intervals 1,2,5,10] [--steps 20] [--rounds 3] [--directory DIR]

A transformer is trained on the CPU without checkpoints and with each contender, one after the other
in every round, in an order that rotates; each slowdown is taken against the run without checkpoints
of the same round. Writes bench/results/train-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench import common
from bench.common import GIB, BenchError, Spread
from bench.ours import Ours
from bench.rivals import KEPT, Finish, Rivals, State

NONE, OURS = "none", "PCcheck"
RIVALS = ("torch.save", KEPT)
SYMBOLS, WINDOW, BATCH = 256, 128, 4

Save = Callable[[int], object]


class Model(nn.Module):
    """A GPT; the text is random, the arithmetic is real."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(state: State, steps: int, every: int, save: Save | None) -> float:
    """Seconds for `steps` steps; `save` is called after every `every`-th."""
    start = time.monotonic()
    for step in range(1, steps + 1):
        loss = state.model(torch.randint(SYMBOLS, (BATCH, WINDOW)))
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        if save is not None and step % every == 0:
            save(step)
    return time.monotonic() - start


class RivalSaver:
    """Saves to a new directory each time, waits for the previous save, keeps the newest two."""

    def __init__(self, save: Callable[[Path], Finish], directory: Path) -> None:
        self.save = save
        self.directory = directory
        self.made: list[Path] = []
        self.finish: Finish = lambda: None

    def __call__(self, step: int) -> None:
        self.finish()
        self.made.append(Path(tempfile.mkdtemp(prefix="rival-", dir=self.directory)))
        self.finish = self.save(self.made[-1])
        for old in self.made[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del self.made[:-2]

    def close(self) -> None:
        self.finish()
        for path in self.made:
            shutil.rmtree(path)


def run_ours(state: State, directory: Path, payload_bytes: int, steps: int, every: int) -> float:
    storage = directory / "storage"
    with Ours(state, storage, payload_bytes) as ours:
        ours.save()  # the volume is made at the first checkpoint of a job, not at every one
        seconds = train(state, steps, every, lambda step: ours.start_save())
    shutil.rmtree(storage)
    return seconds


def run_round(
    state: State,
    rivals: Rivals,
    directory: Path,
    payload_bytes: int,
    steps: int,
    every: int,
    turn: int,
) -> dict[str, float]:
    """Seconds of each contender at one interval."""
    names = [NONE, OURS, *RIVALS]
    seconds = {}
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        common.settle()
        common.warm_memory(2 * payload_bytes)
        if name == NONE:
            seconds[name] = train(state, steps, every, None)
        elif name == OURS:
            seconds[name] = run_ours(state, directory, payload_bytes, steps, every)
        else:
            saver = RivalSaver(rivals.save[name], directory)
            seconds[name] = train(state, steps, every, saver)
            saver.close()
        print(f"  f={every} {name:28} {seconds[name] / steps:.3f} s a step", flush=True)
    return seconds


def table(measured: dict[int, list[dict[str, float]]], steps: int, payload_bytes: int) -> list[str]:
    step_s = statistics.median(run[NONE] / steps for runs in measured.values() for run in runs)
    lines = [
        f"State {payload_bytes / GIB:.2f} GiB, step {step_s:.3f} s, {steps} steps a run. Slowdown "
        "against no checkpoints in the same round, median [min-max].",
        "",
        "| | " + " | ".join(f"every {every}" for every in measured) + " |",
        "|---|" + "---|" * len(measured),
    ]
    for name in (OURS, *RIVALS):
        cells = [
            Spread.of([run[name] / run[NONE] for run in runs]).text(2) for runs in measured.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def measure(
    options: argparse.Namespace, scratch: Path
) -> tuple[dict[int, list[dict[str, float]]], int]:
    torch.manual_seed(1)
    model = Model(options.width, options.layers)
    state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    train(state, 3, 1, None)  # Adam's moments exist from the first step on
    payload_bytes = common.total_bytes(common.tensors_of(model, state.optimizer).values())
    common.require_room(scratch, 40 * payload_bytes)  # of rivals and of us, and what they leave
    measured: dict[int, list[dict[str, float]]] = defaultdict(list)
    with Rivals(state) as rivals:
        for turn in range(options.rounds):
            for every in options.intervals:
                measured[every].append(
                    run_round(state, rivals, scratch, payload_bytes, options.steps, every, turn)
                )
    return dict(measured), payload_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--intervals", type=lambda t: [int(n) for n in t.split(",")], default=[1, 2, 5, 10]
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    try:
        facts = common.facts_of(options.directory)
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.directory) as scratch:
            measured, payload_bytes = measure(options, Path(scratch).resolve())
    except BenchError as error:
        print(f"bench.train: {error}", file=sys.stderr)
        return 1
    lines = common.heading("Training with a checkpoint every f steps", facts)
    lines += table(measured, options.steps, payload_bytes)
    document: dict[str, object] = {
        "facts": facts,
        "payload_bytes": payload_bytes,
        "steps": options.steps,
        "seconds": measured,
    }
    common.write_results("train", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
