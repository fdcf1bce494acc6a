"""What does checkpointing every f steps cost a real training loop?

    python -m bench.train [--intervals 1,2,5,10] [--steps 20] [--rounds 3] [--directory DIR]

A transformer is trained on the CPU without checkpoints and with each contender, one after the other
in every round, in an order that rotates; each slowdown is taken against the run without checkpoints
of the same round. What a checkpoint takes on the training thread is the call, and the wait of the
update for the copy. Writes bench/results/train-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bench import common
from bench.common import GIB, BenchError, Spread
from bench.ours import Ours
from bench.rivals import KEPT, UNSYNCED, Finish, Rivals, State

NONE, OURS = "none", "PCcheck"
RIVALS = ("torch.save", UNSYNCED, KEPT)
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


@dataclass(frozen=True, slots=True)
class Cost:
    """One run: its training, and what each checkpoint took of it on the training thread."""

    seconds: float
    held_s: list[float]


def train(
    state: State,
    steps: int,
    every: int,
    save: Save | None,
    gate: Callable[[], object] = lambda: None,
) -> Cost:
    """`save` is called after every `every`-th step, `gate` before every update and at the end."""
    held_s: list[float] = []

    def pass_gate() -> None:
        ready = time.monotonic()
        gate()
        if held_s:
            held_s[-1] += time.monotonic() - ready

    start = time.monotonic()
    for step in range(1, steps + 1):
        loss = state.model(torch.randint(SYMBOLS, (BATCH, WINDOW)))
        state.optimizer.zero_grad()
        loss.backward()
        pass_gate()
        state.optimizer.step()
        if save is not None and step % every == 0:
            called = time.monotonic()
            save(step)
            held_s.append(time.monotonic() - called)
    pass_gate()
    return Cost(time.monotonic() - start, held_s)


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


def run_ours(state: State, directory: Path, payload_bytes: int, steps: int, every: int) -> Cost:
    storage = directory / "storage"
    with Ours(state, storage, payload_bytes) as ours:
        ours.save()  # the volume is made at the first checkpoint of a job, not at every one
        cost = train(state, steps, every, lambda step: ours.start_save(), ours.client.gate)
    shutil.rmtree(storage)
    return cost


def run_round(
    state: State,
    rivals: Rivals,
    directory: Path,
    payload_bytes: int,
    options: argparse.Namespace,
    every: int,
    turn: int,
) -> dict[str, Cost]:
    """Each contender at one interval."""
    names = [NONE, OURS, *options.rivals]
    costs = {}
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        common.settle()
        common.warm_memory(2 * payload_bytes)
        if name == NONE:
            costs[name] = train(state, options.steps, every, None)
        elif name == OURS:
            costs[name] = run_ours(state, directory, payload_bytes, options.steps, every)
        else:
            saver = RivalSaver((rivals.save | rivals.unsynced)[name], directory)
            costs[name] = train(state, options.steps, every, saver)
            saver.close()
        step_s = costs[name].seconds / options.steps
        print(f"  f={every} {name:28} {step_s:.3f} s a step", flush=True)
    return costs


def table(measured: dict[int, list[dict[str, Cost]]], steps: int, payload_bytes: int) -> list[str]:
    lines = [
        f"State {payload_bytes / GIB:.2f} GiB, {steps} steps a run; medians [min-max]. The "
        "slowdown is against no checkpoints in the same round.",
        "",
        "| checkpoint | by | training, s | slowdown | a checkpoint holds the training thread, ms |",
        "|---|---|---|---|---|",
    ]
    for every, runs in measured.items():
        for name in (NONE, OURS, *(name for name in RIVALS if name in runs[0])):
            seconds = Spread.of([run[name].seconds for run in runs]).text(2)
            slowdown = Spread.of([run[name].seconds / run[NONE].seconds for run in runs]).text(2)
            held_ms = [1e3 * held for run in runs for held in run[name].held_s]
            held = Spread.of(held_ms).text(1) if held_ms else ""
            lines.append(f"| every {every} | {name} | {seconds} | {slowdown} | {held} |")
    return [*lines, ""]


def measure(
    options: argparse.Namespace, scratch: Path
) -> tuple[dict[int, list[dict[str, Cost]]], int]:
    """By interval, the rounds; and the bytes of the state. `options`: intervals, steps, rounds,
    width, layers, rivals."""
    torch.manual_seed(1)
    model = Model(options.width, options.layers)
    state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    train(state, 3, 1, None)  # Adam's moments exist from the first step on
    payload_bytes = common.total_bytes(common.tensors_of(model, state.optimizer).values())
    common.require_room(scratch, 40 * payload_bytes)  # of rivals and of us, and what they leave
    measured: dict[int, list[dict[str, Cost]]] = defaultdict(list)
    with Rivals(state) as rivals:
        for turn in range(options.rounds):
            for every in options.intervals:
                measured[every].append(
                    run_round(state, rivals, scratch, payload_bytes, options, every, turn)
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
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=RIVALS)
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
        "runs": measured,
    }
    common.write_results("train", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
