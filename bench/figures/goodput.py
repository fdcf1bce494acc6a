"""Goodput of a job on spot machines: pure arithmetic on a trace and on measured costs.

The trace has the paper's format: a CSV file with the header `,Time,GPUs`. `Time` is in seconds,
`GPUs` is the number of GPUs that the job has from then on.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.common import BenchError


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Costs:
    """A contender at an interval. Times are those of the paper's model, not of the scaled one."""

    step_s: float  # without checkpoints
    slowdown: float
    lag_steps: float  # lost by a preemption, on average
    load_s: float  # from the restart until training continues


def read_trace(lines: Iterable[str]) -> list[Sample]:
    rows = csv.DictReader(lines)
    if rows.fieldnames is None or not {"Time", "GPUs"} <= set(rows.fieldnames):
        raise BenchError("not a trace: the first line must be ,Time,GPUs")
    try:
        samples = [Sample(float(row["Time"]), int(row["GPUs"])) for row in rows]
    except (TypeError, ValueError):
        raise BenchError("not a trace: a line is a number, a time and the GPUs") from None
    if len(samples) < 2 or any(b.seconds <= a.seconds for a, b in pairwise(samples)):
        raise BenchError("not a trace: it must have two samples, and times that grow")
    return samples


def make_trace(
    seed: int, gpus: int, samples: int, step_s: float, lost_an_hour: float, back_an_hour: float
) -> list[Sample]:
    """Random preemptions, `lost_an_hour` on average, and replacements, `back_an_hour`; each of one
    to four GPUs."""
    chance, here, made = random.Random(seed), gpus, []
    for number in range(samples):
        made.append(Sample(number * step_s, here))
        if chance.random() < lost_an_hour * step_s / 3600:
            here = max(0, here - chance.randint(1, 4))
        if here < gpus and chance.random() < back_an_hour * step_s / 3600:
            here = min(gpus, here + chance.randint(1, 4))
    return made


def stretches(trace: Sequence[Sample]) -> list[float]:
    """Seconds of undisturbed training. A preemption interrupts the job; a replacement does not,
    because the job uses new GPUs from its next checkpoint on. Without GPUs nothing trains."""
    found, since = [], trace[0].seconds
    for before, now in pairwise(trace):
        if now.gpus < before.gpus or (now.gpus and not before.gpus):
            if before.gpus:
                found.append(now.seconds - since)
            since = now.seconds
    if trace[-1].gpus:
        found.append(trace[-1].seconds - since)
    return found


def preemptions(trace: Sequence[Sample]) -> int:
    return sum(b.gpus < a.gpus for a, b in pairwise(trace))


def goodput(undisturbed: Sequence[float], costs: Costs) -> float:
    """Steps kept, as a share of the steps that a job without checkpoints and without interruptions
    makes in the same time. Each stretch but the first begins with a load; each but the last ends
    with the loss of what was not safe."""
    kept = 0.0
    for number, seconds in enumerate(undisturbed):
        training_s = seconds - (costs.load_s if number else 0.0)
        steps = training_s / (costs.step_s * costs.slowdown)
        lost = costs.lag_steps if number < len(undisturbed) - 1 else 0.0
        kept += max(0.0, steps - lost)
    return kept * costs.step_s / sum(undisturbed)
