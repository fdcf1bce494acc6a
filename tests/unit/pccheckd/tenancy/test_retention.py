"""What is kept for a reason: flags that go while they are being set, and what ends a protection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pccheckd.tenancy.retention import Retention
from pccheckd.tenancy.volumes import Key


class Inline:
    """An engine that calls at once."""

    async def call(self, _: int, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return function(*given, **named)


def made(volumes: Any) -> Retention:
    nobody: Any = None
    engine: Any = Inline()
    return Retention(volumes, engine, nobody, nobody)


@pytest.mark.parametrize(("error", "warned"), [(FileNotFoundError(2, "gone"), False),
                                               (OSError(5, "bad"), True)])  # fmt: skip
def test_only_a_flag_that_fails_at_the_disk_is_a_warning(
    caplog: pytest.LogCaptureFixture, error: OSError, warned: bool
) -> None:
    def flag(*_: object, **__: object) -> None:
        raise error

    item = SimpleNamespace(volume=SimpleNamespace(flag=flag), read=lambda: None)
    volumes: Any = SimpleNamespace(key=Key(7, "gpt", 0), find=lambda _: item)
    assert not asyncio.run(made(volumes).flag(3, set_=1))
    assert bool(caplog.records) is warned


@pytest.mark.parametrize(
    ("protected", "sequence", "restored"),
    [(set(), 0, True), ({5}, 0, False), ({3, 5}, 4, False), ({5}, 5, True), ({5}, 6, True)],
)
def test_what_was_not_read_stays_protected(
    protected: set[int], sequence: int, restored: bool
) -> None:
    """A trainer that found nothing, because its disk was away, sends Restored(0)."""
    volumes: Any = SimpleNamespace(key=Key(7, "gpt", 0))
    retention = made(volumes)
    retention.protected, retention.unrestored = protected, True
    retention.restored_to(sequence)
    assert retention.unrestored is not restored


def test_released_checkpoints_are_forgotten_with_their_slots() -> None:
    """Each restart of a job releases one: before, the daemon remembered all of them."""
    there: set[int] = set()
    item = SimpleNamespace(volume=SimpleNamespace(flag=lambda *_, **__: None), read=lambda: None)
    volumes: Any = SimpleNamespace(
        key=Key(7, "gpt", 0), find=lambda _: item, sequences=lambda: there
    )
    retention = made(volumes)
    for sequence in range(1, 10):
        there = {sequence - 1, sequence}
        asyncio.run(retention.unprotect(sequence))
        assert retention._released == there & set(range(1, 10))
