"""The attach socket: who connects (according to the kernel), for how long, and what it gets."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import functools
import grp
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pccheck_native import _core
from pccheck_wire import codec, packing
from pccheck_wire.basics import PROTOCOL_VERSION, SAME_VERSION_HINT
from pccheck_wire.connection import credentials
from pccheck_wire.errors import (
    NoStoreError,
    PccheckError,
    ProtocolError,
    RefusedError,
    StoreLockedError,
    UsageError,
)
from pccheck_wire.messages import Hello
from pccheckd.base.background import Background, Tasks
from pccheckd.base.errors import shortage, translated
from pccheckd.base.logs import LOG
from pccheckd.core.descriptors import Lot
from pccheckd.jobs.sessions import CONNECTIONS_PER_UID_MAX, Peer, Session, Sessions

from .handlers import Handlers, failure, readable

BACKLOG = 128
CONNECTIONS_MAX = 1024
#: A user may have so many also when CONNECTIONS_MAX are taken: a few users together cannot keep
#: others out. Twice CONNECTIONS_MAX is the limit for all.
CONNECTIONS_RESERVED = 16
HELLO_LIMIT_S = 5.0
SEND_LIMIT_S = 10.0
ACCEPT_RETRY_S = 0.05
_ACCEPT_FIXES = {
    errno.EMFILE: " (raise pccheckd's limit: ulimit -n, or LimitNOFILE= of the service)",
    errno.ENFILE: " (raise the machine's limit: sysctl fs.file-max)",
}
_SO_PEERPIDFD = 77  # Linux 6.5


def make_runtime(directory: Path, group: str) -> None:
    """Creates the socket's directory, with mode 0750. Raises PccheckError, also for an existing one
    in which other users could replace the socket."""
    try:
        number = grp.getgrnam(group).gr_gid if group else -1
        if not directory.exists():
            directory.mkdir(mode=0o750, parents=True)
            directory.chmod(0o750)
        with _opened(directory, os.O_DIRECTORY) as opened:
            found = os.fstat(opened)
            _require_ours(directory, found)
            if group and not found.st_mode & stat.S_IWOTH:  # /tmp stays as it is
                os.chown(f"/proc/self/fd/{opened}", -1, number)
    except KeyError:
        raise UsageError(
            f"--group: group {group!r} does not exist", hint="create it: groupadd"
        ) from None
    except OSError as error:
        raise NoStoreError(
            f"the socket's directory {directory} cannot be created: {error.strerror}",
            hint="choose another place with --socket PATH",
        ) from error


def _require_ours(directory: Path, found: os.stat_result) -> None:
    """Raises NoStoreError when another user could replace files in a directory."""
    if found.st_uid not in (0, os.geteuid()):
        raise NoStoreError(
            f"the socket's directory {directory} belongs to uid {found.st_uid}, which could "
            "replace the socket",
            hint=f"chown it to uid {os.geteuid()}, or choose another place with --socket PATH",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise NoStoreError(
            f"the socket's directory {directory} lets other users write and has no sticky bit, so "
            "they could replace the socket",
            hint=f"chmod go-w {directory}, or choose another place with --socket PATH",
        )


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor for the file at `path`, which a replacement of the file does not affect."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def listen(path: Path, group: str) -> socket.socket:
    """The listening socket; a stale one is replaced, a live one is not. Needs the socket's lock."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    made.setblocking(False)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            answered = probe.connect_ex(os.fspath(path)) in (0, errno.EAGAIN)  # EAGAIN: many wait
        if answered:
            raise StoreLockedError(
                f"another process listens at {path}", hint="use another --socket"
            )
        path.unlink(missing_ok=True)
        made.bind(os.fspath(path))
        _admit(path, group)
        made.listen(BACKLOG)  # no peer can have connected before
    except OSError as error:
        made.close()
        raise NoStoreError(
            f"cannot listen at {path}: {error.strerror}", hint="choose another --socket PATH"
        ) from error
    except BaseException:
        made.close()
        raise
    return made


def _admit(path: Path, group: str) -> None:
    """Lets the group connect to the socket that was just bound. A file that replaced the socket
    keeps its owner and mode."""
    with _opened(path, os.O_NOFOLLOW) as opened:
        found = os.fstat(opened)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(errno.EEXIST, "another user has created a file there")
        if group:
            os.chown(f"/proc/self/fd/{opened}", -1, grp.getgrnam(group).gr_gid)
        os.chmod(f"/proc/self/fd/{opened}", 0o660)  # noqa: PTH101


