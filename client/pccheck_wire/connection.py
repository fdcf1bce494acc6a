"""A connection to the attach socket, and untyped messages over it. Every client uses it, with or
without the classes of messages.py. Every call has a deadline. Nothing here is thread-safe.

This module imports neither these classes nor `pathlib`, so that a command that only asks starts
fast."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import stat
import struct
import time

from .basics import START_HINT
from .errors import (
    DaemonUnreachableError,
    PccheckError,
    ProtocolError,
    RefusedError,
    UsageError,
    WaitTimeoutError,
    error_from_wire,
)
from .packing import PACKET_BYTES, Reassembler

#: The uid of a daemon that is neither the user's own nor root's.
VARIABLE = "PCCHECK_DAEMON_UID"
_CREDENTIALS = struct.Struct("iII")
CONNECT_RETRY_S = 0.01
DESCRIPTORS_RETRY_S = 0.001
SOCKET_PATH_BYTES_MAX = 107  # Linux: sun_path without its final NUL


class DaemonSocket:
    """A connection to a trusted daemon, before the handshake."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        """Raises DaemonUnreachableError (no process listens), RefusedError, ProtocolError,
        WaitTimeoutError."""
        self.path = path
        self._process = os.getpid()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            _connect(self.socket, path, time.monotonic() + timeout_s)
            require_trusted(self.socket, path)
        except BaseException as error:
            self.socket.close()
            if _says_why(error):
                raise
            raise self._error(error, timeout_s) from error

    def exchange(
        self, message: bytes, timeout_s: float, *, number: int = 0
    ) -> tuple[dict[str, object], list[int]]:
        """Sends a message and returns the answer. Raises what `send` and `receive` do."""
        self.send(message, timeout_s)
        return self.receive(timeout_s, number=number)

    def send(self, message: bytes, timeout_s: float) -> None:
        """Raises WaitTimeoutError, DaemonUnreachableError."""
        try:
            self.socket.settimeout(timeout_s)
            self.socket.send(message, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._error(error, timeout_s) from error

    def send_with(self, message: bytes, descriptors: list[int], timeout_s: float) -> None:
        """Sends a message with descriptors. While too many of this user are on their way, it
        waits. Raises WaitTimeoutError, DaemonUnreachableError."""
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                self.socket.settimeout(_left(deadline))
                try:
                    socket.send_fds(self.socket, [message], descriptors, socket.MSG_NOSIGNAL)
                    return
                except OSError as error:
                    if error.errno != errno.ETOOMANYREFS:
                        raise
                time.sleep(DESCRIPTORS_RETRY_S)
        except OSError as error:
            raise self._error(error, timeout_s) from error

    def receive(
        self, timeout_s: float, *, number: int = 0, descriptors_max: int = 0
    ) -> tuple[dict[str, object], list[int]]:
        """Returns an answer with its descriptors, which the caller must close. With the `number` of
        a request it skips late answers to earlier requests.

        Raises WaitTimeoutError at the deadline, DaemonUnreachableError when the daemon ends before
        it answers, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                answer, descriptors = self._receive(deadline, descriptors_max)
                # 0: the daemon could not read the number
                if not number or answer.get("number") in (0, number):
                    return answer, descriptors
        except (OSError, ProtocolError) as error:
            if _says_why(error):
                raise
            raise self._error(error, timeout_s) from error

    def close(self) -> None:
        """Ends the connection. In a forked process it closes the copy of the socket only."""
        if self._process == os.getpid():
            # A process that was forked a moment ago may not have closed its copy yet.
            with contextlib.suppress(OSError):  # closed before
                self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _receive(
        self, deadline: float, descriptors_max: int
    ) -> tuple[dict[str, object], list[int]]:
        """Receives one message, which may come in several packets."""
        parts, descriptors = Reassembler(), array.array("i")
        plain: object | None = None
        try:
            while plain is None:
                self.socket.settimeout(_left(deadline))
                space = socket.CMSG_SPACE(descriptors_max * descriptors.itemsize)
                packet, ancillary, _flags, _address = self.socket.recvmsg(
                    PACKET_BYTES, space if descriptors_max else 0, socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                if not packet:
                    raise ConnectionResetError(errno.ECONNRESET, "the daemon hung up")
                plain = parts.feed(packet)
            if not isinstance(plain, dict):
                raise ProtocolError("$: a map is expected")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return plain, list(descriptors)

    def _error(self, error: BaseException, timeout_s: float) -> PccheckError:
        if isinstance(error, ProtocolError):
            return ProtocolError(
                f"{self.path} does not speak the protocol of a pccheckd ({error.message})"
            )
        if isinstance(error, TimeoutError):
            return WaitTimeoutError(
                f"the daemon at {self.path} did not answer within {timeout_s:g} s",
                hint="see its log: it may be stopped or overloaded",
            )
        return DaemonUnreachableError(
            f"the daemon at {self.path} closed the connection: {error}", hint=START_HINT
        )


def _says_why(error: BaseException) -> bool:
    """Whether users get it as it is. It is then not raised `from` itself: that would keep it, and
    with it the frames of all callers and what is in them, until Python collects cycles."""
    if isinstance(error, ProtocolError) and error.message.startswith("$"):
        return False
    return isinstance(error, PccheckError) or not isinstance(error, OSError)


def raise_failure(answer: dict[str, object]) -> None:
    """Raises the error of a `Failure` message; other messages pass."""
    if answer.get("t") == "failure":
        code, message, hint = (str(answer.get(key, "")) for key in ("code", "message", "hint"))
        raise error_from_wire(code, message, hint, bool(answer.get("retryable", False)))


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise RefusedError(
            f"the socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes",
            hint="start pccheckd with a shorter --socket, and connect to that",
        )
    try:
        while True:
            connection.settimeout(_left(deadline))
            try:
                connection.connect(path)
                return
            except BlockingIOError:  # the daemon's queue of connections is full at the moment
                time.sleep(CONNECT_RETRY_S)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        if os.path.isdir(path):  # noqa: PTH112 - see basics.py
            raise DaemonUnreachableError(
                f"{path} is a directory, not the socket of a pccheckd",
                hint=f"pass the socket itself, such as {path.rstrip('/')}/attach.sock",
            ) from error
        raise DaemonUnreachableError(f"no daemon listens at {path}", hint=START_HINT) from error
    except PermissionError as error:
        place = os.path.dirname(path)  # noqa: PTH120 - see basics.py
        raise RefusedError(
            f"uid {os.getuid()} may not use the socket {path}",
            hint=f"join the group of {place} and of the socket (pccheckd --group), or start a "
            "pccheckd of your own",
        ) from error
    except OSError as error:
        if error.errno in (errno.EPROTOTYPE, errno.ENOTSOCK):
            raise ProtocolError(f"{path} is not the socket of a pccheckd") from error
        raise


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return left


# -- whether the process that listens may be trusted with checkpoints ------------------------------
# The kernel reports its uid; for a socket from the service manager that is the manager's, root.


def require_trusted(connection: socket.socket, path: str | os.PathLike[str]) -> None:
    """Raises RefusedError unless the other end runs as this process's uid, as root, as the uid in
    PCCHECK_DAEMON_UID, or as a uid to which root gave the socket's directory."""
    _, uid, _ = credentials(connection)
    mine = os.geteuid()
    if uid in (0, mine, named_uid()) or placed_by_root(path, uid):
        return
    raise RefusedError(
        f"the process at {os.fspath(path)} runs as uid {uid}, which is neither yours ({mine}) nor "
        "root: it could read and replace your checkpoints, so the client does not connect",
        hint=f"if that daemon is trusted, set {VARIABLE}={uid}; else start your own, with its "
        "socket in a directory that only you can write to",
    )


def pid_of(connection: socket.socket) -> int:
    """The process that listens, by its number in this process's PID namespace; 0 when it has
    none."""
    return credentials(connection)[0]


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, uid and gid of the other end, as the kernel reports them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def named_uid() -> int | None:
    """Raises UsageError for a value that is not a number."""
    given = os.environ.get(VARIABLE, "")
    if not given:
        return None
    if not (given.isascii() and given.isdigit()):
        raise UsageError(f"{VARIABLE}={given[:40]!r} is not a uid", hint="set it to a number")
    return int(given)


def placed_by_root(path: str | os.PathLike[str], uid: int) -> bool:
    """Whether only root and `uid` can have put a socket there, in a directory that root made or
    gave to `uid`: every directory of the path is root's, or the last one `uid`'s, and no other user
    may write to any of them."""
    directory = os.path.dirname(os.path.join(os.getcwd(), path))  # noqa: PTH109, PTH118, PTH120
    owners = {0, uid}
    while True:
        try:
            # Trust in a link depends on its owner; the directory of the link is checked as well.
            found = (os.stat(directory), os.lstat(directory))  # noqa: PTH116
        except OSError:
            return False
        if any(one.st_uid not in owners for one in found):
            return False
        if found[0].st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        if directory == "/":
            return True
        directory, owners = os.path.dirname(directory), {0}  # noqa: PTH120
