"""Small files beside the volumes, for what the daemon remembers over a restart. Each may be lost at
any time; its reader documents what that costs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


def load(path: Path, schema: int) -> Mapping[str, object]:
    """What was stored; nothing when there is nothing of this schema."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        plain = json.loads(path.read_text())
        if isinstance(plain, dict) and plain.get("schema") == schema:
            return plain
    return {}


def load_into(made: _T, path: Path, schema: int) -> _T:
    """Sets the fields of a fresh dataclass to the stored values that have their types."""
    plain = load(path, schema)
    for item in fields(made):  # type: ignore[arg-type]
        value = plain.get(item.name)
        if type(value) is type(getattr(made, item.name)):
            setattr(made, item.name, value)
    return made


def store(path: Path, schema: int, document: Mapping[str, object]) -> None:
    """Replaces the file. Raises OSError."""
    fresh = path.with_name(path.name + ".tmp")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"schema": schema, **document}, file)
    fresh.replace(path)
