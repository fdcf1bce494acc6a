"""How long a checkpoint waits until the nodes have agreed."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pccheckd.nodes.wide import AGREE_LIMIT_S, WideJob


@pytest.mark.parametrize(("waited_s", "skipped"), [(0.2, []), (AGREE_LIMIT_S, ["why"])])
async def test_the_limit_is_that_of_the_start_that_waits(
    waited_s: float, skipped: list[str]
) -> None:
    """The timer may be that of the start before, which had wanted to save at another time."""
    told: list[str] = []
    members = SimpleNamespace(waits_for_nodes=True)
    wide: Any = SimpleNamespace(
        job=SimpleNamespace(members=members),
        _restoring=SimpleNamespace(wanted_s=time.monotonic() - waited_s),
        why_not_agreed=lambda: "why", _skip_waiting=told.append, _too_late=lambda: None,
    )  # fmt: skip
    WideJob._too_late(wide)
    assert told == skipped
    left_s = wide._limit.when() - asyncio.get_running_loop().time()
    wide._limit.cancel()
    assert left_s > (0 if skipped else AGREE_LIMIT_S - 5)
