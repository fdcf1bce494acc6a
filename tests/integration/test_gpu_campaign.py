"""60 rounds of the campaign on the stand-in; `make gpu-campaign` runs five hundred."""

from __future__ import annotations

import os

import pytest

from tests.integration.gpu_campaign import FAULTS, MODES, VICTIMS, run
from tests.support import fakegpu


@pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")
@pytest.mark.timeout(600)
def test_60_kills_and_faults() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = run(60, seed)
    print(f"seed {seed}", dict(tally.kinds), dict(tally.outcomes))
    assert not tally.violations, (seed, tally.violations[:5], len(tally.violations))
    assert len(tally.kinds) == len(FAULTS) + len(MODES) + len(VICTIMS) - 1  # "trainer" is twice
