"""The attach socket: who connects (the kernel says), for how long, and what he is handed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import os
import socket
import stat
import struct
from collections import Counter
from pathlib import Path

from pccheck_wire import codec
from pccheck_wire.basics import SAME_VERSION_HINT
from pccheck_wire.errors import (
    NoStoreError,
    PccheckError,
    ProtocolError,
    RefusedError,
    StoreLockedError,
    UsageError,
)
from pccheck_wire.messages import PROTOCOL_VERSION, Hello

from . import shortage
from .background import Background, Tasks
from .engine import translated
from .handlers import Handlers, failure, readable
from .logs import LOG
from .sessions import Peer, Session, Sessions

BACKLOG = 128
CONNECTIONS_PER_UID_MAX = 192
CONNECTIONS_MAX = 1024
HELLO_LIMIT_S = 5.0
SEND_LIMIT_S = 10.0
_SO_PEERPIDFD = 77  # Linux 6.5
_CREDENTIALS = struct.Struct("3i")


def make_runtime(directory: Path, group: str) -> None:
    """The socket's directory, 0750 when it is ours to make. Raises PccheckError."""
    try:
        if not directory.exists():
            directory.mkdir(mode=0o750, parents=True)
            directory.chmod(0o750)
        if group:
            number = grp.getgrnam(group).gr_gid
            if not directory.stat().st_mode & stat.S_IWOTH:  # /tmp stays as it is
                os.chown(directory, -1, number)
    except KeyError:
        raise UsageError(f"--group: there is no group {group!r}", hint="groupadd it") from None
    except OSError as error:
        raise NoStoreError(
            f"the socket's directory {directory} cannot be made: {error.strerror}",
            hint="choose another place with --socket PATH",
        ) from error


def listen(path: Path, group: str) -> socket.socket:
    """The listening socket; a stale one is replaced, a live one is not. Needs the socket's lock."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    made.setblocking(False)
    try:
        if _answers(path):
            raise StoreLockedError(
                f"something listens at {path} already", hint="use another --socket"
            )
        path.unlink(missing_ok=True)
        made.bind(os.fspath(path))
        path.chmod(0o660)
        if group:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise NoStoreError(
            f"cannot listen at {path}: {error.strerror}", hint="choose another --socket PATH"
        ) from error
    except BaseException:
        made.close()
        raise
    return made


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


class AttachServer(Background):
    """Accepts, shakes hands, and holds every connection until its peer is gone."""

    def __init__(self, listener: socket.socket, sessions: Sessions, handlers: Handlers) -> None:
        self._listener = listener
        self._sessions = sessions
        self._handlers = handlers
        self._count: Counter[int] = Counter()
        self._connections = Tasks("connections")

    async def close(self) -> None:
        """Stops accepting and ends every session, which drains what it handed over."""
        await super().close()
        self._listener.close()
        await self._connections.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    LOG.warning("accept: %s", error)
                await asyncio.sleep(0.05)
                continue
            connection.setblocking(False)
            self._connections.spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        uid = -1
        try:
            peer = _peer(connection)
            uid = peer.uid
            self._count[uid] += 1
            self._check_limits(uid)
            async with asyncio.timeout(HELLO_LIMIT_S):
                packet = await self._receive(connection)
            if not packet:
                return
            hello = _hello(packet)
            session, welcome, descriptors = await self._sessions.open(hello, peer)
            try:
                socket.send_fds(connection, [codec.encode(welcome)], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            await self._until_gone(connection, session)
        except PccheckError as error:
            await self._refuse(connection, error)
        except (OSError, TimeoutError) as error:
            if shortage.told(error):  # else the peer went away, or never said hello
                await self._refuse(connection, translated(error, "the session"))
        except Exception as error:  # the edge of this connection
            LOG.exception("a connection of uid %d failed", uid)
            await self._refuse(connection, error)
        finally:
            connection.close()
            self._count[uid] -= 1
            if session is not None:
                await asyncio.shield(self._sessions.end(session))

    async def _until_gone(self, connection: socket.socket, session: Session) -> None:
        """Serves requests until the peer hangs up, dies, or breaks the page's protocol.

        A forked child may hold the socket open after the trainer's death: the pidfd tells.
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
        finally:
            for task in (serving, waiting):
                task.cancel()
            await asyncio.gather(serving, waiting, return_exceptions=True)
            if pidfd is not None:
                loop.remove_reader(pidfd)
                os.close(pidfd)

    async def _requests(self, connection: socket.socket, session: Session) -> None:
        loop = asyncio.get_running_loop()
        while packet := await self._receive(connection):
            answer = await self._handlers.by_session(session, packet)
            if answer is None:
                continue
            async with asyncio.timeout(SEND_LIMIT_S):  # a peer that does not read is let go
                for part in codec.packets(answer):
                    await loop.sock_sendall(connection, part)

    async def _receive(self, connection: socket.socket) -> bytes:
        """One packet; descriptors that come with it are dropped by the kernel."""
        return await asyncio.get_running_loop().sock_recv(connection, codec.REQUEST_BYTES_MAX + 1)

    async def _refuse(self, connection: socket.socket, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            connection.send(codec.encode(failure(error)), socket.MSG_NOSIGNAL)

    def _check_limits(self, uid: int) -> None:
        if self._count[uid] > CONNECTIONS_PER_UID_MAX or self._count.total() > CONNECTIONS_MAX:
            raise RefusedError(
                f"uid {uid} has {self._count[uid] - 1} connections", hint="close some first"
            )


def _hello(packet: bytes) -> Hello:
    """The handshake; its protocol number is compared before anything else is looked at."""
    with readable("the handshake"):
        plain = codec.unpack(packet)
    protocol = plain.get("protocol") if isinstance(plain, dict) else None
    if type(protocol) is int and protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"this daemon speaks protocol {PROTOCOL_VERSION}, the process {protocol}",
            hint=SAME_VERSION_HINT,
        )
    with readable("the handshake"):
        return codec.from_plain(plain, Hello)


def _peer(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Peer(uid=uid, gid=gid, pid=pid)


def _pidfd(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the peer ends; None where there is none to have."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError):
        return os.pidfd_open(_peer(connection).pid)  # what the peer says of itself may be anybody's
    return None
