"""Goodput of a job on spot machines: pure arithmetic on a trace and on measured costs.

The trace has the format of the paper's: a CSV with the header `,Time,GPUs`, seconds and the number
of GPUs at that time.
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
    """A contender at an interval. Times are of the model that is meant, not of its scaled copy."""

    step_s: float  # without checkpoints
    slowdown: float
    lag_steps: float  # lost by a preemption, on average
    load_s: float  # from the restart until training continues


def read_trace(lines: Iterable[str]) -> list[Sample]:
    rows = csv.DictReader(lines)
    if rows.fieldnames is None or not {"Time", "GPUs"} <= set(rows.fieldnames):
        raise BenchError("a trace begins with the line ,Time,GPUs")
    try:
        samples = [Sample(float(row["Time"]), int(row["GPUs"])) for row in rows]
    except (TypeError, ValueError):
        raise BenchError("a trace has a number, seconds and GPUs in every line") from None
    if len(samples) < 2 or any(b.seconds <= a.seconds for a, b in pairwise(samples)):
        raise BenchError("a trace has two samples at least, and its times grow")
    return samples


def make_trace(
    seed: int, gpus: int, samples: int, step_s: float, lost_an_hour: float, back_an_hour: float
) -> list[Sample]:
    """Preemptions and replacements at random: `lost_an_hour` and `back_an_hour` times an hour a
    machine goes or comes back, four GPUs at a time at most."""
    chance, here, made = random.Random(seed), gpus, []
    for number in range(samples):
        made.append(Sample(number * step_s, here))
        if chance.random() < lost_an_hour * step_s / 3600:
            here = max(0, here - chance.randint(1, 4))
        if here < gpus and chance.random() < back_an_hour * step_s / 3600:
            here = min(gpus, here + chance.randint(1, 4))
    return made


def stretches(trace: Sequence[Sample]) -> list[float]:
    """Seconds of undisturbed training. GPUs that go interrupt the job; those that come do not, as
    the job takes them at its next checkpoint. While no GPU is there, nothing trains."""
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
    """Steps kept, as a share of those of a job without checkpoints and without interruptions in the
    same time. Each stretch begins with a load and ends with the loss of what was not safe; the last
    one loses nothing, and the first one loads nothing."""
    kept = 0.0
    for number, seconds in enumerate(undisturbed):
        training_s = seconds - (costs.load_s if number else 0.0)
        steps = training_s / (costs.step_s * costs.slowdown)
        lost = costs.lag_steps if number < len(undisturbed) - 1 else 0.0
        kept += max(0.0, steps - lost)
    return kept * costs.step_s / sum(undisturbed)