class AttachServer(Background):
    """Accepts, does the handshake, and serves every connection until its peer is gone."""

    def __init__(self, listener: socket.socket, sessions: Sessions, handlers: Handlers) -> None:
        self._listener = listener
        self._sessions = sessions
        self._handlers = handlers
        self._count: Counter[int] = Counter()
        self._turns: dict[int, asyncio.Lock] = {}  # by uid
        self._connections = Tasks("connections")

    async def close(self) -> None:
        """Stops accepting and ends every session, which drains what it handed over."""
        await super().close()
        self._listener.close()
        await self._connections.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        logged: int | None = None  # the last error, until a process can connect again
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno != logged:
                    logged = error.errno
                    why = f"{error.strerror}{_ACCEPT_FIXES.get(logged or 0, '')}"
                    LOG.warning("no process can connect: %s", why)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            logged = None
            connection.setblocking(False)
            self._connections.spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        unasked = Lot()
        try:
            peer = _peer(connection)
        except OSError:  # the peer is unknown
            connection.close()
            return
        uid = peer.uid
        self._count[uid] += 1
        try:
            self._check_limits(uid)
            async with asyncio.timeout(HELLO_LIMIT_S):
                packet = await self._receive(connection, uid, unasked)
            if not packet:
                return
            hello = _hello(packet)
            try:
                session, welcome, descriptors = await self._sessions.open(hello, peer)
            except OSError as error:  # the daemon's, not the peer's
                raise translated(error, "the session") from error
            session.tell = functools.partial(_tell, connection)
            try:
                socket.send_fds(connection, [codec.encode(welcome)], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            await self._until_gone(connection, session)
        except PccheckError as error:
            await self._refuse(connection, error)
        except (OSError, MemoryError, TimeoutError) as error:
            if session is None and shortage(error):  # else the peer went away
                await self._refuse(connection, translated(error, "the session"))
        except Exception as error:  # the edge of this connection
            LOG.exception("a connection of uid %d failed", uid)
            if session is None:  # else its peer waits for replies only
                await self._refuse(connection, error)
        finally:
            unasked.close()
            connection.close()
            self._count[uid] -= 1
            if session is not None:
                await asyncio.shield(self._sessions.end(session))

    async def _until_gone(self, connection: socket.socket, session: Session) -> None:
        """Serves requests until the peer hangs up, dies, or breaks the page's protocol.

        A forked child may keep the socket open after the trainer has ended: hence the pidfd.
        """
        gone = session.broken
        loop = asyncio.get_running_loop()
        pidfd = _pidfd(connection)
        if pidfd is not None:
            loop.add_reader(pidfd, gone.set)
        serving = loop.create_task(self._requests(connection, session))
        waiting = loop.create_task(gone.wait())
        try:
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # raises what ended it
        finally:
            for task in (serving, waiting):
                task.cancel()
            await asyncio.gather(serving, waiting, return_exceptions=True)
            if pidfd is not None:
                loop.remove_reader(pidfd)
                os.close(pidfd)

    async def _requests(self, connection: socket.socket, session: Session) -> None:
        loop = asyncio.get_running_loop()
        came = session.descriptors.packet
        while packet := await self._receive(connection, session.uid, came):
            answer = await self._handlers.answer(session.uid, packet)
            came.close()  # unless the request has taken them
            if answer is None:
                continue
            async with asyncio.timeout(SEND_LIMIT_S):  # a peer that does not read is disconnected
                for part in packing.packets(answer):
                    await loop.sock_sendall(connection, part)

    async def _receive(self, connection: socket.socket, uid: int, came: Lot) -> bytes:
        """One packet, and the descriptors that came with it. Each user has one turn in a pass of
        the loop, first come, first served: so a user with many connections does not delay others.
        """
        packet = await _packet(connection, came)
        async with self._turns.setdefault(uid, asyncio.Lock()):
            await asyncio.sleep(0)
        return packet

    async def _refuse(self, connection: socket.socket, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            connection.send(codec.encode(failure(error)), socket.MSG_NOSIGNAL)

    def _check_limits(self, uid: int) -> None:
        """Raises RefusedError. The new connection has been counted."""
        mine, every = self._count[uid], self._count.total()
        if mine > CONNECTIONS_PER_UID_MAX:
            raise RefusedError(
                f"uid {uid} has {mine - 1} connections, which is the limit", hint="close some first"
            )
        if every > CONNECTIONS_MAX and (mine > CONNECTIONS_RESERVED or every > 2 * CONNECTIONS_MAX):
            raise RefusedError(
                f"pccheckd has {every - 1} connections, {mine - 1} of them of uid {uid}, and "
                "accepts no more now",
                hint="close some first, or try again later", retryable=True,
            )  # fmt: skip


def _hello(packet: bytes) -> Hello:
    """The handshake; compares the protocol number before it reads anything else."""
    with readable("the handshake"):
        plain = packing.unpack(packet)
    protocol = plain.get("protocol") if isinstance(plain, dict) else None
    if type(protocol) is int and protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the daemon uses protocol {PROTOCOL_VERSION}, and the process {protocol}",
            hint=SAME_VERSION_HINT,
        )
    with readable("the handshake"):
        return codec.from_plain(plain, Hello)


def _peer(connection: socket.socket) -> Peer:
    pid, uid, gid = credentials(connection)
    return Peer(uid=uid, gid=gid, pid=pid, gone=lambda: _hung_up(connection))


async def _packet(connection: socket.socket, came: Lot) -> bytes:
    """What does not fit into the room for descriptors the kernel drops."""
    loop = asyncio.get_running_loop()
    space = socket.CMSG_SPACE(_core.DESCRIPTORS_MAX * array.array("i").itemsize)
    while True:
        try:
            packet, ancillary, _, _ = connection.recvmsg(
                packing.REQUEST_BYTES_MAX + 1, space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            await _readable(loop, connection)
            continue
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                came.put(list(numbers))
        return packet


async def _readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    arrived = asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)


def _tell(connection: socket.socket, packet: bytes) -> None:
    """A peer that does not read, or has gone, is not told."""
    with contextlib.suppress(OSError):
        connection.send(packet, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _hung_up(connection: socket.socket) -> bool:
    """Peeks only: what the peer has sent already is for the session."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _pidfd(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the peer ends; None where the kernel has none."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError):
        return os.pidfd_open(_peer(connection).pid)  # not the pid that the peer claims
    return None
