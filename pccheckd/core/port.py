"""A native channel with its session: attached, detached, loaded through, closed, in that order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass

from pccheck_native import _core
from pccheck_wire.errors import DeviceError, RefusedError
from pccheckd.base.logs import LOG

from .engine import Engine, translated
from .exposing import PUSHED

#: A detach drains what is in the ring; the disk is not waited for.
DETACH_LIMIT_S = 60.0
#: A hang-up may be on its way while somebody else comes; looked for every STEP_S.
GRACE_S = 1.0
STEP_S = 0.02
#: Memory is taken in steps of a segment, so that an end does not wait for minutes of page faults;
#: and in small ones of a small budget: what is given back is whole segments.
GROW_STEP_BYTES = 256 << 20
GROW_STEPS = 16  # that the budget is at least cut into
CHUNKS_MIN = 2  # of a channel: one is filled while one is written
#: A trainer that was asked for a segment and returns none for so long loses his session. Between
#: two looks half of it passes at most: while we are stopped, or the machine is, he may be, too.
BACK_LIMIT_S = 60.0
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Owner:
    """The live trainer of a channel: its session and what its Hello said."""

    session: int
    pid: int
    world_size: int  # 1 for a job that saves on rank 0 only
    local_world_size: int
    fresh: bool
    process: bytes  # random, of its own; its reconnects say the same
    solo: bool
    restored: int | None  # what its state was restored from; 0: from nothing; None: not yet
    on_event: Callable[[_core.Event], None]  # load_ended, bad_peer
    #: As the kernel names it in our own PID namespace; 0 = it is in none of ours.
    kernel_pid: int = 0


class Port:
    """Owns one channel. Its events reach `listener` on the loop, except DETACHED."""

    number: int
    channel: _core.Channel

    def __init__(
        self,
        engine: Engine,
        uid: int,
        listener: Callable[[_core.Event], None],
        *,
        chunk_bytes: int,
        block_bytes: int,
        pulls: bool = False,
    ) -> None:
        """Without its channel: see `opened`."""
        self._engine = engine
        self._uid = uid
        self._listener = listener
        self.chunk_bytes = chunk_bytes
        self.block_bytes = block_bytes
        self.pulls = pulls
        self.attached = False
        self.granted_bytes = 0
        #: Without what is being taken back.
        self.lasting_bytes = 0
        #: Some of it a process of a session before may still write to: that is given back, too.
        self.left = False
        #: It could not be brought below that: its first segment is so large.
        self.floor_bytes = 0
        self._drained = asyncio.Event()
        self._aim_bytes = 0
        self._resizing: asyncio.Task[None] | None = None
        self._stopping = False

    @classmethod
    async def opened(
        cls,
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
    ) -> Port:
        port = cls(
            engine, uid, listener, chunk_bytes=chunk_bytes, block_bytes=block_bytes,
            pulls=gpus is not None,
        )  # fmt: skip
        port.number, port.channel = await engine.open_channel(
            uid, port._hear, chunk_bytes=chunk_bytes, block_bytes=block_bytes,
            chunk_capacity=chunk_capacity, lanes=lanes, writers=writers, gpus=gpus, label=label,
        )  # fmt: skip
        return port

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
        self._look()

    def usage(self) -> _core.ChannelUsage | None:
        """What its memory is used for; None once it is closed. Never blocks for long."""
        with contextlib.suppress(ValueError):
            return self.channel.usage()
        return None

    def _look(self) -> None:
        usage = self.usage()
        self.left = usage is not None and usage.left_chunks > 0

    async def expose(self, number: int, exposure: bytes) -> str:
        """Takes over the GPU memory that the trainer shares; "" or why the daemon cannot pull.
        Raises DeviceError when memory is short: the trainer may have some to give back."""
        try:
            return await self._engine.drive(self._uid, self.channel.expose, number, exposure)
        except MemoryError as error:
            raise DeviceError(str(error), hint=PUSHED, retryable=True) from error
        except (OSError, _core.NativeError) as error:
            raise translated(error, "the GPU memory") from error

    async def rest(self, after_s: float) -> None:
        """Unpins its memory when nothing of a GPU was mapped for so long."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            await self._engine.drive(self._uid, self.channel.rest, after_s)

    # -- its memory ----------------------------------------------------------------------------

    @property
    def least_bytes(self) -> int:
        return CHUNKS_MIN * self.chunk_bytes

    @property
    def aim_bytes(self) -> int:
        """What it has, or will have when what goes on now is over."""
        return self._aim_bytes if self._resizing is not None else self.granted_bytes

    def adopted(self, nbytes: int) -> None:
        """It has memory of a daemon before."""
        self.granted_bytes = self.lasting_bytes = nbytes
        self.left = nbytes > 0  # until what was copied there is found
        self.floor_bytes = 0

    async def send_segments(self) -> None:
        """A session that has come back is sent what there is."""
        await self._engine.call(self._uid, self.channel.grow, 0)

    def resize(
        self, aim_bytes: int, changed: Callable[[], None], stuck: Callable[[], None]
    ) -> None:
        """Begins to take memory, or to take it back, until it has `aim_bytes` or what is to be had;
        `changed` is called after every step, `stuck` when the trainer does not give back what he
        was asked for."""
        self._aim_bytes = aim_bytes
        settled = aim_bytes == self.granted_bytes == self.lasting_bytes and not self.left
        if self._resizing is None and not settled:
            self._resizing = asyncio.get_running_loop().create_task(self._resize(changed, stuck))

    async def _resize(self, changed: Callable[[], None], stuck: Callable[[], None]) -> None:
        try:
            while await self._step(stuck):
                changed()
        except (OSError, ValueError, _core.NativeError) as error:  # it goes on with what it has
            LOG.warning("memory stays as it is: %s", translated(error, "the session").message)
        finally:
            self._resizing = None
            self._look()
            changed()

    async def _step(self, stuck: Callable[[], None]) -> bool:
        """Whether there is more to do."""
        before = self.granted_bytes
        if self._aim_bytes < before or self.lasting_bytes < before or self.left:
            self.left = False  # once in a resize: it may have to wait for saves
            await self._take_back(stuck)
            return self._aim_bytes > self.granted_bytes
        if self._aim_bytes == before or self._stopping:
            return False
        if before < self.least_bytes:  # nobody waits for the page faults of others
            grown = await self._engine.call(self._uid, self.channel.grow, self.least_bytes)
        else:
            step = self._engine.pool.usage()[0] // GROW_STEPS // self.chunk_bytes
            step = min(max(step, CHUNKS_MIN) * self.chunk_bytes, GROW_STEP_BYTES)
            step = max(step, self.chunk_bytes)
            grown = await self._engine.grow(self.channel.grow, min(self._aim_bytes, before + step))
        self.granted_bytes = self.lasting_bytes = grown
        return before < grown < self._aim_bytes

    async def _take_back(self, stuck: Callable[[], None]) -> None:
        """Until what was asked for is there; stops only when the channel is to be closed."""
        looked, waited_s, asked_before = time.monotonic(), 0.0, 0
        while True:
            aim = min(self._aim_bytes, self.lasting_bytes)
            self.granted_bytes, self.lasting_bytes, asked = await self._engine.drive(
                self._uid, self.channel.shrink, aim
            )
            if self.granted_bytes == self.lasting_bytes and self.granted_bytes > aim:
                self.floor_bytes = self.granted_bytes
            if self.granted_bytes == self.lasting_bytes or self._stopping:
                return
            before, looked = looked, time.monotonic()
            passed_s = min(looked - before, BACK_LIMIT_S / 2)
            waited_s = waited_s + passed_s if asked == asked_before else 0.0
            asked_before = asked
            if asked and waited_s > BACK_LIMIT_S:
                stuck()
                waited_s = 0.0
            await asyncio.sleep(_RETRY_S)

    async def _stop_resizing(self) -> None:
        self._stopping, self._aim_bytes = True, self.granted_bytes
        if self._resizing is not None:
            await asyncio.wait([self._resizing])
        self._stopping = False

    async def release_memory(self) -> bool:
        """Gives the segments back when detached and idle; whether it did."""
        await self._stop_resizing()
        try:
            await self._engine.call(self._uid, self.channel.release_memory)
        except OSError:
            return False
        self.adopted(0)
        return True

    async def load(
        self,
        volume: _core.Volume,
        sequence: int,
        offset: int,
        length: int,
        load: int,
        *,
        own: bool = True,
    ) -> None:
        """`own`: of the rank that saves through this channel."""
        try:
            await self._engine.call(
                self._uid, self.channel.load, volume, sequence, offset, length, load, own
            )
        except ValueError as error:  # a volume that could not be opened again after an error
            raise RefusedError(
                f"checkpoint {sequence}: its volume could not be read again after an I/O error",
                hint="check the disk and the kernel's log",
                retryable=True,
            ) from error
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
        await self._stop_resizing()
        await self._engine.drive(self._uid, self.channel.close)
        self._engine.forget_channel(self.number)

    def _hear(self, event: _core.Event) -> None:
        if event.kind == "detached":
            self._drained.set()
        self._listener(event)
