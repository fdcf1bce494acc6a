"""The simulation of many nodes: the same in every run, and what it says about messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import scale
from bench.simulated import simulate

CPU = {"decider_cpu_s", "median_cpu_s"}


def job(ranks: int, checkpoints: int = 4) -> dict[str, Any]:
    found = simulate(partial(scale.job, ranks=ranks, checkpoints=checkpoints, seed=7))
    return {key: value for key, value in found.items() if key not in CPU}


def test_a_job_is_the_same_in_every_run() -> None:
    first = job(60)
    assert first == job(60)
    assert first["nodes"] == 8 and len(first["global_s"]) == 4


def test_messages_of_a_checkpoint_grow_with_the_nodes() -> None:
    few, many = (job(scale.RANKS_PER_NODE * nodes) for nodes in (8, 64))
    assert many["save"].operations < 2 * 8 * few["save"].operations
    assert max(many["global_s"]) < 1.0


def test_goodput_is_what_failures_leave() -> None:
    found = job(16) | {"ranks": 16384}
    per_day = 24 * 3600 * scale.INTERRUPTIONS_PER_RANK_H * 16384 / 3600
    lost_s = scale.WRITE_S + scale.LATE_S + scale.INTERVAL_S / 2 + scale.LAUNCH_S
    assert abs(scale.goodput(found) - (1 - per_day * lost_s / 86400)) < 1e-3
