"""What do checkpoints cost a training step on a GPU?

    python -m bench.gpu.train [--intervals 10,50,5,1] [--rounds 3] [--dtype bf16] [--batch 16]
                              [--no-rivals] [--device cpu --tiny] [--budget-s 180]
                              [--look-every 10] [--directory DIR] [--json FILE]

GPT-2 medium is trained without checkpoints and with each contender, with one every f steps: PCcheck
by pull, by push and with snapshot="device", torch.save + fsync, DCP's async_save at its settings
for GPUs. Each run begins with a checkpoint, and every checkpoint is followed by f steps. Slowdowns
are taken against the run without checkpoints of the same round. The first interval gets most
rounds. What does not fit into the budget is left out and named. On the CPU PCcheck pushes.

The loss is read every --look-every steps, as by a script that logs it: the CPU waits for the GPU
then, and a copy of four bytes for those that are under way. With 1 a gradient scaler or a check for
NaN is imitated.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import common
from bench.common import Spread
from bench.gpu import contender
from bench.gpu.contender import DCP, GpuRivals, Report, recorded
from bench.gpu.model import Training
from bench.rivals import RivalSaver

NONE = "none"
RIVALS = ("torch.save", DCP)
WARM_UP_STEPS = 5

Save = Callable[[int], object]
Row = dict[str, Any]


def train(training: Training, steps: int, every: int, save: Save | None, look_every: int) -> Row:
    """The "seconds" for `steps` steps, and the "call_ms" of each save; `save` is called before the
    first step and then every `every`."""
    calls_ms: list[float] = []
    training.synchronize()
    start_s = time.monotonic()
    for step in range(steps):
        if save is not None and step % every == 0:
            called_s = time.monotonic()
            save(step)
            calls_ms.append((time.monotonic() - called_s) * 1e3)
        loss = training.step(step)
        if step % look_every == look_every - 1:
            loss.item()
    training.synchronize()
    return {"seconds": time.monotonic() - start_s, "call_ms": calls_ms}


def steps_of(every: int) -> int:
    """Enough checkpoints to see them wait for each other, and few enough to be done in time."""
    return {1: 4, 5: 10, 10: 20}.get(every, every)


class Bench:
    def __init__(self, options: argparse.Namespace, directory: Path, report: Report) -> None:
        self.training = contender.training_of(options)
        self.directory = directory
        self.report = report
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.left_out: list[str] = []
        self.warm: set[str] = set()
        self.look_every: int = options.look_every
        train(self.training, WARM_UP_STEPS, 1, None, self.look_every)
        self.modes = contender.modes(self.training.device)
        self.node = contender.node_of(self.training, directory, options)
        self.rivals = GpuRivals(self.training.state, self.training.device)

    def run(self, name: str, every: int) -> Row:
        steps = steps_of(every)
        row: Row = {"contender": name, "every": every, "steps": steps}
        common.settle()
        if name == NONE:
            row |= train(self.training, steps, every, None, self.look_every)
        elif name in RIVALS:
            row |= self.run_rival(name, steps, every)
        else:
            self.node.connect(self.modes[name])
            self.training.step(0)  # from the first step on, checkpoint() need not wait for the copy
            row["durable_s"] = self.node.save().durable_s  # registers, and makes the volume
            self.node.handles.clear()
            row["chosen"] = self.node.chosen()
            row |= train(
                self.training, steps, every, lambda step: self.node.start_save(), self.look_every
            )
            self.node.leave()
            row["endings"] = self.node.endings()
        return row

    def run_rival(self, name: str, steps: int, every: int) -> Row:
        saver = RivalSaver(self.rivals.save[name], self.directory)
        try:
            if name not in self.warm:
                saver(0)  # makes what it keeps
                saver.finish()
                self.warm.add(name)
            return train(self.training, steps, every, saver, self.look_every)
        finally:
            self.rivals.wait()
            saver.close()

    def round(self, number: int, every: int, names: list[str]) -> None:
        """None comes in the middle: a drift of clocks or disks hits both sides of a ratio."""
        turned = names[number % len(names) :] + names[: number % len(names)]
        middle = len(turned) // 2
        for name in [*turned[:middle], NONE, *turned[middle:]]:
            if not self.report.has_time():
                self.left_out.append(f"{name} at {every}, round {number}")
                continue
            with recorded(self.failures, f"{name} at {every}"):
                row = self.run(name, every) | {"round": number}
                self.rows.append(row)
                step_ms = row["seconds"] / row["steps"] * 1e3
                print(f"  f={every} {name:16} {step_ms:.1f} ms a step", flush=True)
            self.keep()

    def keep(self) -> None:
        self.report.keep(
            payload_bytes=self.training.payload_bytes(), rows=self.rows, failures=self.failures,
            left_out=self.left_out,
        )  # fmt: skip


def plan(intervals: list[int], rounds: int) -> Iterator[tuple[int, int, bool]]:
    """(round, interval, with rivals): what matters most first."""
    first, *others = intervals
    numbers = itertools.count()
    yield next(numbers), first, True
    for _ in range(rounds - 1):
        yield next(numbers), first, False
    for every in others:
        yield next(numbers), every, True


def ratios(rows: list[Row]) -> dict[int, dict[str, list[float]]]:
    """Slowdowns by interval and contender."""
    alone = {row["round"]: row["seconds"] for row in rows if row["contender"] == NONE}
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        if row["contender"] != NONE and row["round"] in alone:
            by_name = found.setdefault(row["every"], {})
            by_name.setdefault(row["contender"], []).append(row["seconds"] / alone[row["round"]])
    return found


def calls(rows: list[Row]) -> dict[str, list[float]]:
    """How long each save held the training thread, in milliseconds, by contender."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["call_ms"]:
            found.setdefault(row["contender"], []).extend(row["call_ms"])
    return found


