"""Does `pccheckctl tune` find the best settings? Against an exhaustive search, for three models.

    python -m bench.tune [--model vgg16,opt-1.3b,opt-2.7b] [--rounds 3] [--smallest]
                         [--directory DIR | --image DIR]

Disk and trainer are those of bench.figures: the kernel limits the disk (root), and steps are paced
so that the disk needs as many of them for a checkpoint as with the paper's model. tune measures
that disk itself. The search runs every N, p and f around the disk's limit. Both are judged by

    goodput = 1 / slowdown - t (steps that a crash loses) / MTBF

as measured, with a failure after every 20 checkpoint times, so that too rare and too frequent
checkpoints both cost something. The best points of the search are then measured again in turn with
the point of tune. Writes bench/results/tune-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from pathlib import Path

import torch

from bench import common
from bench.common import GIB, MIB, BenchError, Spread, exit_code
from bench.figures import measure
from bench.figures.disk import Disk, limited, unlimited
from bench.figures.paper import MODELS
from bench.figures.rounds import BARE_STEPS, rotated
from bench.figures.service import Knobs, Service
from bench.figures.trainers import Paced

MODELS_DEFAULT = "vgg16,opt-1.3b,opt-2.7b"
BANDWIDTH, PAYLOAD_BYTES = 25_000_000, 16 * MIB
MTBF = 20  # checkpoint times
AROUND = (0.5, 1.0, 1.5, 2.0)  # times the steps in which the disk writes a checkpoint
FINALISTS = 3
COUNTED = 4  # checkpoints of a run


@dataclass(frozen=True, slots=True, order=True)
class Point:
    in_flight: int  # N
    writers: int  # p
    interval: int  # f

    def text(self) -> str:
        return f"N={self.in_flight} p={self.writers} f={self.interval}"


@dataclass(frozen=True, slots=True)
class Job:
    """A model on a disk. `written_s` is the time in which the disk writes a checkpoint."""

    trainer: Paced
    disk: Disk
    written_s: float
    dram: float  # in checkpoints

    @property
    def mtbf_s(self) -> float:
        return MTBF * self.written_s

    def goodputs(self, points: Iterable[Point]) -> Iterator[tuple[Point, float]]:
        """Measured; points with the same N and p share a daemon."""
        for (n, p), some in groupby(points, lambda point: (point.in_flight, point.writers)):
            bare_s = measure.bare_step(self.trainer, BARE_STEPS)
            make = partial(Service, knobs=Knobs(n, dram=self.dram, writers=p))
            with measure.running(make, self.trainer, self.disk.path) as contender:
                for point in some:
                    counts = (2 * n + 2, COUNTED)
                    cost = measure.run(self.trainer, contender, point.interval, counts, bare_s)
                    lost = cost.lag_steps * self.trainer.step_s / self.mtbf_s
                    yield point, max(0.0, 1 / cost.slowdown - lost)


def advised(job: Job) -> tuple[Point, float]:
    """What `pccheckctl tune` says after it has measured this disk, and M in checkpoints."""
    payload = job.trainer.payload_bytes
    command = [
        sys.executable, "-m", "pccheckctl", "tune", "--json", "--storage", str(job.disk.path),
        "--checkpoint", str(payload), "--step-time", f"{1e3 * job.trainer.step_s:.3f}ms",
        "--mtbf", f"{job.mtbf_s:.3f}s",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"pccheckctl tune failed: {done.stderr.strip()}")
    said = json.loads(done.stdout)
    point = Point(said["in_flight"], said["writers"], said["interval_steps"])
    return point, said["dram_bytes"] / payload


def search(job: Job, most: int) -> list[Point]:
    steps = job.written_s / job.trainer.step_s
    intervals = sorted({max(1, math.ceil(round(part * steps, 6))) for part in AROUND})
    return [Point(*each) for each in product(range(1, most + 1), (1, 2), intervals)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Goodputs of one model: of every point once, and of the best ones and tune's again."""

    job: Job
    tune: Point
    searched: dict[Point, float]
    again: dict[Point, list[float]]

    def goodput(self, point: Point) -> Spread:
        return Spread.of(self.again[point])

    @property
    def best(self) -> Point:
        return max(self.again, key=lambda point: self.goodput(point).median)

    def cells(self, name: str) -> tuple[str, ...]:
        its, of_best = self.goodput(self.tune), self.goodput(self.best)
        return (
            name, f"{self.job.written_s / self.job.trainer.step_s:.1f}", str(len(self.searched)),
            self.tune.text(), its.text(), self.best.text(), of_best.text(),
            f"{its.median / of_best.median:.3f}",
        )  # fmt: skip

    def document(self) -> dict[str, object]:
        return {
            "written_s": self.job.written_s, "step_s": self.job.trainer.step_s,
            "dram": self.job.dram, "tune": self.tune.text(), "best": self.best.text(),
            "searched": {point.text(): value for point, value in self.searched.items()},
            "again": {point.text(): values for point, values in self.again.items()},
        }  # fmt: skip


