"""What do checkpoints cost a training step on a GPU?

    python -m bench.gpu.train [--model gpt2-medium|opt-1.3b|bert-large|vgg16] [--intervals 10,50]
                              [--contenders pull,push,...] [--rounds 3] [--batch 16]
                              [--device cpu --tiny] [--budget-s 180]
                              [--look-every 10] [--directory DIR] [--json FILE]

The model is trained without checkpoints and with each contender, with one every f steps. These are:
PCcheck by "pull", by "push", with snapshot="device" ("device"), by pull out of expandable segments
("expandable"), in memory only ("memory"), with to="device" ("last step"); torch.save + fsync; DCP's
async_save at its settings for GPUs ("DCP thread", "DCP process"); "torchsnapshot async";
"CheckFreq". PCcheck's can have settings, "pull:N=2,M=1.5,p=4": N checkpoints in flight, memory for
M of them, p writers; of "device:durable=100" every hundredth is for the disk, the others stay in
memory. "expandable" trains a second model of the same shape.

Each run begins with a checkpoint, and every checkpoint is followed by f steps. In every round all
contenders run once, in turn, and slowdowns are taken against the run without checkpoints of the
same round. What does not fit into the budget is left out and named. On the CPU PCcheck pushes.

The loss is read every --look-every steps, as by a script that logs it: the CPU waits for the GPU
then, and a copy of four bytes for those that are under way. With 1 a gradient scaler or a check for
NaN is imitated.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import common
from bench.common import Spread
from bench.gpu import contender
from bench.gpu.contender import EXPANDABLE, LAST_STEP, GpuRivals, Node, Report, Setting, recorded
from bench.gpu.model import Training
from bench.gpu.targets import NONE, ratios
from bench.rivals import RivalSaver

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
    return {1: 4, 4: 16, 5: 20, 10: 40, 25: 50}.get(every, every)


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
        self.steps: int = options.steps
        train(self.training, WARM_UP_STEPS, 1, None, self.look_every)
        if any(Setting.named(name) == EXPANDABLE for name in options.contenders):
            with contender.expandable(self.training.device):
                self.expandable = contender.training_of(options)
                self.expandable.step(0)  # makes the moments
        self.rivals = GpuRivals(self.training.state, self.training.device)
        self.node: Node | None = None
        self.flags: list[str] = []

    def __enter__(self) -> Bench:
        self.rivals.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_node()
        self.rivals.__exit__(*exception)

    def end_node(self) -> None:
        node, self.node = self.node, None
        if node is not None:
            node.__exit__(None, None, None)
            shutil.rmtree(node.daemon.storage.parent)

    def node_for(self, setting: Setting) -> Node:
        """The daemon that runs already, if it has these flags."""
        flags = setting.flags(self.training.payload_bytes())
        if self.node is None or flags != self.flags:
            self.end_node()
            self.flags = flags
            self.node = contender.node_of(self.training, self.directory, setting).__enter__()
            self.grown = setting.dram < 2  # with less there is not as much memory as it wants
        return self.node

    def run(self, name: str, every: int) -> Row:
        steps = self.steps or steps_of(every)
        row: Row = {"contender": name, "every": every, "steps": steps}
        common.settle()
        if name == NONE:
            return row | train(self.training, steps, every, None, self.look_every)
        if Setting.named(name) in contender.OURS:
            return row | self.run_ours(Setting.of(name, self.training.device), steps, every)
        return row | self.run_rival(name, steps, every)

    def run_ours(self, setting: Setting, steps: int, every: int) -> Row:
        node, row = self.node_for(setting), Row()
        training = self.expandable if setting.way == EXPANDABLE else self.training
        node.state = training.state
        node.connect(setting.mode)
        training.step(0)  # from the first step on, checkpoint() need not wait for the copy
        # The first one registers, and makes the volume; no run begins while memory still grows.
        row["durable_s"] = (node.save if self.grown else node.save_into_memory)().durable_s
        self.grown = True
        node.handles.clear()
        row["chosen"] = node.chosen()
        if setting.way == LAST_STEP and training.device.type == "cuda":
            node.to = "device"
        row |= train(training, steps, every, lambda step: node.start_save(), self.look_every)
        node.leave()
        return row | {"endings": node.endings()}

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

    def is_here(self, name: str) -> bool:
        here = Setting.named(name) in contender.OURS or name in self.rivals.save
        if not here:
            self.left_out.append(f"not here: {name}")
        return here

    def round(self, number: int, every: int, names: list[str]) -> None:
        """None comes in the middle: a drift of clocks or disks hits both sides of a ratio."""
        turned = names[number % len(names) :] + names[: number % len(names)]
        middle = len(turned) // 2
        for name in [*turned[:middle], NONE, *turned[middle:]]:
            if not self.report.has_time():
                self.left_out.append(f"no time for {name} at {every}, round {number}")
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


def calls(rows: list[Row]) -> dict[str, list[float]]:
    """How long each save held the training thread, in milliseconds, by contender and interval."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["call_ms"]:
            found.setdefault(f"{row['contender']} at {row['every']}", []).extend(row["call_ms"])
    return found


def table(payload_bytes: int, rows: list[Row]) -> list[str]:
    found = ratios(rows)
    steps_ms = [row["seconds"] / row["steps"] * 1e3 for row in rows if row["contender"] == NONE]
    if not steps_ms:
        return ["Nothing was measured."]
    step_ms = statistics.median(steps_ms)
    alone = [row["durable_s"] for row in rows if "durable_s" in row]
    lines = [
        f"State {payload_bytes / 1e9:.3f} GB. Step without checkpoints, ms: "
        f"{Spread.of(steps_ms).text(1)}."
    ]
    if alone:
        durable_s = min(alone)
        lines.append(
            f"A checkpoint alone is durable after {durable_s:.3f} s at best, n={len(alone)}, which "
            f"is {durable_s * 1e3 / step_ms:.1f} steps: at shorter intervals training may have to "
            "wait for the storage."
        )
    lines += [
        "Slowdown with one every f steps, median [min-max] of n rounds.",
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
            f"- the call of {name}, ms: {Spread.of(calls_ms).text(1)}"
            for name, calls_ms in calls(rows).items()
        ),
    ]
    return lines + [
        f"- {row['contender']} at {row['every']}: {row['endings']}"
        for row in rows
        if not {"durable", "superseded"} >= row.get("endings", {}).keys()
    ]


def measure(options: argparse.Namespace, report: Report, directory: Path) -> list[str]:
    with Bench(options, directory, report) as bench:
        names = [name for name in options.contenders if bench.is_here(name)]
        for every in options.intervals:
            for number in range(options.rounds):
                bench.round(number, every, names)
    lines = table(bench.training.payload_bytes(), bench.rows)
    lines += ["", *(f"- failed: {text}" for text in bench.failures)]
    return [*lines, *(f"- {text}" for text in bench.left_out)]


def main() -> int:
    parser = contender.parser(__doc__)
    parser.add_argument(
        "--intervals", type=lambda t: [int(n) for n in t.split(",")], default=[10, 50, 5]
    )
    parser.add_argument(
        "--contenders", type=lambda t: t.replace("+", " ").split(";"),
        default=["pull", "push", "device", "torch.save", contender.DCP],
        help="separated by ; with + for a space",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of a run; default: by the interval")
    parser.add_argument("--look-every", type=int, default=10, help="steps between losses read")
    options = contender.begin(parser)
    report = Report("train", options)
    with common.scratch(options.directory) as scratch:
        lines = measure(options, report, scratch)
    report.finish(lines)
    return int(bool(report.document.get("failures")))


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
