"""Objects of named classes are stored as plain values, and only those are made again."""

from __future__ import annotations

import argparse
import collections
import enum
from typing import Any

import pytest
import torch

from pccheck.integrations.objects import OBJECT, Objects
from pccheck.state.flatten import Flattener
from pccheck_wire.errors import StateMismatchError, UnsupportedStateError, UsageError


class Stage(enum.IntEnum):
    FIRST = 1


class Scaler:
    def __init__(self) -> None:
        raise AssertionError("no constructor runs when a checkpoint is loaded")


class Slotted:
    __slots__ = ("value",)


class Reduced:
    def __reduce__(self) -> Any:
        return (print, ("run",))


class Restored:
    def __setstate__(self, state: object) -> None:
        print(state)


def test_what_was_given_comes_back_and_the_given_is_left_alone() -> None:
    scaler = Scaler.__new__(Scaler)
    vars(scaler).update(scale=2.0, inside=argparse.Namespace(lr=torch.ones(2), stage=Stage.FIRST))
    module = collections.OrderedDict(weight=torch.zeros(3))
    module._metadata = {"version": 1}  # type: ignore[attr-defined]
    given = {"scaler": scaler, "module": module, "more": [(Stage.FIRST, 1), None]}
    known = Objects([Scaler, Stage, argparse.Namespace], "")
    plain = known.plain(given, "state")
    Flattener().node(plain, "state")  # it can be stored
    assert given["more"] == [(Stage.FIRST, 1), None] and given["scaler"] is scaler
    made: Any = known.made(plain, "state")
    assert type(made["scaler"]) is Scaler and made["scaler"].scale == 2.0
    assert made["scaler"].inside.lr is vars(scaler)["inside"].lr
    assert made["scaler"].inside.stage is Stage.FIRST and made["more"] == given["more"]
    assert made["module"]._metadata == {"version": 1}
    assert made["module"]["weight"] is module["weight"]


def test_other_classes_are_neither_stored_nor_made() -> None:
    left: Any = Objects([], "").plain({"a": [argparse.Namespace(x=1)]}, "state")
    with pytest.raises(UnsupportedStateError, match=r"state\.a\.0: a value of type argparse"):
        Flattener().node(left, "state")
    stored = Objects([argparse.Namespace], "").plain({"a": [argparse.Namespace(x=1)]}, "state")
    with pytest.raises(StateMismatchError, match=r"state\.a\.0 was an object of argparse.Names"):
        Objects([Stage], "name it").made(stored, "state")
    with pytest.raises(StateMismatchError, match="7 is not a value of Stage"):
        Objects([Stage], "").made({OBJECT: f"{__name__}.Stage", "state": 7}, "state")


@pytest.mark.parametrize("cls", [Slotted, Reduced, Restored, dict, int, object, 3])
def test_a_class_whose_objects_are_more_than_their_attributes_is_refused(cls: Any) -> None:
    with pytest.raises(UsageError, match="cannot be stored as their attributes"):
        Objects([cls], "")


def test_the_mark_of_objects_and_cycles_are_refused() -> None:
    known = Objects([], "")
    with pytest.raises(UnsupportedStateError, match=r"state\.a: the key"):
        known.plain({"a": {OBJECT: 1}}, "state")
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UnsupportedStateError, match=r"state\.0: the container contains itself"):
        known.plain(cycle, "state")
