"""Small files beside the volumes, for what the daemon remembers over a restart. Each may be lost at
any time; its reader documents what that costs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path


def load(path: Path, schema: int) -> Mapping[str, object]:
    """What was stored; nothing when there is nothing of this schema."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        plain = json.loads(path.read_text())
        if isinstance(plain, dict) and plain.get("schema") == schema:
            return plain
    return {}


def store(path: Path, schema: int, document: Mapping[str, object]) -> None:
    """Replaces the file. Raises OSError."""
    fresh = path.with_name(path.name + ".tmp")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"schema": schema, **document}, file)
    fresh.replace(path)
