"""The GPU memory that a rank's trainer shares, and how the latest copies from it ended."""

from __future__ import annotations

import time
from dataclasses import replace

from pccheck_native import _core
from pccheck_native.transfer import PULL, Case, Decision, offered
from pccheck_wire.basics import size_text
from pccheck_wire.errors import RefusedError
from pccheckd.base.logs import LOG
from pccheckd.core.descriptors import Lot

from .binding import Binding
from .checkpoint import RankCheckpoint

_AT_THE_DRIVER = frozenset({"DEVICE", "DEVICE_LOST", "BAD_HANDLE", "OTHER_BYTES"})


class Pulling:
    """Counts copies that failed at the driver. A disk that fails under a copy, or a trainer that
    abandons it, says nothing about the next one."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._session = 0
        self._failures = 0

    def note(self, checkpoint: RankCheckpoint, event: _core.Event) -> None:
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

    async def expose(
        self, session: int, number: int, exposure: bytes, lot: Lot, case: Case
    ) -> Decision:
        """Maps the GPU memory that this session's trainer shares, if it is to be pulled. Under the
        lock: the memory must never become the next trainer's."""
        async with self._binding.lock:
            port = self._binding.port_of(session)
            if port is None:
                raise RefusedError("the session has ended")
            decision = offered(replace(case, failed_copies=self.failed(session)))
            if decision.transfer != PULL:
                self.refused()
                await port.expose(number, b"", Lot())  # replaces the previous exposure
                return decision
            began_s = time.monotonic()
            decision = offered(replace(case, obstacle=await port.expose(number, exposure, lot)))
            if decision.transfer == PULL and (usage := port.usage()) is not None:
                LOG.info(  # opening handles may be slow
                    "%s: %d allocations of GPU memory (%s) are mapped, after %.3f s",
                    self._binding.volumes.key, usage.mappings, size_text(usage.exposed_bytes),
                    time.monotonic() - began_s,
                )  # fmt: skip
            return decision
