"""When a process is sick, and when it is not: what the watchdog and /healthz go by."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pccheckd.observe.health import ANSWER_LIMIT_S, Health


class Place:
    """An engine whose pool answers when it may, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = 0
        self.engine = cast(
            Any, SimpleNamespace(pool=self, stalled="", room=SimpleNamespace(look=lambda: None))
        )
        self.tenants: list[Any] = []
        registry = cast(
            Any, SimpleNamespace(tenants=lambda: iter(self.tenants), engine=self.engine)
        )
        self.health = Health(registry, clock=lambda: self.now)

    def usage(self) -> tuple[int, int]:
        self.asked += 1
        assert self.may_answer.wait(60)
        return 0, 0

    async def answered(self) -> None:
        assert self.health._asked is not None
        await asyncio.wrap_future(self.health._asked)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    yield place
    place.may_answer.set()
    await place.health.close()


async def test_a_core_that_answers_is_well(place: Place) -> None:
    for _ in range(3):
        place.now += 100.0
        place.health.ask()
        await place.answered()
        assert place.health.faults == []
    assert place.asked == 3


async def test_a_lock_that_is_never_given_back_is_a_fault_until_it_is(place: Place) -> None:
    place.may_answer.clear()
    place.health.ask()
    place.now += ANSWER_LIMIT_S - 1
    place.health.ask()
    assert place.health.faults == []
    place.now += 1
    place.health.ask()
    (fault,) = place.health.faults
    assert "has not answered for 20 s" in fault
    place.may_answer.set()
    await place.answered()
    assert place.asked == 1
    place.health.ask()
    assert place.health.faults == []


async def test_a_disk_that_hangs_is_no_fault(place: Place) -> None:
    place.engine.stalled = "a call to the storage has not returned"
    place.tenants = [
        SimpleNamespace(key="job", binding=SimpleNamespace(stalled="no progress", port=None))
    ]
    place.health.ask()
    await place.answered()
    assert place.health.faults == []
    assert place.health.stalled() == [place.engine.stalled, "job: no progress"]
