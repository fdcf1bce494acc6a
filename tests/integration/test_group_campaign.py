"""Twelve rounds of the campaign over groups; `make campaign` runs a thousand."""

from __future__ import annotations

import os

import pytest

from tests.integration.group_campaign import run


@pytest.mark.long
def test_twelve_rounds() -> None:
    seed = int(os.environ.get("PCC_SEED", "3"))
    tally = run(12, seed)
    print(f"seed {seed}", dict(tally.kills), dict(tally.starts), dict(tally.judged))
    assert not tally.violations, (seed, tally.violations)
    assert sum(tally.judged.values()) >= 18
