"""Flags of checkpoints that go while they are being set."""

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


@pytest.mark.parametrize(("error", "warned"), [(FileNotFoundError(2, "gone"), False),
                                               (OSError(5, "bad"), True)])  # fmt: skip
def test_only_a_flag_that_fails_at_the_disk_is_a_warning(
    caplog: pytest.LogCaptureFixture, error: OSError, warned: bool
) -> None:
    def flag(*_: object, **__: object) -> None:
        raise error

    item = SimpleNamespace(volume=SimpleNamespace(flag=flag), read=lambda: None)
    volumes: Any = SimpleNamespace(key=Key(7, "gpt", 0), find=lambda _: item)
    engine: Any = Inline()
    assert not asyncio.run(Retention(volumes, engine).flag(3, set_=1))
    assert bool(caplog.records) is warned
