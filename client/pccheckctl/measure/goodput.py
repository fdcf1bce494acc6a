"""How often to save on nodes that fail: the interval of the best goodput.

    goodput(f) = 1 - c / (f t) - (f t / 2 + d + r) / MTBF

t: seconds of a step; c: how long one checkpoint holds training; d: from its request to durable; r:
from a failure until training runs again. Rare checkpoints lose more work with each failure, and
frequent ones cost more time: the best interval is sqrt(2 c MTBF) seconds (Young; Daly).
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Costs(NamedTuple):
    """What one way of saving costs, in seconds."""

    step_s: float  # t
    held_s: float  # c
    delay_s: float  # d
    restart_s: float  # r
    mtbf_s: float


def goodput(costs: Costs, interval: int) -> float:
    """The share of the time that makes progress; 0 when failures come faster than that."""
    apart_s = interval * costs.step_s
    lost = costs.held_s / apart_s
    lost += (apart_s / 2 + costs.delay_s + costs.restart_s) / costs.mtbf_s
    return max(0.0, 1 - lost)


def best_interval(costs: Costs, least: int = 1) -> int:
    """The interval with the best goodput, in steps, at least `least`."""
    steps = math.sqrt(2 * costs.held_s * costs.mtbf_s) / costs.step_s
    near = {max(least, math.floor(steps)), max(least, math.ceil(steps))}
    return min(near, key=lambda interval: -goodput(costs, interval))
