"""`pccheckctl` called in this process: its exit code and its output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ctl = Callable[..., "Ran"]


class Ran:
    """An exit code and the output."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def written(ctl: Ctl, socket: Path, what: str = "written_bytes") -> dict[int, list[int]]:
    """By step, the bytes that each rank wrote (or another number of each checkpoint), of the
    checkpoints of a job that the daemon knows."""
    found: dict[int, list[int]] = {}
    document = ctl(None, "status", "--json", "--socket", socket).json
    for rank in sorted(document["ranks"], key=lambda one: one["rank"]):
        for one in rank["checkpoints"]:
            found.setdefault(one["step"], []).append(one[what])
    return found