def compare(job: Job, rounds: int, most: int) -> Comparison:
    chosen, dram = advised(job)
    job = replace(job, dram=dram)
    say(f"tune: {chosen.text()}, M = {dram:g} m")
    searched: dict[Point, float] = {}
    for point, goodput in job.goodputs(search(job, most)):
        searched[point] = goodput
        say(f"{point.text()}: {goodput:.3f}")
    best = sorted(searched, key=lambda point: -searched[point])[:FINALISTS]
    again: defaultdict[Point, list[float]] = defaultdict(list)
    for turn in range(rounds):
        for point, goodput in job.goodputs(rotated([*dict.fromkeys((chosen, *best))], turn)):
            again[point].append(goodput)
    return Comparison(job, chosen, searched, again)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _disk(options: argparse.Namespace) -> Iterator[Disk]:
    common.require_room(options.directory or options.image, GIB)
    if options.directory:
        with unlimited(options.directory) as disk:
            yield disk
    else:
        with limited(options.image, GIB, BANDWIDTH) as disk:
            yield disk


def table(found: dict[str, Comparison], facts: dict[str, object], disk: str) -> str:
    lines = common.heading("pccheckctl tune against an exhaustive search", facts)
    lines += [
        f"{disk}. Goodput with a failure after every {MTBF} checkpoint times; medians [min-max].",
        "The best point is that of all that were searched, measured again in turn with tune's.", "",
        "| model | steps of a checkpoint | searched | tune | goodput | best | goodput | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {' | '.join(run.cells(MODELS[name].name))} |" for name, run in found.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=lambda text: text.split(","), default=MODELS_DEFAULT)
    parser.add_argument("--rounds", type=int, default=3, help="of the last comparison")
    parser.add_argument("--smallest", action="store_true", help="N of 1, 4 MiB: for tests")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--directory", type=Path, help="measure this disk as it is")
    places.add_argument("--image", type=Path, default=Path(), help="where the limited disk is made")
    options = parser.parse_args()
    if unknown := [name for name in options.model if name not in MODELS]:
        parser.error(f"--model {unknown[0]}: choose from {', '.join(MODELS)}")
    facts = common.facts_of(options.directory or options.image)
    torch.set_num_threads(1)
    found: dict[str, Comparison] = {}
    payload = PAYLOAD_BYTES // 4 if options.smallest else PAYLOAD_BYTES
    with _disk(options) as disk:
        bandwidth = disk.limit or disk.direct
        for name in options.model:
            trainer = Paced(payload, 1.0)
            trainer.step_s = MODELS[name].scaled(trainer.payload_bytes, bandwidth)
            job = Job(trainer, disk, trainer.payload_bytes / bandwidth, 2.0)
            say(MODELS[name].name)
            found[name] = compare(job, options.rounds, 1 if options.smallest else 4)
        disk_text = disk.text()
    runs = {name: run.document() for name, run in found.items()}
    common.write_results("tune", facts | {"runs": runs}, table(found, facts, disk_text))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
