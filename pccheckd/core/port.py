"""A native tenant with its session: attached, detached, loaded through, closed, in that order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from pccheck_native import _core
from pccheck_native.transfer import PUSHED
from pccheck_wire.ends import CHECK_DISK
from pccheck_wire.errors import CheckpointFailedError, DeviceError, RefusedError
from pccheckd.base.background import happened
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG

from .engine import Engine, PortShape

#: A detach drains what is in the ring; the disk is not waited for.
DETACH_LIMIT_S = 60.0
#: The disconnect of a previous trainer may not be noticed yet; checked every STEP_S.
GRACE_S = 1.0
STEP_S = 0.02
#: Memory grows in steps of a segment, so that a session's end does not wait for minutes of page
#: faults; in small steps of a small budget, since only whole segments can be given back.
GROW_STEP_BYTES = 256 << 20
GROW_STEPS = 16  # at least, from nothing to the whole budget
CHUNKS_MIN = 2  # of a tenant: one is filled while one is written
#: A trainer that was asked for a segment and returns none for this long loses its session. Between
#: two checks at most half of it counts: the daemon or the machine may have been stopped.
BACK_LIMIT_S = 60.0
_RETRY_S = 0.02

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Owner:
    """The live trainer of a tenant: its session and what its Hello said."""

    session: int
    pid: int
    world_size: int  # 1 for a job that saves on rank 0 only
    local_world_size: int
    fresh: bool
    process: bytes  # its random identity, which its reconnects repeat
    solo: bool
    restored: int | None  # the sequence it restored; 0: there was none; None: not yet
    on_event: Callable[[_core.Event], None]  # load_ended, bad_peer
    #: As the kernel names it in the daemon's PID namespace; 0 = it is in another one.
    kernel_pid: int = 0


def load_chunks(writers: int) -> int:
    """What a load uses at a time (`lent_max` in pcc_tenant_load.c)."""
    return 2 + 2 * writers


class Port:
    """Owns one tenant. Its events reach `listener` on the loop, except DETACHED."""

    number: int
    native: _core.Tenant

    def __init__(
        self, engine: Engine, uid: int, listener: Callable[[_core.Event], None], chunk_bytes: int
    ) -> None:
        """Without its tenant: see `opened`."""
        self._engine = engine
        self._uid = uid
        self._listener = listener
        self.chunk_bytes = chunk_bytes
        self.attached = False
        self.granted_bytes = 0
        #: Without what is being taken back.
        self.lasting_bytes = 0
        #: A process of an earlier session may still write to some of it: that is given back, too.
        self.left = False
        #: It could not shrink below this: the size of its first segment.
        self.floor_bytes = 0
        self._drained = asyncio.Event()
        self._aim_bytes = 0
        self._resizing: asyncio.Task[None] | None = None
        self._stopping = False
        self._loading = False
        self._look_again = asyncio.Event()  # for a resize that waits while a load runs

    @classmethod
    async def opened(
        cls, engine: Engine, uid: int, listener: Callable[[_core.Event], None], shape: PortShape
    ) -> Port:
        port = cls(engine, uid, listener, shape.chunk_bytes)
        port.number, port.native = await engine.open_native(uid, port._on_event, shape)
        return port

    async def attach(self, socket_fd: int, session: int, kernel_pid: int = 0) -> int:
        """The session page's descriptor, the caller's to send and close."""
        try:  # busy while the previous session is being drained
            page_fd = await self._unless_busy(
                DETACH_LIMIT_S, self.native.attach, socket_fd, session, kernel_pid
            )
        except OSError as error:
            raise translated(error, "the session page") from error
        self.attached = True
        self._drained.clear()
        return page_fd

    async def detach(self) -> None:
        """Returns when every copy of the session is complete or aborted. The event that ends an
        aborted one may come later, when its writes are done."""
        if not self.attached:
            return
        await self._engine.drive(self._uid, self.native.detach)
        await happened(self._drained, DETACH_LIMIT_S)
        self.attached = False
        self._look()

    def usage(self) -> _core.TenantUsage | None:
        """What its memory is used for; None once it is closed. Never blocks for long."""
        with contextlib.suppress(ValueError):
            return self.native.usage()
        return None

    def _look(self) -> None:
        usage = self.usage()
        self.left = usage is not None and usage.left_chunks > 0

    async def expose(self, number: int, exposure: bytes) -> str:
        """Maps the GPU memory that the trainer shares; "" or why the daemon cannot pull. Raises
        DeviceError when GPU memory is short: the trainer may have some to release."""
        try:
            return await self._engine.drive(self._uid, self.native.expose, number, exposure)
        except MemoryError as error:
            raise DeviceError(str(error), hint=PUSHED, retryable=True) from error
        except (OSError, _core.NativeError) as error:
            raise translated(error, "the GPU memory") from error

    async def rest(self, after_s: float) -> None:
        """Unpins its memory when no GPU memory was mapped for this long."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            await self._engine.drive(self._uid, self.native.rest, after_s)

    # -- its memory ----------------------------------------------------------------------------

    @property
    def least_bytes(self) -> int:
        return CHUNKS_MIN * self.chunk_bytes

    @property
    def aim_bytes(self) -> int:
        """What it has, or will have when the present resize has ended."""
        return self._aim_bytes if self._resizing is not None else self.granted_bytes

    @property
    def resizes(self) -> bool:
        """Whether a resize is under way."""
        return self._resizing is not None

    def adopted(self, nbytes: int) -> None:
        """It has memory of the previous daemon."""
        self.granted_bytes = self.lasting_bytes = nbytes
        self.left = nbytes > 0  # until the copied checkpoints in it are found
        self.floor_bytes = 0

    async def send_segments(self) -> None:
        """Sends the existing segments to a session that has reconnected."""
        await self._engine.call(self._uid, self.native.grow, 0)

    def resize(
        self, aim_bytes: int, changed: Callable[[], None], stuck: Callable[[], None]
    ) -> None:
        """Starts to grow or shrink to `aim_bytes`, as far as possible. `changed` is called after
        every step, `stuck` when the trainer does not return what it was asked for."""
        self._aim_bytes = aim_bytes
        self._look_again.set()
        settled = aim_bytes == self.granted_bytes == self.lasting_bytes and not self.left
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
            self._look()
            changed()

    async def _step(self, stuck: Callable[[], None]) -> bool:
        """Whether there is more to do."""
        while self._load_comes_first():
            self._look_again.clear()
            await self._look_again.wait()
        before = self.granted_bytes
        if self._aim_bytes < before or self.lasting_bytes < before or self.left:
            self.left = False  # once in a resize: it may have to wait for saves
            await self._take_back(stuck)
            return self._aim_bytes > self.granted_bytes
        if self._aim_bytes == before or self._stopping:
            return False
        if before < self.least_bytes:  # does not wait for the page faults of others
            grown = await self._engine.call(self._uid, self.native.grow, self.least_bytes)
        else:
            step = self._engine.pool.usage()[0] // GROW_STEPS // self.chunk_bytes
            step = min(max(step, CHUNKS_MIN) * self.chunk_bytes, GROW_STEP_BYTES)
            step = max(step, self.chunk_bytes)
            grown = await self._engine.grow(self.native.grow, min(self._aim_bytes, before + step))
        self.granted_bytes = self.lasting_bytes = grown
        return before < grown < self._aim_bytes

    def _load_comes_first(self) -> bool:
        """A load has the chunks that it uses. New pages are cleared, which would take a CPU and
        memory bandwidth from it."""
        grows = self._aim_bytes > self.granted_bytes == self.lasting_bytes and not self.left
        used = load_chunks(self._engine.config.writers) * self.chunk_bytes
        return self._loading and grows and self.granted_bytes >= used and not self._stopping

    async def _take_back(self, stuck: Callable[[], None]) -> None:
        """Returns when what was asked for has come back, or the tenant is about to close."""
        looked, waited_s, asked_before = time.monotonic(), 0.0, 0
        while True:
            aim = min(self._aim_bytes, self.lasting_bytes)
            self.granted_bytes, self.lasting_bytes, asked = await self._engine.drive(
                self._uid, self.native.shrink, aim
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
        self._look_again.set()
        if self._resizing is not None:
            await asyncio.wait([self._resizing])
        self._stopping = False

    async def release_memory(self) -> bool:
        """Gives the segments back when detached and idle; whether it did."""
        await self._stop_resizing()
        try:
            await self._engine.call(self._uid, self.native.release_memory)
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
        """`own`: of the rank that saves through this tenant."""
        self._loading, started = True, False
        try:
            await self._engine.call(
                self._uid, self.native.load, volume, sequence, offset, length, load, own
            )
            started = True
        except ValueError as error:  # a volume that could not be opened again after an error
            raise RefusedError(
                f"checkpoint {sequence}: its volume could not be reopened after an I/O error",
                hint=CHECK_DISK,
                retryable=True,
            ) from error
        except (OSError, _core.NativeError) as error:
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                raise CheckpointFailedError(
                    "an earlier read of this process has not ended yet",
                    hint="try again",
                    retryable=True,
                ) from error
            raise translated(error, f"checkpoint {sequence}") from error
        finally:
            if not started:
                self._load_over()

    def _load_over(self) -> None:
        self._loading = False
        self._look_again.set()

    async def unbind(self, volume: _core.Volume, limit_s: float) -> bool:
        """Whether the tenant released the volume; False when saves on it outlast the limit."""
        try:
            await self._unless_busy(limit_s, self.native.unbind, volume)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOENT):
                raise
            return error.errno == errno.ENOENT
        return True

    async def _unless_busy(
        self, limit_s: float, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Calls the function again while it raises EBUSY, until the limit; then raises EBUSY."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return await self._engine.call(self._uid, function, *args, **kwargs)
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Drains sealed saves; the memory goes back to the pool."""
        await self._stop_resizing()
        await self._engine.drive(self._uid, self.native.close)
        self._engine.forget_native(self.number)

    def _on_event(self, event: _core.Event) -> None:
        if event.kind == "detached":
            self._drained.set()
        elif event.kind == "load_ended":
            self._load_over()
        self._listener(event)
