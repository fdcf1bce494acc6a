"""The asyncio face of the native core: events arrive on the loop, what may block runs in threads.

The loop itself calls only what waits for no more than a lock that nobody holds over I/O: of a
channel `refuse`, `requested`, `set_outcome`, `usage`; of a volume `set_group`, `limit`,
`has_expendable`; of the pool and the GPUs the usage. All else goes through `call` and its kin; the
integration tests watch this (tests/support/loopcheck.py)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pccheck_native import _core
from pccheck_wire.errors import (
    CheckpointFailedError,
    DamagedError,
    InternalError,
    NoCheckpointError,
    NoStoreError,
    PccheckError,
    RefusedError,
    StorageFullError,
    StoreLockedError,
    UnreadableError,
)
from pccheckd.base import shortage
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.config.sources import Config
from pccheckd.storage.directory import StorageDirectory
from pccheckd.storage.space import Room

from .gpus import Driver
from .io_engine import IoEngine

THREADS = 32
#: Threads that one user's slow disk or large volume may keep busy; the others stay free.
THREADS_PER_UID = 6
#: For what may wait for a GPU: half a minute when it does not answer.
DRIVERS = 64
DRIVERS_PER_UID = 16
#: For what reads for minutes (verify), and for what reads a few records (list, drop): one of each
#: for a user, so there is room for so many users. Threads are made when they are needed.
SCANS = 64
LOOKS = 64
#: For documents, which need the CPU only: nobody waits for a disk here.
DOCUMENTS = 2
GROWERS = 2

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NATIVE: dict[str, tuple[type[PccheckError], str, str]] = {
    "NOT_A_VOLUME": (DamagedError, "holds no valid commit record", "move it away, then start anew"),
    "DAMAGED": (DamagedError, "is damaged", "see: pccheckctl verify"),
    "UNREADABLE": (UnreadableError, "could not be read", "look at the disk: dmesg"),
    "TRUNCATED": (
        DamagedError,
        "is shorter than its records say",
        "bring the whole file back from a copy",
    ),
    "REMOVED": (CheckpointFailedError, "was removed or moved away while it was open", ""),
    "REPLACED": (CheckpointFailedError, "was replaced by another file while it was open", ""),
    "NEWER_FORMAT": (RefusedError, "was written by a newer version", "upgrade pccheck"),
    "LOCKED": (StoreLockedError, "is open in another process", "end that process first"),
    "NO_SLOT": (CheckpointFailedError, "has no free slot", "use more --slots"),
    "TOO_LARGE": (CheckpointFailedError, "has slots smaller than this checkpoint", "register it"),
    "STOPPED": (CheckpointFailedError, "could not write a commit record", "check the disk"),
    "NO_MEMORY": (RefusedError, "got no DRAM: the budget is used up", "raise --dram"),
    "NO_DRIVER": (RefusedError, "has no CUDA driver here", "GPU tensors are pushed"),
    "DEVICE": (CheckpointFailedError, "failed at the GPU driver", "see the kernel's log: dmesg"),
    "UNSUPPORTED": (
        NoStoreError,
        "lies on a file system or kernel that lacks direct I/O",
        "use a local ext4 or xfs disk; --allow-any-filesystem overrides this for tests",
    ),
}


def translated(error: BaseException, what: str) -> PccheckError:
    """What a native or kernel error means to the one who asked; `what` is its subject."""
    if isinstance(error, PccheckError):
        return error
    if isinstance(error, _core.NativeError):
        kind, text, hint = _NATIVE.get(error.code_name, (InternalError, error.code_name, ""))
        return kind(f"{what} {text}", hint=hint)
    if words := shortage.told(error):
        return CheckpointFailedError(f"{what}: {words}", hint=shortage.HINT)
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFullError(f"{what}: no room left on the disk")
        if error.errno == errno.ENOENT:
            return NoCheckpointError(f"{error.filename or what} is not there")
        return CheckpointFailedError(f"{what}: {error.strerror or error}")
    return InternalError(f"{what}: {type(error).__name__}", hint="the daemon's log has it")


def _open_pool(dram_bytes: int, store: str, limit: int, stored: int) -> _core.Pool:
    try:
        return _core.Pool(dram_bytes, store=store, store_limit=limit, stored=stored)
    except OSError as error:
        LOG.warning("no descriptor store at %r: %s; a restart loses what is copied", store, error)
        return _core.Pool(dram_bytes)


class _Turns:
    """Threads for work of one kind, of which a user has a few at a time."""

    def __init__(self, name: str, threads: int, per_uid: int) -> None:
        self.threads = Threads(threads, name)
        self._per_uid = per_uid
        self._limits: dict[int, asyncio.Semaphore] = {}

    async def run(self, uid: int, work: Callable[[], _R]) -> _R:
        """The turn lasts as long as the work, also when nobody waits for it any more: who asks and
        hangs up again and again gets no more threads by that."""
        limit = self._limits.setdefault(uid, asyncio.Semaphore(self._per_uid))
        loop = asyncio.get_running_loop()

        def over(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                loop.call_soon_threadsafe(limit.release)

        await limit.acquire()
        try:
            begun = self.threads.submit(work)
        except BaseException:
            limit.release()
            raise
        begun.add_done_callback(over)
        return await asyncio.wrap_future(begun)


class Engine:
    """Owns the pool, the event ring, the GPUs and the threads for calls that block."""

    def __init__(
        self,
        config: Config,
        directory: StorageDirectory | None = None,
        *,
        store: tuple[str, int] = ("", 0),
        stored: int = 0,
    ) -> None:
        """`directory`: that of the storage, locked. `store`: the service manager's notify socket,
        how many descriptors it keeps, and how many are there already."""
        self.pool = _open_pool(config.dram_bytes, *store, stored)
        self.driver = Driver()
        self.directory = directory
        self.io = IoEngine(config)
        self._events = _core.Events()
        self._listeners: dict[int, Callable[[_core.Event], None]] = {}
        self._next_channel = 1
        self._calls = _Turns("call", THREADS, THREADS_PER_UID)
        self._drivers = _Turns("drive", DRIVERS, DRIVERS_PER_UID)
        self._scans = _Turns("scan", SCANS, 1)
        self._looks = _Turns("look", LOOKS, 1)
        self._documents = _Turns("document", DOCUMENTS, 1)
        self._growers = Threads(GROWERS, "grow")
        self.room = Room(config.storage)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[object, tuple[int, float]] = {}
        self.stalled = ""  # why calls to the storage seem to hang; set by Progress

    def start(self) -> None:
        """Begins to deliver events on the running loop, and to load the CUDA driver beside it."""
        self._loop = asyncio.get_running_loop()
        for threads in self._pools():
            threads.begin()
        self.room.start()
        self._loop.add_reader(self._events.fileno(), self._deliver)
        self.driver.start()

    async def close_gpus(self) -> None:
        """After every channel is closed. Waits for the copiers to end."""
        gpus = self.driver.take_away()
        if gpus is not None:
            await self.drive(os.getuid(), gpus.close)

    def stop(self) -> None:
        """After every channel is closed."""
        if self._loop is not None:
            self._loop.remove_reader(self._events.fileno())
        for threads in self._pools():
            threads.shutdown(wait=False, cancel_futures=True)
        self.room.stop()

    def _pools(self) -> list[Threads]:
        turns = (self._calls, self._drivers, self._scans, self._looks, self._documents)
        return [self._growers, *(one.threads for one in turns)]

    async def call(
        self, uid: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs a native call for a user in a thread; a user waits for his own calls only."""

        def timed() -> _R:
            key = object()
            self._running[key] = uid, time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                del self._running[key]

        return await self._calls.run(uid, timed)

    def longest_call(self) -> tuple[int, float]:
        """The uid of the call that has been running longest, and for how many seconds."""
        now_s = time.monotonic()
        running = ((now_s - since_s, uid) for uid, since_s in list(self._running.values()))
        waited_s, uid = max(running, default=(0.0, 0))
        return uid, waited_s

    async def lacks_storage(self, uid: int) -> bool:
        """Whether the storage directory is not there, looked at now."""
        return self.directory is not None and bool(await self.call(uid, self.directory.look))

    async def require_storage(self, uid: int) -> None:
        """Raises NoStoreError, in words, unless the storage directory is there."""
        if self.directory is not None and await self.lacks_storage(uid):
            self.directory.require()

    @property
    def missing_storage(self) -> str:
        """Why nothing can be stored, as last looked; or ""."""
        return self.directory.missing if self.directory is not None else ""

    async def drive(
        self, uid: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Like `call`, for what may wait for a GPU or its driver: no other call waits with it."""
        return await self._drivers.run(uid, lambda: function(*args, **kwargs))

    async def scan(
        self, uid: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs what reads for minutes (verify), one at a time for each user."""
        return await self._scans.run(uid, lambda: function(*args, **kwargs))

    async def look(
        self, uid: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs what reads a few records (list, drop), one at a time for each user; it waits for
        nobody's `scan`."""
        return await self._looks.run(uid, lambda: function(*args, **kwargs))

    async def document(
        self, uid: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs what only needs the CPU, but too long for the loop; one at a time for each user."""
        return await self._documents.run(uid, lambda: function(*args, **kwargs))

    async def grow(self, function: Callable[[int], int], wanted_bytes: int) -> int:
        """Runs something that touches new memory; nobody's other calls wait for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._growers, function, wanted_bytes)

    async def open_channel(
        self,
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
    ) -> tuple[int, _core.Channel]:
        """A channel whose events go to `listener`, on the loop."""
        number = self._next_channel
        self._next_channel += 1
        self._listeners[number] = listener

        def made() -> _core.Channel:  # with lanes x writers threads
            return _core.Channel(
                self.pool, self._events, id=number, chunk_bytes=chunk_bytes,
                block_bytes=block_bytes, chunk_capacity=chunk_capacity, lanes=lanes,
                writers=writers, gpus=gpus, label=label,
            )  # fmt: skip

        try:
            return number, await self.call(uid, made)
        except BaseException:
            self.forget_channel(number)
            raise

    def forget_channel(self, number: int) -> None:
        self._listeners.pop(number, None)

    def _deliver(self) -> None:
        for event in self._events.take():
            listener = self._listeners.get(event.channel)
            if listener is None:
                continue
            try:
                listener(event)
            except Exception:  # one checkpoint's trouble must not stop the events of the others
                LOG.exception("event %s of channel %d", event.kind, event.channel)
