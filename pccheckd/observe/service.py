"""Serves metrics and health: connects the daemon's loop with the listener's thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.config.metrics_place import Place, parse, require
from pccheckd.jobs.sessions import Sessions
from pccheckd.upkeep.scrub import Scrubber

from . import gauges
from .health import Health

if TYPE_CHECKING:  # imported when metrics are wanted
    from .listener import HttpAnswer, Listener
    from .metrics import Metrics

#: How long a scrape or probe waits for the daemon's loop.
LOOP_LIMIT_S = 5.0
FILE_EVERY_S = 15.0

_T = TypeVar("_T")


class Observing:
    """Health, and the metrics of `--metrics`, within `async with`: the last part to stop, since
    probes ask until the end. Owns the background check, which others start and stop."""

    def __init__(self, sessions: Sessions) -> None:
        self.health = Health(sessions.registry)
        self.scrubber = Scrubber(sessions.registry)
        self._sessions = sessions
        self._metrics: Metrics | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._file: _File | None = None

    async def __aenter__(self) -> Self:
        """Raises UsageError when the address is in use, or the extra is missing."""
        if place := self._sessions.config.metrics:
            require(place)
            self._serve(parse(place))
        self.health.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.health.close()
        if self._listener is not None:
            await asyncio.to_thread(self._listener.stop)
        if self._file is not None:
            await self._file.close()

    def _serve(self, place: Place) -> None:
        from .listener import Listener
        from .metrics import Metrics

        self._loop = asyncio.get_running_loop()
        self._metrics = Metrics()
        self._sessions.registry.chronicle.count_with(self._metrics)
        if place.file is not None:
            self._file = _File(place.file, self._text)
            self._file.start()
            return
        self._listener = Listener(
            place, {"/metrics": self._page, "/healthz": self._healthz, "/readyz": self._readyz}
        )
        self._listener.start()
        here = Place(place.host, self._listener.port)
        LOG.info("metrics at %s/metrics; /healthz and /readyz beside them", here)
        if not place.is_local:
            LOG.warning(
                "any process that reaches %s can read the metrics, which name every user's jobs",
                here,
            )  # fmt: skip

    # -- pages, in the listener's threads ------------------------------------------------------

    def _page(self) -> HttpAnswer:
        from .listener import HttpAnswer
        from .metrics import CONTENT_TYPE

        assert self._metrics is not None
        return HttpAnswer(200, self._metrics.render(self._ask(self._families)), CONTENT_TYPE)

    def _healthz(self) -> HttpAnswer:
        """Alive: the loop and the native core answer. A disk that hangs is reported but is no
        failure: a restart would lose the checkpoints in memory, and not help the disk."""
        faults, stalled = self._ask(lambda: (list(self.health.faults), len(self.health.stalled())))
        if faults:
            return _lines(503, *faults)
        return _lines(200, "ok", *(["degraded: a disk hangs"] if stalled else []))

    def _readyz(self) -> HttpAnswer:
        draining = self._ask(lambda: self._sessions.draining)
        return _lines(503, "stopping") if draining else _lines(200, "ready")

    def _ask(self, question: Callable[[], _T]) -> _T:
        """The answer from the daemon's loop. Raises TimeoutError when it does not come."""

        async def asked() -> _T:
            return question()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result(LOOP_LIMIT_S)

    async def _text(self) -> bytes:
        """What the file holds; on the daemon's loop."""
        assert self._metrics is not None
        return await asyncio.to_thread(self._metrics.render, self._families())

    def _families(self) -> list[gauges.Family]:
        return gauges.read(self._sessions, self.health, self.scrubber)


class _File(Background):
    """Replaces a file periodically, and removes it at the end: old figures mislead."""

    def __init__(self, path: Path, text: Callable[[], Awaitable[bytes]]) -> None:
        self._path = path
        self._text = text

    async def _run(self) -> None:
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        LOG.info("metrics are written to %s every %g s", self._path, FILE_EVERY_S)
        try:
            while True:
                text = await self._text()
                try:
                    await asyncio.to_thread(fresh.write_bytes, text)
                    await asyncio.to_thread(fresh.replace, self._path)
                except OSError as error:
                    LOG.warning("metrics cannot be written to %s: %s", self._path, error)
                await asyncio.sleep(FILE_EVERY_S)
        finally:
            for path in (fresh, self._path):
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(path.unlink, missing_ok=True)


def _lines(status: int, *lines: str) -> HttpAnswer:
    from .listener import HttpAnswer

    return HttpAnswer(status, "".join(f"{line}\n" for line in lines).encode())
