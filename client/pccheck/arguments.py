"""Checks of what users pass in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError, UsageError

from .flatten import Flattener

_STEP_MAX = 2**63 - 1


_CHOICES = {
    "transfer": ("auto", "pull", "push"),
    "snapshot": ("overlap", "device", "blocking"),
    "gate": ("auto", "manual"),
    "on_busy": ("wait", "skip"),
    "on_error": ("warn", "raise"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How a client saves; PCcheckClient's docstring says what each means. Raises UsageError."""

    transfer: str = "auto"
    snapshot: str = "overlap"
    gate: str = "auto"
    on_busy: str = "wait"
    on_error: str = "warn"
    stall_limit_s: float = 30

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name}={value!r}", hint=f"use one of {', '.join(allowed)}")
        if not 0 < self.stall_limit_s < 1e6:
            raise UsageError(
                f"stall_limit_s={self.stall_limit_s!r} is not a number of seconds above 0"
            )

    @property
    def raises(self) -> bool:
        return self.on_error == "raise"


def check_step(step: Any) -> int:
    """An int by value: a NumPy integer or an integral tensor counts. Raises UsageError."""
    try:
        number = int(step.__index__())
    except (AttributeError, TypeError):
        raise UsageError(f"step={step!r} is not an int") from None
    if isinstance(step, bool) or not 0 <= number <= _STEP_MAX:
        raise UsageError(f"step={step!r} is not between 0 and 2**63 - 1")
    return number


def metadata_node(value: Any) -> tree.Node:
    """JSON-like values only, so that every reader can show them. Raises UnsupportedStateError."""
    if value is None:
        return None
    _check_json(value, "metadata", 0)
    return Flattener().node(value, "metadata")


def _check_json(value: Any, path: str, depth: int) -> None:
    if depth > tree.DEPTH_MAX:
        raise UnsupportedStateError(f"{path[:80]}: nested more than {tree.DEPTH_MAX} deep")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise UnsupportedStateError(f"{path}: a key that is not a str: {key!r}")
            _check_json(item, f"{path}.{key}", depth + 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{path}.{index}", depth + 1)
    elif type(value) not in (type(None), bool, int, float, str):
        raise UnsupportedStateError(
            f"{path}: a {type(value).__name__} in metadata", hint="metadata is JSON-like"
        )
