"""A few rounds of the campaigns on the stand-in; `make gpu-campaign` runs hundreds."""

from __future__ import annotations

import os

import pytest

from tests.integration import gpu_restart_campaign
from tests.integration.gpu_campaign import FAULTS, MODES, VICTIMS, run
from tests.support import fakegpu


@pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
@pytest.mark.long
def test_40_kills_and_faults() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = run(40, seed)
    print(f"seed {seed}", dict(tally.kinds), dict(tally.outcomes))
    assert not tally.violations, (seed, tally.violations[:5], len(tally.violations))
    assert len(tally.kinds) == len(FAULTS) + len(MODES) + len(VICTIMS) - 1  # "trainer" is twice


@pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
@pytest.mark.long
def test_daemons_that_pull_are_killed_and_taken_over() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = gpu_restart_campaign.run(6, seed)
    print(f"seed {seed}", dict(tally.kinds), dict(tally.outcomes))
    assert not tally.violations, (seed, tally.violations)
    assert len(tally.kinds) == len(gpu_restart_campaign.MOMENTS) + 2
