"""States that only change by the moves of a table. A move that is not listed raises."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

_State = TypeVar("_State", bound=Enum)


class UnlistedMoveError(RuntimeError):
    """An internal error: a state was followed by one that cannot follow it."""


def moved(
    moves: Mapping[_State, frozenset[_State]], now: _State, to: _State, who: object
) -> _State:
    """The state `to`. Raises UnlistedMoveError when it must not follow `now`."""
    if to not in moves[now]:
        raise UnlistedMoveError(f"{who}: {now.name} cannot become {to.name}")
    return to
