"""Whether this daemon can pull GPU tensors: the CUDA driver, loaded beside everything else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

from pccheck_native import _core

from .exposing import REASON_CHARACTERS_MAX
from .logs import LOG

#: A driver may take seconds to wake up, and a broken one never answers: a trainer that connects
#: waits this long, and pushes its GPU tensors then.
DRIVER_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Offer:
    """How the daemon can take GPU tensors, as `Welcome` says it."""

    transfer: str  # "pull" or "push"
    reason: str


class Driver:
    """Owns the native `Gpus`, when there are any. Only the loop touches it."""

    def __init__(self) -> None:
        self.gpus: _core.Gpus | None = None
        self.offer = Offer("push", "the CUDA driver is still being loaded")
        self._loaded = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        """Loads the driver in a thread of its own, which nobody waits for at the end: what hangs
        in a driver cannot be ended."""
        loop = asyncio.get_running_loop()

        def load() -> None:
            found = _load()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, *found)

        threading.Thread(target=load, name="cuda-load", daemon=True).start()

    async def ready(self) -> _core.Gpus | None:
        """The GPUs to open a channel with; None when tensors have to be pushed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._loaded.wait(), DRIVER_LIMIT_S)
        return self.gpus

    def info(self) -> list[_core.GpuInfo]:
        """The GPUs that trainers have exposed memory of."""
        return self.gpus.info() if self.gpus is not None else []

    def take_away(self) -> _core.Gpus | None:
        """For the end: what is left to close, which may block."""
        self._closed = True
        gpus, self.gpus = self.gpus, None
        return gpus

    def _take(self, gpus: _core.Gpus | None, offer: Offer, line: str) -> None:
        self.offer = offer
        self._loaded.set()
        if self._closed:
            return
        self.gpus = gpus
        LOG.info("%s", line)


def _load() -> tuple[_core.Gpus | None, Offer, str]:
    """Blocks. What there is, what trainers are told, and the line for the log."""
    try:
        missing = _core.cuda_missing()
        if missing:
            return _without(missing)
        number, count = _core.cuda_driver()
        gpus = _core.Gpus()
    except (OSError, _core.NativeError) as error:
        return _without(str(error))
    driver = f"driver {number // 1000}.{number % 1000 // 10}"
    plural = "GPU" if count == 1 else "GPUs"
    return (
        gpus,
        Offer("pull", f"CUDA IPC, {driver}"),
        f"CUDA {driver}, {count} {plural}: GPU tensors are pulled",
    )


def _without(reason: str) -> tuple[None, Offer, str]:
    said = f"no CUDA driver here: {reason}"[:REASON_CHARACTERS_MAX]
    line = f"no CUDA driver ({reason}): CPU tensors only, GPU tensors are pushed"
    return None, Offer("push", said), line
