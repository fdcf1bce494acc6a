"""The options of a client, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pccheck_wire.errors import UsageError

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
    """How a client saves; PCcheckClient's docstring explains each option. Raises UsageError."""

    transfer: str = "auto"
    snapshot: str = "overlap"
    gate: str = "auto"
    on_busy: str = "wait"
    on_error: str = "warn"
    stall_limit_s: float = 30
    slowdown: float = 1.03
    durable_every: int | str = 1  # or "auto"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(
                    f"{name}={value!r} is not an option", hint=f"use one of {', '.join(allowed)}"
                )
        limit: object = self.stall_limit_s
        if not isinstance(limit, (int, float)) or not 0 < limit < 1e6:
            raise UsageError(
                f"stall_limit_s={self.stall_limit_s!r} is not a number of seconds above 0",
                hint="use the longest time for which checkpoints may delay training, say 30",
            )
        allowed_slowdown: object = self.slowdown
        if not isinstance(allowed_slowdown, (int, float)) or not 1 < allowed_slowdown < 100:
            raise UsageError(
                f"slowdown={self.slowdown!r} is not a factor above 1",
                hint="slowdown=1.03 allows training to take three percent longer",
            )
        every: object = self.durable_every
        if every != "auto" and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise UsageError(
                f'durable_every={every!r} is neither a number of checkpoints nor "auto"',
                hint="durable_every=10 writes every tenth checkpoint to the disk; 1 writes all",
            )

    @property
    def writes_every(self) -> float:
        """Of so many checkpoints one goes to the disk; infinity for "auto"."""
        return float("inf" if self.durable_every == "auto" else self.durable_every)

    @property
    def raises(self) -> bool:
        return self.on_error == "raise"


def check_path(name: str, value: Any) -> Path | None:
    """None for nothing. Raises UsageError."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name}={value!r} is not a path", hint=f'{name}="/a/path"')
    return Path(value) if value else None


def check_flag(name: str, value: Any) -> bool:
    """True or False by value: 1 and NumPy's True count, "no" does not. Raises UsageError."""
    try:
        found = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # several elements
        found = None
    if isinstance(found, int) and found in (0, 1):
        return bool(found)
    raise UsageError(f"{name}={value!r} is not a bool", hint=f"{name}=True, or leave it out")


def check_names(name: str, value: Any) -> list[str]:
    """One name, or several. Raises UsageError."""
    found = [value] if isinstance(value, str) else value
    if isinstance(found, (list, tuple, set, frozenset)) and all(
        isinstance(one, str) for one in found
    ):
        return list(filter(None, found))
    raise UsageError(
        f"{name}={value!r} is not a name or a list of names",
        hint=f'{name}="..." or {name}=["...", "..."]',
    )


def check_seconds(name: str, value: Any) -> float:
    """Raises UsageError."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        raise UsageError(
            f"{name}={value!r} is not a number of seconds", hint=f"use 0 or more: {name}=25"
        )
    return seconds


def check_step(step: Any) -> int:
    """An int by value: a NumPy integer or an integral tensor counts. Raises UsageError."""
    hint = "use the number of the training step"
    try:
        number = int(step.__index__())
    except (AttributeError, TypeError):
        raise UsageError(f"step={step!r} is not an int", hint=hint) from None
    if isinstance(step, bool):
        raise UsageError(f"step={step!r} is not an int")
    if not 0 <= number <= _STEP_MAX:
        raise UsageError(f"step={step!r} is not between 0 and 2**63 - 1", hint=hint)
    return number
