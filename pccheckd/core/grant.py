"""The DRAM of one port: it grows and shrinks in steps, up to what the sessions' shares allow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pccheck_native import _core
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG

from .engine import Engine

#: Memory grows in steps of a segment, so that a session's end does not wait for minutes of page
#: faults; in small steps of a small budget, since only whole segments can be given back.
GROW_STEP_BYTES = 256 << 20
GROW_STEPS = 16  # at least, from nothing to the whole budget
CHUNKS_MIN = 2  # of a tenant: one is filled while one is written
#: A trainer that was asked for a segment and returns none for this long loses its session. Between
#: two checks at most half of it counts: the daemon or the machine may have been stopped.
BACK_LIMIT_S = 60.0
RETRY_S = 0.02


def load_chunks(writers: int) -> int:
    """What a load uses at a time (`lent_max` in pcc_tenant_load.c)."""
    return 2 + 2 * writers


class Grant:
    """Owned by its port."""

    def __init__(self, engine: Engine, uid: int, native: _core.Tenant, chunk_bytes: int) -> None:
        self._engine = engine
        self._uid = uid
        self._native = native
        self._chunk_bytes = chunk_bytes
        self.least_bytes = CHUNKS_MIN * chunk_bytes
        self.nbytes = 0
        #: Without what is being taken back.
        self.lasting_bytes = 0
        #: A process of an earlier session may still write to some of it: that is given back, too.
        self.left = False
        #: It could not shrink below this: the size of its first segment.
        self.floor_bytes = 0
        self._aim_bytes = 0
        self._resizing: asyncio.Task[None] | None = None
        self._stopping = False
        self._loading = False
        self._look_again = asyncio.Event()  # for a resize that waits while a load runs

    @property
    def aim_bytes(self) -> int:
        """What it has, or will have when the present resize has ended."""
        return self._aim_bytes if self._resizing is not None else self.nbytes

    @property
    def resizes(self) -> bool:
        """Whether a resize is under way."""
        return self._resizing is not None

    def adopted(self, nbytes: int) -> None:
        """It has memory of the previous daemon."""
        self.nbytes = self.lasting_bytes = nbytes
        self.left = nbytes > 0  # until the copied checkpoints in it are found
        self.floor_bytes = 0

    def look(self) -> None:
        """Notes whether a process of an earlier session may still write to some of it."""
        try:
            self.left = self._native.usage().left_chunks > 0
        except ValueError:  # closed
            self.left = False

    def loads(self, *, now: bool) -> None:
        """A load begins, or has ended."""
        self._loading = now
        if not now:
            self._look_again.set()

    async def send_segments(self) -> None:
        """Sends the existing segments to a session that has reconnected."""
        await self._engine.call(self._uid, self._native.grow, 0)

    def resize(
        self, aim_bytes: int, changed: Callable[[], None], stuck: Callable[[], None]
    ) -> None:
        """Starts to grow or shrink to `aim_bytes`, as far as possible. `changed` is called after
        every step, `stuck` when the trainer does not return what it was asked for."""
        self._aim_bytes = aim_bytes
        self._look_again.set()
        settled = aim_bytes == self.nbytes == self.lasting_bytes and not self.left
        if self._resizing is None and not settled:
            self._resizing = asyncio.get_running_loop().create_task(self._resize(changed, stuck))

    async def _resize(self, changed: Callable[[], None], stuck: Callable[[], None]) -> None:
        try:
            while await self._step(stuck):
                changed()
        except (OSError, ValueError, _core.NativeError) as error:  # it keeps what it has
            LOG.warning("DRAM not resized: %s", translated(error, "the session").message)
        finally:
            self._resizing = None
            self.look()
            changed()

    async def _step(self, stuck: Callable[[], None]) -> bool:
        """Whether there is more to do."""
        while self._load_comes_first():
            self._look_again.clear()
            await self._look_again.wait()
        before = self.nbytes
        if self._aim_bytes < before or self.lasting_bytes < before or self.left:
            self.left = False  # once in a resize: it may have to wait for saves
            await self._take_back(stuck)
            return self._aim_bytes > self.nbytes
        if self._aim_bytes == before or self._stopping:
            return False
        if before < self.least_bytes:  # does not wait for the page faults of others
            grown = await self._engine.call(self._uid, self._native.grow, self.least_bytes)
        else:
            step = self._engine.pool.usage()[0] // GROW_STEPS // self._chunk_bytes
            step = min(max(step, CHUNKS_MIN) * self._chunk_bytes, GROW_STEP_BYTES)
            step = max(step, self._chunk_bytes)
            grown = await self._engine.grow(self._native.grow, min(self._aim_bytes, before + step))
        self.nbytes = self.lasting_bytes = grown
        return before < grown < self._aim_bytes

    def _load_comes_first(self) -> bool:
        """A load has the chunks that it uses. New pages are cleared, which would take a CPU and
        memory bandwidth from it."""
        grows = self._aim_bytes > self.nbytes == self.lasting_bytes and not self.left
        used = load_chunks(self._engine.config.writers) * self._chunk_bytes
        return self._loading and grows and self.nbytes >= used and not self._stopping

    async def _take_back(self, stuck: Callable[[], None]) -> None:
        """Returns when what was asked for has come back, or the tenant is about to close."""
        looked, waited_s, asked_before = time.monotonic(), 0.0, 0
        while True:
            aim = min(self._aim_bytes, self.lasting_bytes)
            self.nbytes, self.lasting_bytes, asked = await self._engine.drive(
                self._uid, self._native.shrink, aim
            )
            if self.nbytes == self.lasting_bytes and self.nbytes > aim:
                self.floor_bytes = self.nbytes
            if self.nbytes == self.lasting_bytes or self._stopping:
                return
            before, looked = looked, time.monotonic()
            passed_s = min(looked - before, BACK_LIMIT_S / 2)
            waited_s = waited_s + passed_s if asked == asked_before else 0.0
            asked_before = asked
            if asked and waited_s > BACK_LIMIT_S:
                stuck()
                waited_s = 0.0
            await asyncio.sleep(RETRY_S)

    async def stop_resizing(self) -> None:
        """Waits until the present step has ended."""
        self._stopping, self._aim_bytes = True, self.nbytes
        self._look_again.set()
        if self._resizing is not None:
            await asyncio.wait([self._resizing])
        self._stopping = False
