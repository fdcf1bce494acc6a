"""How the latest pulled copies of a rank ended."""

from __future__ import annotations

from dataclasses import dataclass

from pccheck_native import _core

from .checkpoint import Checkpoint

_AT_THE_DRIVER = frozenset({"DEVICE", "DEVICE_LOST", "BAD_HANDLE"})


@dataclass(slots=True)
class Pulling:
    """Counts copies that failed at the driver. A disk that fails under a copy, or a trainer that
    abandons it, says nothing about the next one."""

    _session: int = 0
    _failures: int = 0

    def note(self, checkpoint: Checkpoint, event: _core.Event) -> None:
        """An event of any checkpoint; only copies of pulled ones count."""
        if not checkpoint.map:
            return
        if event.kind == "copied":
            self._failures = 0
        elif event.kind == "failed" and event.stage == "copy":
            if event.error_name not in _AT_THE_DRIVER:
                return
            self._failures = self._failures + 1 if checkpoint.session == self._session else 1
            self._session = checkpoint.session

    def failed(self, session: int) -> int:
        """Copies of this session that failed in a row."""
        return self._failures if session == self._session else 0

    def refused(self) -> None:
        """An exposure was refused for this: the one after it is tried again."""
        self._failures = 0
