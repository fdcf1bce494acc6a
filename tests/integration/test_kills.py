"""100 rounds of the kill campaign, and a few with each other engine; `make campaign` runs a
thousand."""

from __future__ import annotations

import os

import pytest

from tests.integration.kill_campaign import run

PARTS = 2  # so that several workers share them


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.long
def test_100_kills(part: int) -> None:
    seed = int(os.environ.get("PCC_SEED", "1")) * PARTS + part
    tally = run(100 // PARTS, seed)
    print(f"seed {seed}", dict(tally.kills))
    assert not tally.violations, (seed, tally.violations[:5], len(tally.violations))
    assert sum(tally.kills.values()) == 100 // PARTS
    assert min(tally.states[s] for s in ("copying", "copied", "writing", "publishing")) >= 7


def test_kills_with_mmap() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = run(14, seed, "mmap")
    assert not tally.violations, (seed, tally.violations)
    assert tally.states["writing"] >= 2 and tally.states["publishing"] >= 4
