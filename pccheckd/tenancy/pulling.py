"""Whether a tenant's GPU memory may still be pulled, from how its latest copies ended."""

from __future__ import annotations

from dataclasses import dataclass

from pccheck_native import _core

from .checkpoint import Checkpoint

#: Copies of one session in a row that fail at the driver before it has to push.
FAILURES_MAX = 3
_AT_THE_DRIVER = frozenset({"DEVICE", "DEVICE_LOST", "BAD_HANDLE"})


@dataclass(slots=True)
class Pulling:
    """How the latest copies out of a trainer's GPU memory ended. A disk that fails under a copy, or
    a trainer that abandons it, says nothing about the next one."""

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

    def take_refusal(self, session: int) -> str:
        """Why this session's next exposure is refused, or "". Resets the count: the exposure after
        that is tried again."""
        if session != self._session or self._failures < FAILURES_MAX:
            return ""
        failures, self._failures = self._failures, 0
        return f"the GPU driver failed {failures} pulled copies in a row"
