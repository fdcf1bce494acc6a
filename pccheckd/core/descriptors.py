"""Descriptors of GPU memory that a trainer sends over its attach socket, ahead of an exposure."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import resource
import socket
import struct

from pccheck_native import _core
from pccheck_native.transfer import PUSHED
from pccheck_wire.errors import RefusedError, UsageError
from pccheck_wire.messages import Lend

#: The exposure may arrive first, because it comes over another channel. Its descriptors were sent
#: before it, so they arrive within this time.
ARRIVAL_LIMIT_S = 5.0


def held_max() -> int:
    """How many descriptors of a user may wait for their exposures: a quarter of what this process
    may have open, at most."""
    return min(_core.EXPOSED_PIECES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class Lot:
    """Descriptors with one owner at a time, which closes them. Any thread."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, other: Lot) -> None:
        self._open += other.take()

    def put(self, descriptors: list[int]) -> None:
        self._open += descriptors

    def take(self) -> list[int]:
        taken, self._open = self._open, []
        return taken

    def packed(self) -> bytes:
        """As the core takes them; they stay here."""
        return array.array("i", self._open).tobytes()

    def close(self) -> None:
        for descriptor in self.take():
            with contextlib.suppress(OSError):  # it is not a socket
                _close_at_once(descriptor)
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _close_at_once(descriptor: int) -> None:
    """Else the closing of a socket that lingers waits until its bytes are read."""
    one = socket.socket(fileno=descriptor)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    finally:
        one.detach()


class Descriptors:
    """Those of one session. A new exposure closes what is left of the one before."""

    def __init__(self) -> None:
        self.packet = Lot()  #: what came with the packet that is being handled
        self._map = 0
        self._held = Lot()
        self._refusal = ""
        self._came = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def receive(self, body: Lend, *, room: int) -> None:
        """Keeps what came with `body`. Raises UsageError, RefusedError; then the exposure is
        refused, too."""
        if body.map < self._map:
            raise UsageError(f"$.body.map must not fall (got {body.map} after {self._map})")
        if body.map > self._map:
            self._begin(body.map)
        came = len(self.packet)
        self._came.set()
        if came != body.count or not came:
            self._refuse(f"{body.count} descriptors of GPU memory were sent, and {came} came")
            raise UsageError(self._refusal)
        if len(self._held) + came > room:
            self._refuse("too many descriptors of GPU memory of this user wait for an exposure")
            raise RefusedError(self._refusal, hint=PUSHED, retryable=True)
        if not self._refusal:
            self._held.add(self.packet)

    async def collect(self, number: int, count: int) -> Lot:
        """All that belong to this exposure, the caller's to close. Raises RefusedError."""
        if number > self._map:
            self._begin(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_LIMIT_S):
                while self._map == number and len(self._held) < count and not self._refusal:
                    self._came.clear()
                    await self._came.wait()
        lot, why = Lot(), ""
        if self._map == number:
            lot.add(self._held)
            why = self._refusal
        if not why and len(lot) != count:
            why = f"{len(lot)} descriptors of GPU memory came, not {count}"
        if why:
            lot.close()
            raise RefusedError(why, hint=PUSHED, retryable=True)
        return lot

    def close(self) -> None:
        self.packet.close()
        self._held.close()

    def _begin(self, number: int) -> None:
        self._held.close()
        self._map, self._refusal = number, ""

    def _refuse(self, why: str) -> None:
        self._held.close()
        self._refusal = why