def table(rows: list[Row], failures: list[str], left_out: list[str]) -> list[str]:
    found = ratios(rows)
    steps_ms = [row["seconds"] / row["steps"] * 1e3 for row in rows if row["contender"] == NONE]
    if not steps_ms:
        return ["Nothing was measured.", *failures]
    step_ms = statistics.median(steps_ms)
    alone = [row["durable_s"] for row in rows if "durable_s" in row]
    lines = [f"Step {step_ms:.1f} ms without checkpoints."]
    if alone:
        durable_s = min(alone)
        lines.append(
            f"A checkpoint alone is durable after {durable_s:.3f} s, which is "
            f"{durable_s * 1e3 / step_ms:.1f} steps: at shorter intervals training may have to "
            "wait for the storage."
        )
    lines += [
        "Slowdown with one every f steps, median [min-max].",
        "",
        "| | " + " | ".join(f"every {every}" for every in sorted(found)) + " |",
        "|---|" + "---|" * len(found),
    ]
    for name in dict.fromkeys(name for by_name in found.values() for name in by_name):
        cells = [
            Spread.of(found[every][name]).text(3) if name in found[every] else "-"
            for every in sorted(found)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        *sorted({f"- {row['contender']}: {row['chosen']}" for row in rows if "chosen" in row}),
        *(
            f"- the call of {name} takes {Spread.of(calls_ms).text(1)} ms"
            for name, calls_ms in calls(rows).items()
        ),
    ]
    lines += [
        f"- {row['contender']} at {row['every']}: {row['endings']}"
        for row in rows
        if not {"durable", "superseded"} >= row.get("endings", {}).keys()
    ]
    lines += ["", *(f"- failed: {text}" for text in failures)]
    return [*lines, *(f"- no time for {text}" for text in left_out)]


def measure(options: argparse.Namespace, report: Report, directory: Path) -> list[str]:
    bench = Bench(options, directory, report)
    with bench.node, bench.rivals:
        for number, every, with_rivals in plan(options.intervals, options.rounds):
            names = [*bench.modes, *(RIVALS if with_rivals and not options.no_rivals else ())]
            bench.round(number, every, names)
    return table(bench.rows, bench.failures, bench.left_out)


def main() -> int:
    parser = contender.parser(__doc__)
    parser.add_argument(
        "--intervals", type=lambda t: [int(n) for n in t.split(",")], default=[10, 50, 5, 1]
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the first interval")
    parser.add_argument("--look-every", type=int, default=10, help="steps between losses read")
    parser.add_argument("--no-rivals", action="store_true")
    options = contender.begin(parser)
    report = Report("train", options)
    with common.scratch(options.directory) as scratch:
        lines = measure(options, report, scratch)
    report.finish(lines)
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
