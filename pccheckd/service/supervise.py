"""Reports to the service manager while the daemon runs: STATUS, and WATCHDOG from the event loop.

The watchdog depends on the loop and on the native core's locks (reading the usage takes them): when
either hangs, nothing works and a restart helps. A hanging disk stops neither: the daemon may hold
the only copy of checkpoints, so STATUS says `degraded`, and the daemon keeps running."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from pccheck_wire.basics import plural
from pccheck_wire.units import GIB
from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.base.notify import Notifier
from pccheckd.jobs.sessions import Sessions
from pccheckd.observe import report
from pccheckd.upkeep.stalls import DiskProgress

PERIOD_S = 5.0
#: While starting or stopping, each step extends the manager's limit to this.
EXTENSION_S = 30.0
DRAIN_STEP_S = 1.0


class Supervisor(Background):
    def __init__(
        self, notifier: Notifier, sessions: Sessions, *, faults: Callable[[], list[str]]
    ) -> None:
        """`faults` returns why the process itself fails: the watchdog then ends it."""
        self._faults = faults
        self._notifier = notifier
        self._config = sessions.config
        self._registry = sessions.registry
        self._sessions = sessions
        self._progress = DiskProgress(sessions.registry, time.monotonic)

    @property
    def period_s(self) -> float:
        """A third of the watchdog's limit at most."""
        shortest = min(PERIOD_S, max(self._config.stall_limit_s / 2, 0.05))
        watchdog_s = self._notifier.watchdog_s
        return min(shortest, watchdog_s / 3) if watchdog_s else shortest

    def beat(self) -> None:
        """One check of everything, and its report."""
        self._progress.look()
        self._notifier.status(self.line(), *self._heartbeat())

    def line(self) -> str:
        """For `systemctl status`: warnings first."""
        warnings = [*self._faults(), *report.troubles(self._registry)]
        if not self._registry.survey.complete:
            warnings.append(f"at the start: {self._registry.survey}")
        trainers, moving = self._sessions.trainers(), self._registry.in_flight()
        durable = sum(t.ledger.counters["durable"] for t in self._registry.tenants())
        budget, used = self._registry.engine.pool.usage()
        work = (
            f"{plural(trainers, 'trainer')}, {plural(moving, 'checkpoint')} in flight, "
            f"{durable} made durable; memory {used / GIB:.1f} of {budget / GIB:.1f} GiB"
        )
        if not warnings:
            return work
        more = f" (and {len(warnings) - 1} more)" if len(warnings) > 1 else ""
        return f"degraded: {warnings[0]}{more}; {work}; see: pccheckctl status"

    async def while_draining(self, limit_s: float) -> None:
        """Reports the progress of the stop, until it is cancelled or the limit is reached."""
        until = time.monotonic() + limit_s
        while (left_s := until - time.monotonic()) > 0:
            with self._guarded():
                self._report_drain(left_s)
            await asyncio.sleep(min(DRAIN_STEP_S, self.period_s))

    def _report_drain(self, left_s: float) -> None:
        self._notifier.extend(min(left_s, EXTENSION_S) + EXTENSION_S)
        self._notifier.status(
            f"stopping: {plural(self._registry.in_flight(), 'checkpoint')} not durable yet, "
            f"at most {left_s:.0f} s more",
            *self._heartbeat(),
        )
        self._progress.look()

    def _heartbeat(self) -> tuple[str, ...]:
        return ("WATCHDOG=1",) if self._notifier.watchdog_s and not self._faults() else ()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error in a check must not look like a stuck loop, nor end a drain."""
        try:
            yield
        except Exception:
            LOG.exception("the supervisor failed")
            self._notifier.send(*self._heartbeat())

    async def _run(self) -> None:
        while True:
            with self._guarded():
                self.beat()
            await asyncio.sleep(self.period_s)
