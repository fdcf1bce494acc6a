"""A native tenant with its session: attached, detached, loaded through, closed, in that order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from pccheck_native import _core
from pccheck_native.transfer import PUSHED
from pccheck_wire.ends import CHECK_DISK
from pccheck_wire.errors import CheckpointFailedError, DeviceError, RefusedError
from pccheckd.base.background import happened
from pccheckd.base.errors import translated

from .descriptors import Lot
from .engine import Engine, PortShape
from .grant import RETRY_S, Grant

#: A detach drains what is in the ring; the disk is not waited for.
DETACH_LIMIT_S = 60.0
#: The disconnect of a previous trainer may not be noticed yet; checked every STEP_S.
GRACE_S = 1.0
STEP_S = 0.02

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


class Port:
    """Owns one tenant. Its events reach `listener` on the loop, except DETACHED."""

    def __init__(
        self, engine: Engine, uid: int, listener: Callable[[_core.Event], None], chunk_bytes: int,
        number: int, native: _core.Tenant,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._uid = uid
        self._listener = listener
        self.chunk_bytes = chunk_bytes
        self._number = number  # of its events
        self.native = native
        self.grant = Grant(engine, uid, native, chunk_bytes)
        self.attached = False
        self._drained = asyncio.Event()

    @classmethod
    async def opened(
        cls, engine: Engine, uid: int, listener: Callable[[_core.Event], None], shape: PortShape
    ) -> Port:
        number, native = await engine.open_native(uid, shape)
        port = cls(engine, uid, listener, shape.chunk_bytes, number, native)
        engine.listen(number, port._on_event)
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

    async def detach(self, others: Sequence[Port] = ()) -> Port | None:
        """Returns when every copy of the session is complete or aborted. The event that ends an
        aborted one may come later, when its writes are done. When the last step could not be read
        from the trainer's GPU: the port of `others`, ranks of the job, from whose GPU it was read.
        """
        if not self.attached:
            return None
        lenders = [other.native for other in others]
        lender = await self._engine.drive(self._uid, self.native.detach, lenders)
        await happened(self._drained, DETACH_LIMIT_S)
        self.attached = False
        self.grant.look()
        return others[lender] if lender is not None else None

    def usage(self) -> _core.TenantUsage | None:
        """What its memory is used for; None once it is closed. Never blocks for long."""
        with contextlib.suppress(ValueError):
            return self.native.usage()
        return None

    async def expose(self, number: int, exposure: bytes, lot: Lot) -> str:
        """Maps the GPU memory that the trainer shares; "" or why the daemon cannot pull. Raises
        DeviceError when GPU memory is short: the trainer may have some to release."""
        try:
            return await self._engine.drive(self._uid, self._expose, number, exposure, lot)
        except MemoryError as error:
            raise DeviceError(str(error), hint=PUSHED, retryable=True) from error
        except (OSError, _core.NativeError) as error:
            raise translated(error, "the GPU memory") from error

    def _expose(self, number: int, exposure: bytes, lot: Lot) -> str:
        """The descriptors are this thread's: no other one closes them in the meantime."""
        mine = Lot()
        mine.add(lot)
        try:
            return self.native.expose(number, exposure, mine.packed())
        finally:
            mine.close()

    async def rest(self, after_s: float) -> None:
        """Unpins its memory when no GPU memory was mapped for this long."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            await self._engine.drive(self._uid, self.native.rest, after_s)

    async def release_memory(self) -> bool:
        """Gives the segments back when detached and idle; whether it did."""
        await self.grant.stop_resizing()
        try:
            await self._engine.call(self._uid, self.native.release_memory)
        except OSError:
            return False
        self.grant.adopted(0)
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
        self.grant.loads(now=True)
        started = False
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
                self.grant.loads(now=False)

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
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Drains sealed saves; the memory goes back to the pool."""
        await self.grant.stop_resizing()
        await self._engine.drive(self._uid, self.native.close)
        self._engine.forget(self._number)

    def _on_event(self, event: _core.Event) -> None:
        if event.kind == "detached":
            self._drained.set()
        elif event.kind == "load_ended":
            self.grant.loads(now=False)
        self._listener(event)
