"""Which storage engine volumes are opened with: the one that --engine names, or, with `auto`, the
fastest one in the storage directory, as measured once, right after READY and before any volume is
opened for writing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import threading
from collections.abc import Callable

from pccheck_native import _core
from pccheck_wire.units import MIB
from pccheckd.base.logs import LOG
from pccheckd.config.options import Config

AUTO, PWRITE, URING, MMAP, PMEM = "auto", "pwrite", "uring", "mmap", "pmem"

#: A trainer that connects while we measure waits this long, and its volume is then written by
#: pwrite, as are all others: what a busy disk would have said later is no measure of anything.
MEASURE_LIMIT_S = 1.5
#: `uring` opens up to eight rings per volume, and running out of descriptors ends the process.
RINGS_FILES_MIN = 4096
#: Why the core took pwrite although another engine was wanted.
_REFUSED = {
    URING: "the kernel or the container does not allow io_uring",
    MMAP: "the volume cannot be mapped",
    PMEM: "no persistent memory with a DAX file system here",
}

Measure = Callable[..., _core.EngineChoice]


class IoEngine:
    """Only the loop touches it."""

    def __init__(self, config: Config, *, measure: Measure = _core.choose_engine) -> None:
        self.choice: _core.EngineChoice | None = None
        self._config = config
        self._measure = measure
        self._chosen = PWRITE if config.engine == AUTO else config.engine
        self._why = ""
        self._running = ""  # what the last volume got
        self._decided: asyncio.Event | None = None  # there is one while it matters
        if config.engine == URING and (few := _few_files()):
            self._decide(PWRITE, f"uring: {few}")

    def start(self, *, busy: bool = False) -> None:
        """With `auto`, measures in a thread of its own, which nobody waits for at the end: a disk
        that hangs cannot be interrupted. `busy`: checkpoints are being written already."""
        config = self._config
        if config.engine != AUTO:
            return
        if config.max_bandwidth_bytes:
            self._decide(PWRITE, "auto: not measured, because of --max-bandwidth")
            return
        if busy:
            self._decide(PWRITE, "auto: not measured beside what the pccheckd before had copied")
            return
        loop = asyncio.get_running_loop()
        self._decided = asyncio.Event()
        self._why = "auto: being measured"

        def measure() -> None:
            found: _core.EngineChoice | Exception
            try:
                found = self._measure(config.storage, allow_buffered=config.allow_any_filesystem)
            except Exception as error:  # whatever it is: pwrite, and the reason is kept
                found = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, found)

        threading.Thread(target=measure, name="measure", daemon=True).start()

    async def chosen(self) -> str:
        """For a volume about to be opened for writing; waits for the measurement, not for long."""
        if self._decided is not None and not self._decided.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._decided.wait(), MEASURE_LIMIT_S)
            if not self._decided.is_set():
                self._decide(PWRITE, f"auto: not measured within {MEASURE_LIMIT_S:g} s")
        return self._chosen

    def opened(self, running: str) -> None:
        """A volume was opened for writing, and this is what it got."""
        if running != self._chosen and running != self._running:
            LOG.warning(
                "engine %s instead of %s: %s", running, self._chosen, _REFUSED.get(self._chosen, "")
            )
        self._running = running

    @property
    def running(self) -> str:
        return self._running or self._chosen

    @property
    def reason(self) -> str:
        """Why it is that one; "" when it is what was asked for."""
        if self.running == self._chosen:
            return self._why
        refused = f"{self._chosen}: {_REFUSED.get(self._chosen, '')}"
        return f"{self._why}; {refused}" if self._why else refused

    def document(self) -> dict[str, object]:
        """For status."""
        return {
            "engine": self.running,
            "engine_wanted": self._config.engine,
            "engine_reason": self.reason,
            "engine_measured": None if self.choice is None else self.choice._asdict(),
        }

    def _take(self, found: _core.EngineChoice | Exception) -> None:
        if self._decided is None or self._decided.is_set():
            return  # too late
        if isinstance(found, Exception):
            self._decide(PWRITE, f"auto: not measured: {_told(found)}")
            return
        self.choice = found
        why = f"auto: {_figures(found)}"
        if found.engine == URING and (few := _few_files()):
            self._decide(PWRITE, f"{why}; uring: {few}")
        else:
            self._decide(found.engine, why)

    def _decide(self, engine: str, why: str) -> None:
        self._chosen, self._why = engine, why
        if self._decided is not None:
            self._decided.set()
        LOG.info("engine %s (%s)", engine, why)


def _figures(choice: _core.EngineChoice) -> str:
    """`pwrite 3.5, uring 3.5 GB/s, 9 rounds of 64 MiB`, and who could not take part."""
    speeds = [
        f"{name} {value / 1e9:.1f}"
        for name, value in choice.measured.items()
        if isinstance(value, int)
    ]
    rounds = f"{choice.rounds} rounds of {choice.round_bytes // MIB} MiB"
    told = [f"{', '.join(speeds)} GB/s, {rounds}"]
    for name, value in choice.measured.items():
        if isinstance(value, str) and not (name == PMEM and value == "UNSUPPORTED"):
            told.append(f"{name}: {_REFUSED[name] if value == 'UNSUPPORTED' else value}")
    return "; ".join(told)


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "64 MiB of room are needed for a moment"
    return str(error)


def _few_files() -> str:
    """Why there are too few descriptors for rings; "" when there are enough."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= RINGS_FILES_MIN:
        return ""
    return f"only {limit} files may be open; it needs {RINGS_FILES_MIN} (ulimit -n)"
