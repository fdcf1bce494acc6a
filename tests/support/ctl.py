"""`pccheckctl` called in this process: its exit code and its output."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Ctl = Callable[..., "Ran"]


class Ran:
    """An exit code and the output."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)
