"""Control over ZeroMQ: one endpoint per uid, with a name that cannot be guessed, for that uid only.
Frames pass through here to `handle`. ZeroMQ itself runs in the fronts: this process, which owns
pool and slots, never parses a client's bytes with it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
from pathlib import Path

from pccheck_wire.errors import RefusedError
from pccheckd.base.background import Tasks
from pccheckd.base.errors import SHORTAGE_HINT, shortage
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads

from .children import Handle, Keeper, listen

#: How long a front stays without a session, for jobs that start again.
IDLE_S = 60.0


class ControlServer:
    """Owns the directory of endpoints and the fronts that serve them."""

    def __init__(self, socket_path: Path) -> None:
        """`socket_path` is the attach socket's; its lock is held."""
        self._handle: Handle
        _remove_left(socket_path)
        self._directory = socket_path.parent / f"{_prefix(socket_path)}{secrets.token_hex(12)}"
        self._keepers: dict[int, Keeper] = {}
        self._threads = Threads(1, "fronts")
        self._threads.begin()
        self._ending = Tasks("fronts")
        self._restarts = 0  # of ended ones

    @property
    def fronts(self) -> int:
        """Processes that serve now."""
        return sum(keeper.serves for keeper in self._keepers.values())

    @property
    def restarts(self) -> int:
        """Fronts that ended unexpectedly."""
        return self._restarts + sum(keeper.restarts for keeper in self._keepers.values())

    def serve(self, handle: Handle) -> None:
        """Sets what answers requests. To be called before the first `join`."""
        self._handle = handle

    async def join(self, uid: int, gid: int) -> str:
        """The address for a session's requests, until `leave`. Raises RefusedError when there can
        be none."""
        keeper = self._keepers.get(uid)
        if keeper is None or not self._path(uid).exists():
            try:
                keeper = self._open(uid, gid)
            except OSError as error:
                raise _not_made(self._path(uid), error) from error
        keeper.sessions += 1
        if keeper.idle is not None:
            keeper.idle.cancel()
            keeper.idle = None
        try:
            await keeper.ready()
        except BaseException:
            self.leave(uid)
            raise
        return f"ipc://{self._path(uid)}"

    def leave(self, uid: int) -> None:
        """A session has ended."""
        keeper = self._keepers.get(uid)
        if keeper is None:
            return
        keeper.sessions -= 1
        if not keeper.sessions:
            loop = asyncio.get_running_loop()
            keeper.idle = loop.call_later(IDLE_S, self._retire, uid)

    async def close(self) -> None:
        """Ends the fronts; requests in progress are dropped."""
        for uid in list(self._keepers):
            self._retire(uid)
        await self._ending.settle()
        self._threads.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _open(self, uid: int, gid: int) -> Keeper:
        """Replaces an endpoint that was removed (for example by a cleaner of /tmp). Existing
        sessions lose the old endpoint, and find the new one."""
        if not self._directory.exists():
            self._directory.mkdir(mode=0o711)
            self._directory.chmod(0o711)
        keeper = Keeper(uid, gid, listen(self._path(uid), uid), self._threads, self._handle)
        if uid in self._keepers:
            LOG.warning("uid %d: %s was removed; pccheckd creates it again", uid, self._path(uid))
            keeper.sessions = self._keepers[uid].sessions
            self._end(uid)
        self._keepers[uid] = keeper
        keeper.start()
        return keeper

    def _retire(self, uid: int) -> None:
        """Later sessions get a new endpoint and a new front."""
        self._end(uid)
        self._path(uid).unlink(missing_ok=True)

    def _end(self, uid: int) -> None:
        keeper = self._keepers.pop(uid)
        if keeper.idle is not None:
            keeper.idle.cancel()
        self._restarts += keeper.restarts
        self._ending.spawn(keeper.close())

    def _path(self, uid: int) -> Path:
        return self._directory / f"{uid}.sock"


def _not_made(path: Path, error: OSError) -> RefusedError:
    return RefusedError(
        f"your endpoint {path} cannot be created: {shortage(error) or error.strerror}",
        hint=SHORTAGE_HINT if shortage(error) else "check the directory of pccheckd's "
        "socket: it must exist, have space and belong to pccheckd's user", retryable=True,
    )  # fmt: skip


def _prefix(socket_path: Path) -> str:
    """How the directories of daemons with this socket begin: others may be in the same place."""
    return "ctl-" + hashlib.blake2b(os.fsencode(socket_path.name), digest_size=4).hexdigest()


def _remove_left(socket_path: Path) -> None:
    """Removes the endpoints of a killed daemon; not what another user has created there."""
    for place in socket_path.parent.glob(f"{_prefix(socket_path)}*"):
        with contextlib.suppress(OSError):
            if place.lstat().st_uid == os.geteuid():
                shutil.rmtree(place)
