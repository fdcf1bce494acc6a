"""Draws docs/timeline.png: a real training run, checkpoints one at a time and several in flight.

    python -m bench.timeline [-o docs/timeline.png] [--directory DIR]

The paper explains this by drawings, its Figures 6 and 7; here it is measured. A loop of paced steps
takes a checkpoint every other step; --max-bandwidth makes the disk slower than that for a while, on
any machine. Both runs differ only in --slots. The figure shows the output of `pccheckctl trace`,
and the steps as the trainer measured them. Needs matplotlib: pip install 'pccheck[plot]'.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.common import MIB, BenchError, exit_code, make_training_state, require_pyplot
from bench.ours import Daemon
from pccheck import PCcheckClient
from pccheck_store.observer import Observer
from pccheckctl.commands.trace import chrome
from pccheckctl.output.documents import Document, rows

STATE_BYTES = 96 * MIB
BANDWIDTH = "150MiB"  # of the volume: a checkpoint takes about 0.65 s
COMPUTE_S = 0.2
STEPS, EVERY = 12, 2
COLOURS = {
    "step": "#4878a8", "update": "#9ab8d4", "gate": "#c03028", "wait": "#e8a838",
    "copy": "#58a868", "write": "#8868a8", "flush": "#303030", "publish": "#d05890",
}  # fmt: skip


@dataclass(slots=True)
class Run:
    """The measurements, in seconds since the first step began."""

    title: str
    seconds: float = 0.0
    stalled_s: float = 0.0
    #: Track -> (kind, begin, length).
    tracks: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)

    def add(self, track: str, kind: str, begin: float, length: float) -> None:
        self.tracks.setdefault(track, []).append((kind, begin, length))


def train(title: str, slots: int, directory: Path) -> Run:
    """One run; its last checkpoints are waited for, outside of what is timed."""
    run = Run(title)
    model, optimizer = make_training_state(STATE_BYTES)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    storage = directory / f"slots-{slots}"
    with Daemon(
        "--slots", str(slots), "--keep", "1", "--chunk", "4MiB", "--dram", "1GiB",
        "--max-bandwidth", BANDWIDTH, storage=storage,
    ) as daemon:  # fmt: skip
        daemon.start()
        with PCcheckClient(job="timeline", socket=str(daemon.socket)) as client:
            client.attach(model=model, optimizer=optimizer)
            client.restore()
            client.checkpoint(step=0).wait_durable(120)  # makes the volume
            _steps(run, client, optimizer)
            with Observer(str(daemon.socket)) as observer:
                document = observer.trace(600)
    _from_trace(run, document)
    return run


def _steps(run: Run, client: PCcheckClient, optimizer: torch.optim.Optimizer) -> None:
    began = time.monotonic()
    run.tracks["training"] = [("origin", began, 0.0)]
    last = None
    for step in range(1, STEPS + 1):
        start = time.monotonic()
        time.sleep(COMPUTE_S)  # forward and backward, on a device of its own
        computed = time.monotonic()
        client.gate()
        free = time.monotonic()
        optimizer.step()
        end = time.monotonic()
        run.add("training", "step", start - began, computed - start)
        run.add("training", "gate", computed - began, free - computed)
        run.add("training", "update", free - began, end - free)
        run.stalled_s += free - computed
        if step % EVERY == 0:
            last = client.checkpoint(step=step)
    run.seconds = time.monotonic() - began
    if last is not None:
        last.wait_durable(120)


def _from_trace(run: Run, document: Document) -> None:
    began = run.tracks["training"].pop(0)[1]
    events: Any = chrome(document)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] != "X" or event["name"].endswith(" 0"):
            continue
        kind = event["name"].split()[0]
        track = names[event["tid"]]
        if kind in COLOURS and kind != "gate":
            run.add(track, kind, event["ts"] / 1e6 - began, event["dur"] / 1e6)
    if not rows(document, "checkpoints"):
        raise BenchError("the daemon has no trace")


def draw(runs: list[Run], path: Path) -> None:
    plot = require_pyplot()
    heights = [len(run.tracks) for run in runs]
    figure, axes = plot.subplots(
        len(runs), 1, figsize=(12, 1.5 + 0.42 * sum(heights)), sharex=True,
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    seen: dict[str, Any] = {}
    for axis, run in zip(axes, runs, strict=True):
        tracks = sorted(run.tracks, key=_order)
        for row, track in enumerate(tracks):
            for kind, begin, length in run.tracks[track]:
                (bar,) = axis.barh(
                    row, length, left=begin, height=0.72, color=COLOURS[kind], linewidth=0
                )
                seen.setdefault(kind, bar)
        axis.set_yticks(range(len(tracks)), tracks)
        axis.invert_yaxis()
        axis.set_title(
            f"{run.title}: {STEPS} steps in {run.seconds:.2f} s, "
            f"of which held back {run.stalled_s:.2f} s", loc="left", fontsize=10,
        )  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds")
    figure.legend(
        [seen[kind] for kind in COLOURS if kind in seen], [k for k in COLOURS if k in seen],
        loc="outside lower center", ncols=len(seen), frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=100)


def _order(track: str) -> tuple[int, str]:
    return (0 if track == "training" else 1 if track == "admission" else 2, track)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", "-o", type=Path, default=Path("docs/timeline.png"))
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on a local disk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix=".timeline-", dir=options.directory) as scratch:
        runs = [
            train("One checkpoint at a time (--slots 2 --keep 1)", 2, Path(scratch)),
            train("Three in flight (--slots 4 --keep 1)", 4, Path(scratch)),
        ]
    draw(runs, options.output)
    for run in runs:
        print(f"{run.title}: {run.seconds:.2f} s, held back {run.stalled_s:.2f} s")
    print(f"written: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
