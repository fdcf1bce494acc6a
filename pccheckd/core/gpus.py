"""Whether this daemon can pull GPU tensors: the CUDA driver, loaded in the background.

The driver is first tried in separate processes, repeatedly while it fails: cuInit fails until the
driver's modules and devices exist, and a process in which it has failed gets no other answer later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time

from pccheck_native import _core
from pccheck_native.transfer import DriverState
from pccheck_wire.basics import plural
from pccheckd.base.background import happened
from pccheckd.base.logs import LOG

from .exposing import REASON_CHARACTERS_MAX

#: A driver may take seconds to start, and a broken one never answers: trainers that connect within
#: this time after the daemon's start wait for it. Later ones push, and ask again later.
DRIVER_LIMIT_S = 5.0
#: Between two tries of a driver that fails; it doubles from the first to the second.
RETRY_S, RETRY_MAX_S = 1.0, 300.0
#: The file that every installed driver has.
LIBRARY = "libcuda.so.1"
_TRIED = "from pccheck_native import _core; print(_core.cuda_missing(), end='')"


_LOADING = DriverState(missing="the CUDA driver is still being loaded", may_pass=True)
_SILENT = DriverState(missing="the CUDA driver does not answer", may_pass=True)


class Driver:
    """Owns the native `Gpus`, when there may be any. Only the loop touches it."""

    def __init__(self) -> None:
        self.gpus: _core.Gpus | None = None
        self.state = _LOADING
        self._tried = asyncio.Event()
        self._closed = threading.Event()
        self._until_s = 0.0  # time.monotonic; until then trainers wait for the driver

    def start(self) -> None:
        """Loads the driver in a separate thread. The daemon's end does not wait for the thread,
        since it may hang in the driver."""
        loop = asyncio.get_running_loop()
        self._until_s = time.monotonic() + DRIVER_LIMIT_S
        # Otherwise an unused context keeps the GPU at full clocks (drivers from 580 on).
        os.environ.setdefault("CUDA_DISABLE_PERF_BOOST", "1")
        installed = _installed()
        if installed:
            self.gpus = _core.Gpus()

        def load() -> None:
            pause_s = RETRY_S
            while True:
                state, line = _load(installed)
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._take, state, line)
                if not state.may_pass or self._closed.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, RETRY_MAX_S)

        threading.Thread(target=load, name="cuda-load", daemon=True).start()

    async def ready(self) -> _core.Gpus | None:
        """The GPUs to open a tenant with; None when tensors are always pushed. Waits until the
        driver has answered once, but only soon after the start."""
        left_s = self._until_s - time.monotonic()
        if not self._tried.is_set() and left_s > 0:
            await happened(self._tried, left_s)
        if not self._tried.is_set() and self.state != _SILENT:
            self.state = _SILENT
            LOG.warning("the CUDA driver does not answer: GPU tensors are pushed until it does")
        return self.gpus

    def info(self) -> list[_core.GpuInfo]:
        """The GPUs that trainers have exposed memory of."""
        return self.gpus.info() if self.gpus is not None else []

    def take_away(self) -> _core.Gpus | None:
        """For the end: what is left to close; closing may block."""
        self._closed.set()
        gpus, self.gpus = self.gpus, None
        return gpus

    def _take(self, state: DriverState, line: str) -> None:
        news = state != self.state
        self.state = state
        self._tried.set()
        if news and not self._closed.is_set():
            LOG.info("%s", line)


def _installed() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def _load(installed: bool) -> tuple[DriverState, str]:
    """Blocks. The driver, and the line for the log."""
    try:
        if installed and (missing := _missing_elsewhere()):
            return _without(missing, may_pass=True)
        if missing := _core.cuda_missing():
            return _without(missing)
        number, count = _core.cuda_driver()
    except (OSError, _core.NativeError) as error:
        return _without(str(error))
    driver = f"driver {number // 1000}.{number % 1000 // 10}"
    line = f"CUDA {driver}, {plural(count, 'GPU')}: GPU tensors are pulled"
    return DriverState(driver), line


def _missing_elsewhere() -> str:
    """What a separate process finds missing; "" when the driver works there."""
    tried = subprocess.run(
        [sys.executable, "-P", "-c", _TRIED], check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    if tried.returncode:
        return f"a test process ended with {tried.returncode}"
    return tried.stdout.decode(errors="replace")


def _without(reason: str, *, may_pass: bool = False) -> tuple[DriverState, str]:
    short = f"no CUDA driver here: {reason}"[:REASON_CHARACTERS_MAX]
    line = f"no CUDA driver ({reason}): CPU tensors only, GPU tensors are pushed"
    state = DriverState(missing=short, may_pass=may_pass)
    return state, line + (" until it works" if may_pass else "")
