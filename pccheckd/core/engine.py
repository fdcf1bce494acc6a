"""The native core on asyncio: events arrive on the loop, calls that may block run in threads.

The loop itself calls only what takes no lock that is held over I/O: of a tenant `drop`, `noted`,
`number`, `policy`, `refuse`, `retry`, `set_outcome`, `usage`, `write`; of a volume `set_group`,
`limit`, `has_expendable`, `spare`; of the pool and the GPUs the usage. All else goes through
`call`, `drive`, `grow` or `open_native`: the integration tests enforce this
(tests/support/loopcheck.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from pccheck_native import _core
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.config.options import Config
from pccheckd.storage.directory import StorageDirectory
from pccheckd.storage.space import Room

from .gpus import Driver
from .io_engine import IoEngine

THREADS = 32
#: Threads that one user's slow disk or large volume may occupy; the others stay free.
THREADS_PER_UID = 6
#: For calls that may wait for a GPU: half a minute when it does not answer.
DRIVERS = 64
DRIVERS_PER_UID = 16
#: For calls that read for minutes (verify), and for those that read a few records (list, drop): one
#: of each per user, so there is room for this many users. Threads start when they are needed.
SCANS = 64
LOOKS = 64
#: For documents, which need the CPU only.
DOCUMENTS = 2
GROWERS = 2

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _open_pool(dram_bytes: int, store: str, limit: int, stored: int) -> _core.Pool:
    try:
        return _core.Pool(dram_bytes, store=store, store_limit=limit, stored=stored)
    except OSError as error:
        LOG.warning(
            "no descriptor store at %r: %s; a restart loses copied checkpoints", store, error
        )
        return _core.Pool(dram_bytes)


class Turns:
    """Threads for one kind of work, of which each user has a few at a time."""

    def __init__(self, name: str, threads: int, per_uid: int) -> None:
        self.threads = Threads(threads, name)
        self._per_uid = per_uid
        self._limits: dict[int, asyncio.Semaphore] = {}

    async def __call__(
        self, uid: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs it for a user. The turn lasts as long as the work, also when the caller is
        cancelled: repeated requests and hang-ups get a user no more threads."""
        limit = self._limits.setdefault(uid, asyncio.Semaphore(self._per_uid))
        loop = asyncio.get_running_loop()

        def over(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                loop.call_soon_threadsafe(limit.release)

        await limit.acquire()
        try:
            begun = self.threads.submit(function, *args, **kwargs)
        except BaseException:
            limit.release()
            raise
        begun.add_done_callback(over)
        return await asyncio.wrap_future(begun)


class PortShape(NamedTuple):
    """What a tenant is made with."""

    chunk_bytes: int
    block_bytes: int
    chunk_capacity: int
    lanes: int
    writers: int
    gpus: _core.Gpus | None = None
    label: str = ""


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
        self.config = config
        self.driver = Driver()
        self.directory = directory
        self.io = IoEngine(config)
        self._events = _core.Events()
        self._listeners: dict[int, Callable[[_core.Event], None]] = {}
        self._next_number = 1
        self._calls = Turns("call", THREADS, THREADS_PER_UID)
        self.drive = Turns("drive", DRIVERS, DRIVERS_PER_UID)  # may wait for a GPU or its driver
        self.scan = Turns("scan", SCANS, 1)  # reads for minutes (verify)
        self.look = Turns("look", LOOKS, 1)  # reads a few records (list, drop)
        self.document = Turns("document", DOCUMENTS, 1)  # needs the CPU only
        self._growers = Threads(GROWERS, "grow")
        self.room = Room(config.storage)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[object, tuple[int, float]] = {}
        self.stalled = ""  # why calls to the storage seem to hang

    def start(self) -> None:
        """Starts to deliver events on the running loop, and to load the CUDA driver in a thread."""
        self._loop = asyncio.get_running_loop()
        for threads in self._pools():
            threads.begin()
        self.room.start()
        self._loop.add_reader(self._events.fileno(), self.deliver)
        self.driver.start()

    async def close_gpus(self) -> None:
        """After every tenant is closed. Waits for the copiers to end."""
        gpus = self.driver.take_away()
        if gpus is not None:
            await self.drive(os.getuid(), gpus.close)

    def stop(self) -> None:
        """After every tenant is closed."""
        if self._loop is not None:
            self._loop.remove_reader(self._events.fileno())
        for threads in self._pools():
            threads.stop()
        self.room.stop()

    def _pools(self) -> list[Threads]:
        turns = (self._calls, self.drive, self.scan, self.look, self.document)
        return [self._growers, *(one.threads for one in turns)]

    async def call(
        self, uid: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Runs a native call for a user in a thread; a user waits for its own calls only."""

        def timed() -> _R:
            key = object()
            self._running[key] = uid, time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                del self._running[key]

        return await self._calls(uid, timed)

    def note_stall(self, limit_s: float) -> None:
        """Sets `stalled` from the call that has been running longest."""
        now_s = time.monotonic()
        running = ((now_s - since_s, uid) for uid, since_s in list(self._running.values()))
        waited_s, uid = max(running, default=(0.0, 0))
        late = (
            f"a call to the storage for uid {uid} has not returned for {waited_s:.0f} s; this "
            "user's checkpoints wait; check the disk (dmesg)"
        )
        self.stalled = late if waited_s > limit_s else ""

    async def lacks_storage(self, uid: int) -> bool:
        """Whether the storage directory is missing now."""
        return self.directory is not None and bool(await self.call(uid, self.directory.look))

    async def require_storage(self, uid: int) -> None:
        """Raises NoStoreError when the storage directory is missing."""
        if self.directory is not None and await self.lacks_storage(uid):
            self.directory.require()

    @property
    def missing_storage(self) -> str:
        """Why nothing can be stored, as of the last look; or ""."""
        return self.directory.missing if self.directory is not None else ""

    async def grow(self, function: Callable[[int], int], wanted_bytes: int) -> int:
        """Runs a call that touches new memory; no other call waits for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._growers, function, wanted_bytes)

    async def open_native(self, uid: int, shape: PortShape) -> tuple[int, _core.Tenant]:
        """A tenant, and the number with which its events come: see `listen`."""
        number = self._next_number
        self._next_number += 1
        # In a thread: it starts lanes x writers threads.
        return number, await self.call(
            uid, _core.Tenant, self.pool, self._events, id=number, foreign=uid != os.geteuid(),
            **shape._asdict(),
        )  # fmt: skip

    def listen(self, number: int, listener: Callable[[_core.Event], None]) -> None:
        """The events of that tenant go to `listener`, on the loop, until `forget`."""
        self._listeners[number] = listener

    def forget(self, number: int) -> None:
        self._listeners.pop(number, None)

    def deliver(self) -> None:
        """Passes on what the core has reported."""
        for event in self._events.take():
            listener = self._listeners.get(event.tenant)
            if listener is None:
                continue
            try:
                listener(event)
            except Exception:  # an error with one checkpoint must not stop the events of others
                LOG.exception("event %s of tenant %d", event.kind, event.tenant)
