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
import socket
from dataclasses import dataclass
from pathlib import Path

from pccheck_wire.errors import RefusedError
from pccheck_wire.packing import REQUEST_BYTES_MAX
from pccheckd.base.background import Tasks
from pccheckd.base.errors import SHORTAGE_HINT, shortage
from pccheckd.base.logs import LOG
from pccheckd.base.threads import Threads
from pccheckd.helper.keeper import Handle, HelperKind, Keeper

#: How long a front stays without a session, for jobs that start again.
IDLE_S = 60.0
#: Peers that connect while no front runs wait here. Below program.FILES_MAX: idle connects end one
#: front at most.
BACKLOG = 128
FRONT = HelperKind(
    "pccheckd.front.program", "receives requests", "checkpoints do not need it",
    REQUEST_BYTES_MAX, (str(REQUEST_BYTES_MAX),),
)  # fmt: skip


@dataclass
class _Front:
    """Of a user, from the first session until there has been none for a while."""

    keeper: Keeper
    sessions: int = 0
    idle: asyncio.TimerHandle | None = None


class ControlServer:
    """Owns the directory of endpoints and the fronts that serve them."""

    def __init__(self, socket_path: Path) -> None:
        """`socket_path` is the attach socket's; its lock is held."""
        self._handle: Handle
        _remove_left(socket_path)
        self._directory = socket_path.parent / f"{_prefix(socket_path)}{secrets.token_hex(12)}"
        self._fronts: dict[int, _Front] = {}
        self._threads = Threads(1, "fronts")
        self._threads.begin()
        self._ending = Tasks("fronts")
        self._restarts = 0  # of ended ones

    @property
    def fronts(self) -> int:
        """Processes that serve now."""
        return sum(front.keeper.serves for front in self._fronts.values())

    @property
    def restarts(self) -> int:
        """Fronts that ended unexpectedly."""
        return self._restarts + sum(front.keeper.restarts for front in self._fronts.values())

    def serve(self, handle: Handle) -> None:
        """Sets what answers requests. To be called before the first `join`."""
        self._handle = handle

    async def join(self, uid: int, gid: int) -> str:
        """The address for a session's requests, until `leave`. Raises RefusedError when there can
        be none."""
        front = self._fronts.get(uid)
        if front is None or not self._path(uid).exists():
            try:
                front = self._open(uid, gid)
            except OSError as error:
                raise _not_made(self._path(uid), error) from error
        front.sessions += 1
        if front.idle is not None:
            front.idle.cancel()
            front.idle = None
        try:
            await front.keeper.ready()
        except BaseException:
            self.leave(uid)
            raise
        return f"ipc://{self._path(uid)}"

    def leave(self, uid: int) -> None:
        """A session has ended."""
        front = self._fronts.get(uid)
        if front is None:
            return
        front.sessions -= 1
        if not front.sessions:
            loop = asyncio.get_running_loop()
            front.idle = loop.call_later(IDLE_S, self._retire, uid)

    async def close(self) -> None:
        """Ends the fronts; requests in progress are dropped."""
        for uid in list(self._fronts):
            self._retire(uid)
        await self._ending.settle()
        self._threads.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _open(self, uid: int, gid: int) -> _Front:
        """Replaces an endpoint that was removed (for example by a cleaner of /tmp). Existing
        sessions lose the old endpoint, and find the new one."""
        if not self._directory.exists():
            self._directory.mkdir(mode=0o711)
            self._directory.chmod(0o711)
        listener = _listen(self._path(uid), uid)
        front = _Front(Keeper(FRONT, uid, gid, [listener], self._threads, self._handle))
        if uid in self._fronts:
            LOG.warning("uid %d: %s was removed; pccheckd creates it again", uid, self._path(uid))
            front.sessions = self._fronts[uid].sessions
            self._end(uid)
        self._fronts[uid] = front
        front.keeper.start()
        return front

    def _retire(self, uid: int) -> None:
        """Later sessions get a new endpoint and a new front."""
        self._end(uid)
        self._path(uid).unlink(missing_ok=True)

    def _end(self, uid: int) -> None:
        front = self._fronts.pop(uid)
        if front.idle is not None:
            front.idle.cancel()
        self._restarts += front.keeper.restarts
        self._ending.spawn(front.keeper.close())

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


def _listen(path: Path, uid: int) -> socket.socket:
    """The endpoint's socket; it stays when the front that accepts from it is replaced."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.setblocking(False)  # or libzmq would wait for a peer that has gone
        made.bind(os.fspath(path))
        if os.geteuid() == 0:
            os.chown(path, uid, -1)
            path.chmod(0o600)
        else:  # the filter is what keeps others out
            path.chmod(0o600 if uid == os.geteuid() else 0o666)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
