"""A native channel with its session: attached, detached, loaded through, closed, in that order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass

from pccheck_native import _core

from .engine import Engine, translated
from .logs import LOG

#: A detach drains what is in the ring; the disk is not waited for.
DETACH_LIMIT_S = 60.0
#: A hang-up may be on its way while somebody else comes; looked for every STEP_S.
GRACE_S = 1.0
STEP_S = 0.02
#: Memory is taken in steps of a segment, so that an end does not wait for minutes of page faults.
GROW_STEP_BYTES = 256 << 20
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Owner:
    """The live trainer of a channel: its session and what its Hello said."""

    session: int
    pid: int
    incarnation: int
    world_size: int  # 1 for a job that saves on rank 0 only
    local_world_size: int
    fresh: bool
    on_event: Callable[[_core.Event], None]  # load_ended, bad_peer
    #: As the kernel names it in our own PID namespace; 0 = it is in none of ours.
    kernel_pid: int = 0


class Port:
    """Owns one channel. Its events reach `listener` on the loop, except DETACHED."""

    def __init__(
        self,
        engine: Engine,
        uid: int,
        listener: Callable[[_core.Event], None],
        *,
        chunk_bytes: int,
        block_bytes: int,
        chunk_capacity: int,
        lanes: int,
        writers: int,
        gpus: _core.Gpus | None = None,
        label: str = "",
    ) -> None:
        self._engine = engine
        self._uid = uid
        self._listener = listener
        self.chunk_bytes = chunk_bytes
        self.block_bytes = block_bytes
        self.number, self.channel = engine.open_channel(
            self._hear, chunk_bytes=chunk_bytes, block_bytes=block_bytes,
            chunk_capacity=chunk_capacity, lanes=lanes, writers=writers, gpus=gpus,
            label=label,
        )  # fmt: skip
        self.pulls = gpus is not None
        self.attached = False
        self.granted_bytes = 0
        self._drained = asyncio.Event()
        self._wanted_bytes = 0
        self._growth: asyncio.Task[None] | None = None

    async def attach(self, socket_fd: int, session: int, kernel_pid: int = 0) -> int:
        """The session page's descriptor, the caller's to send and close."""
        deadline = time.monotonic() + DETACH_LIMIT_S
        while True:
            try:
                page_fd = await self._engine.call(
                    self._uid, self.channel.attach, socket_fd, session, kernel_pid
                )
                break
            except OSError as error:  # the one before is still being drained
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise translated(error, "the session page") from error
                await asyncio.sleep(_RETRY_S)
        self.attached = True
        self._drained.clear()
        return page_fd

    async def detach(self) -> None:
        """Returns when every copy of the session is judged and its events were delivered."""
        if not self.attached:
            return
        await self._engine.drive(self._uid, self.channel.detach)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), DETACH_LIMIT_S)
        self.attached = False

    def usage(self) -> _core.ChannelUsage | None:
        """What its memory is used for; None once it is closed. Never blocks for long."""
        with contextlib.suppress(ValueError):
            return self.channel.usage()
        return None

    async def expose(self, number: int, exposure: bytes) -> str:
        """Takes over the GPU memory that the trainer shares; "" or why the daemon cannot pull."""
        try:
            return await self._engine.drive(self._uid, self.channel.expose, number, exposure)
        except (OSError, _core.NativeError) as error:
            raise translated(error, "the GPU memory") from error

    async def grow(self, wanted_bytes: int, *, least_bytes: int) -> int:
        """Returns once the channel has `least_bytes` of DRAM, or all that is to be had; more, up to
        `wanted_bytes`, follows in the background: touching new pages is slow."""
        if self.granted_bytes < least_bytes:
            try:
                self.granted_bytes = await self._engine.call(
                    self._uid, self.channel.grow, least_bytes
                )
            except (OSError, _core.NativeError) as error:
                raise translated(error, "the session") from error
        else:  # a session that has come back is sent its segments
            await self._engine.call(self._uid, self.channel.grow, 0)
        self._wanted_bytes = max(wanted_bytes, least_bytes)
        if self._growth is None and self.granted_bytes < self._wanted_bytes:
            self._growth = asyncio.get_running_loop().create_task(self._grow_on())
        return self.granted_bytes

    async def _grow_on(self) -> None:
        try:
            while self.granted_bytes < self._wanted_bytes:
                step = min(self._wanted_bytes, self.granted_bytes + GROW_STEP_BYTES)
                granted = await self._engine.grow(self.channel.grow, step)
                if granted <= self.granted_bytes:
                    return  # the budget is used up
                self.granted_bytes = granted
        except (OSError, _core.NativeError) as error:  # it goes on with what it has
            LOG.warning("no more memory: %s", translated(error, "the session").message)
        finally:
            self._growth = None

    async def _stop_growing(self) -> None:
        self._wanted_bytes = 0
        if self._growth is not None:
            await asyncio.wait([self._growth])

    async def release_memory(self) -> bool:
        """Gives the segments back when detached and idle; whether it did."""
        await self._stop_growing()
        try:
            await self._engine.call(self._uid, self.channel.release_memory)
        except OSError:
            return False
        self.granted_bytes = 0
        return True

    async def load(
        self, volume: _core.Volume, sequence: int, offset: int, length: int, load: int
    ) -> None:
        try:
            await self._engine.call(
                self._uid, self.channel.load, volume, sequence, offset, length, load
            )
        except (OSError, _core.NativeError) as error:
            raise translated(error, f"checkpoint {sequence}") from error

    async def unbind(self, volume: _core.Volume, limit_s: float) -> bool:
        """Whether the channel let go of the volume; False when saves on it outlast the limit."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                await self._engine.call(self._uid, self.channel.unbind, volume)
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < deadline:
                    await asyncio.sleep(_RETRY_S)
                    continue
                if error.errno == errno.EBUSY:
                    return False
                if error.errno != errno.ENOENT:
                    raise
            return True

    async def close(self) -> None:
        """Drains sealed saves; the memory goes back to the pool."""
        await self._stop_growing()
        await self._engine.drive(self._uid, self.channel.close)
        self._engine.forget_channel(self.number)

    def _hear(self, event: _core.Event) -> None:
        if event.kind == "detached":
            self._drained.set()
        self._listener(event)
