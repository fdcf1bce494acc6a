"""30 rounds of the kill campaign, three turns of its rotation, and a few with each other engine;
`make campaign` runs a thousand."""

from __future__ import annotations

import os

import pytest

from tests.integration.kill_campaign import run

ROUNDS = 30


@pytest.mark.long
def test_kills_lose_nothing() -> None:
    seed = int(os.environ.get("PCC_SEED", "1")) * 2
    tally = run(ROUNDS, seed)
    print(f"seed {seed}", dict(tally.kills))
    assert not tally.violations, (seed, tally.violations[:5], len(tally.violations))
    assert sum(tally.kills.values()) == ROUNDS
    assert min(tally.states[s] for s in ("copying", "copied", "writing", "publishing")) >= 4


def test_kills_with_mmap() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = run(14, seed, "mmap")
    assert not tally.violations, (seed, tally.violations)
    assert tally.states["writing"] >= 2 and tally.states["publishing"] >= 4
