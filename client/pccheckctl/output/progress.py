"""A progress bar on stderr, where that is a terminal; stdout is for results."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable

from pccheck_wire.basics import Closing
from pccheckctl.output import render

PERIOD_S = 0.2
DELAY_S = 0.5  # shorter work needs no bar
_BAR_COLUMNS = 24


class Bar(Closing):
    """Call `advance`, or give `read`, which returns how far the work is."""

    def __init__(
        self, label: str, total: int, *, show: bool = True,
        read: Callable[[], int] | None = None, unit: str = "",
    ) -> None:  # fmt: skip
        """The numbers count `unit`s; without one they are bytes."""
        self.label = label
        self.total = max(total, 1)
        self._unit = unit
        self._read = read
        self._start = read() if read is not None else 0
        self._done = 0
        self._began = time.monotonic()
        self._drawn = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if show and total > 0 and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()

    def advance(self, by: int) -> None:
        self._done += by

    def spare(self, by: int) -> None:
        """Reduces the total."""
        self.total = max(self.total - by, 1)

    @property
    def done(self) -> int:
        """At most the total: some bytes are read twice."""
        moved = self._done if self._read is None else max(self._done, self._read() - self._start)
        return min(moved, self.total)

    def line(self, elapsed_s: float) -> str:
        share = self.done / self.total
        filled = round(share * _BAR_COLUMNS)
        bar = "#" * filled + "." * (_BAR_COLUMNS - filled)
        if self._unit:
            what = f"{self.done} of {render.plural(self.total, self._unit)}"
        else:
            what = f"{render.size(self.done)} of {render.size(self.total)}"
            if elapsed_s > 0:
                what += f", {render.rate(self.done / elapsed_s)}"
        left = f", {render.duration(elapsed_s / share - elapsed_s)} left" if 0 < share < 1 else ""
        return f"{self.label} [{bar}] {share:4.0%} {what}{left}"

    def close(self) -> None:
        """Removes the bar."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            if self._drawn:
                self._put("")

    def _draw(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if self._stop.wait(DELAY_S):
            return
        while not self._stop.is_set():
            self._drawn = True
            self._put(self.line(time.monotonic() - self._began))
            self._stop.wait(PERIOD_S)

    def _put(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r{text[:width]}\x1b[K")
            sys.stderr.flush()


def bytes_read() -> int:
    """Bytes that this process has read so far; 0 where the kernel does not say."""
    try:
        with open("/proc/self/io") as file:  # noqa: PTH123
            return int(next(line for line in file if line.startswith("rchar:")).split()[1])
    except (OSError, StopIteration, ValueError):
        return 0
