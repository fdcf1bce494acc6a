"""The health of this process: once a second the loop and the native core must answer.

A fault means that the process must be restarted. A disk that hangs is no fault: copied checkpoints
are in this process's memory, and a restart would not repair the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future

from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.core.engine import Engine
from pccheckd.core.port import Port
from pccheckd.jobs.registry import Registry

BEAT_S = 1.0
#: The pool and every port answer in microseconds unless a thread ended with their lock; a
#: machine that swaps or was suspended needs some time.
ANSWER_LIMIT_S = 20.0


class Health(Background):
    """Started and stopped by the daemon's start and stop; only the loop touches it."""

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.lag_s = 0.0  # how late the last beat was
        self.faults: list[str] = []
        self._engine = registry.engine
        self._registry = registry
        self._clock = clock
        self._thread = Threads(1, "health")
        self._asked: Future[None] | None = None
        self._asked_at = 0.0

    def start(self) -> None:
        self._thread.begin()
        super().start()

    async def close(self) -> None:
        await super().close()
        self._thread.stop()

    def stalled(self) -> list[str]:
        """Disks without progress, as `DiskProgress` found: the daemon is degraded and continues."""
        found = [self._engine.stalled] if self._engine.stalled else []
        return found + [
            f"{t.key}: {t.binding.stalled}" for t in self._registry.tenants() if t.binding.stalled
        ]

    def ask(self) -> None:
        """Asks the native core again, or notes that its answer is late."""
        self._engine.room.look()
        if self._asked is None or self._asked.done():
            ports = [t.binding.port for t in self._registry.tenants() if t.binding.port is not None]
            self._asked_at = self._clock()
            self._asked = self._thread.submit(_native, self._engine, ports)
        waited_s = self._clock() - self._asked_at
        late = waited_s >= ANSWER_LIMIT_S
        if late and not self.faults:
            LOG.error("the native core does not answer: pccheckd must be restarted")
        self.faults = [f"the native core has not answered for {waited_s:.0f} s"] if late else []

    async def _run(self) -> None:
        while True:
            due = self._clock() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.lag_s = max(0.0, self._clock() - due)
            self.ask()


def _native(engine: Engine, ports: list[Port]) -> None:
    """In a thread: takes and releases every lock that saves take."""
    engine.pool.usage()
    for port in ports:
        port.usage()
