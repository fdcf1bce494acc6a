"""Row 4 of the fault plan in small; `make faults` runs all of it."""

from __future__ import annotations

import pytest

from tests.integration import fault_campaign
from tests.support import faultydisk


def test_a_failing_device_under_file_system_and_engine() -> None:
    if why := faultydisk.missing():
        pytest.skip(why)
    seen = fault_campaign.run(6, seed=7, stride=7)
    print(dict(seen))
    assert seen["cases"] == 6 and seen["struck"] > 2
