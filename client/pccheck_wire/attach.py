"""The client's side of the attach socket, synchronous: handshake, descriptors, and requests over it
(trainers use ZeroMQ instead, so that a request never makes them wait). AF_UNIX SOCK_SEQPACKET.
Every call has a deadline; nothing here is thread-safe."""

from __future__ import annotations

import array
import errno
import os
import socket
import time
from pathlib import Path
from typing import Self

from . import codec
from .basics import PROTOCOL_VERSION, SAME_VERSION_HINT, START_HINT, socket_name
from .errors import (
    DaemonUnreachableError,
    PccheckError,
    ProtocolError,
    RefusedError,
    WaitTimeoutError,
    error_from_wire,
)
from .messages import Answer, Failure, Hello, Reply, Request, RequestBody, Role, Welcome
from .peer import require_trusted

CONNECT_LIMIT_S = 10.0
CONNECT_RETRY_S = 0.01
SOCKET_PATH_BYTES_MAX = 107  # Linux: sun_path without its final NUL


class Attachment:
    """A connection to the daemon after its handshake. It is the session: closing it ends that.

    `page_fd` and `link_fd` (-1 for observers) are for the native link, which duplicates them:
    `Link(attachment.link_fd, attachment.page_fd)`.
    """

    def __init__(
        self, connection: socket.socket, welcome: Welcome, descriptors: list[int], path: Path
    ) -> None:
        self.socket = connection
        self.welcome = welcome
        self.path = path
        self.page_fd, self.link_fd = descriptors if descriptors else (-1, -1)
        self._number = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    def request(self, body: RequestBody, *, timeout_s: float = 30.0) -> Answer:
        """Sends one request and returns its answer.

        Raises the daemon's failure, WaitTimeoutError at the deadline, DaemonUnreachableError when
        the daemon ends meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        self._number += 1
        message = codec.encode(Request(self._number, self.welcome.token, body))
        try:
            _send(self.socket, message, deadline)
            while True:
                parts = codec.Reassembler()
                plain = None
                while plain is None:
                    plain = parts.feed(_receive(self.socket, deadline)[0])
                reply = codec.from_plain(plain, Reply)
                if reply.number in (0, self._number):  # 0: the daemon could not read the number
                    break  # else: the late answer of a request that timed out
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"pccheckd (pid {self.welcome.pid}) did not answer within {timeout_s:g} s",
                hint="see in its log whether it is stopped or overloaded",
            ) from error
        except OSError as error:
            raise DaemonUnreachableError(
                f"pccheckd at {self.path} ended during a request: {error}", hint=START_HINT
            ) from error
        if isinstance(reply.body, Failure):
            raise raised(reply.body)
        return reply.body

    def close(self) -> None:
        self.socket.close()
        for descriptor in (self.page_fd, self.link_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.page_fd = self.link_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """See `basics.socket_name`."""
    return Path(socket_name(given))


def connect(
    hello: Hello,
    path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = CONNECT_LIMIT_S,
) -> Attachment:
    """Connects, sends `hello` and returns the session.

    Raises DaemonUnreachableError (nothing listens there), ProtocolError (another version),
    RefusedError (an untrusted process listens there), or the daemon's refusal; WaitTimeoutError
    when it does not answer in time.
    """
    where = socket_path(path)
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    descriptors: list[int] = []
    try:
        _connect(connection, where, deadline)
        require_trusted(connection, where)
        _send(connection, codec.encode(hello), deadline)
        packet, descriptors = _receive(connection, deadline, descriptors_max=2)
        answer = codec.decode_any(packet, Welcome, Failure)
        if isinstance(answer, Failure):
            raise raised(answer)
        assert isinstance(answer, Welcome)
        wanted = 0 if hello.role is Role.OBSERVER else 2
        if answer.protocol != PROTOCOL_VERSION or len(descriptors) != wanted:
            raise ProtocolError(
                f"pccheckd at {where} answered with protocol {answer.protocol} and "
                f"{len(descriptors)} descriptors, not {PROTOCOL_VERSION} and {wanted}",
                hint=SAME_VERSION_HINT,
            )
        return Attachment(connection, answer, descriptors, where)
    except BaseException as error:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, TimeoutError) and not isinstance(error, WaitTimeoutError):
            raise WaitTimeoutError(
                f"pccheckd at {where} did not answer within {timeout_s:g} s",
                hint="see in its log whether it is stopped or overloaded",
            ) from error
        if isinstance(error, OSError) and not isinstance(error, WaitTimeoutError):
            raise DaemonUnreachableError(
                f"pccheckd at {where} closed the connection: {error}", hint=START_HINT
            ) from error
        raise


def observe(
    path: str | os.PathLike[str] | None = None,
    *,
    version: str = "",
    timeout_s: float = CONNECT_LIMIT_S,
) -> Attachment:
    """An observer's session: requests only, no memory."""
    hello = Hello(PROTOCOL_VERSION, Role.OBSERVER, version, os.getpid())
    return connect(hello, path, timeout_s=timeout_s)


def _connect(connection: socket.socket, where: Path, deadline: float) -> None:
    if len(os.fsencode(where)) > SOCKET_PATH_BYTES_MAX:
        raise RefusedError(
            f"the socket path {where} is longer than {SOCKET_PATH_BYTES_MAX} bytes",
            hint="choose a shorter --socket for pccheckd, and the same socket= here",
        )
    try:
        while True:
            connection.settimeout(_left(deadline))
            try:
                connection.connect(os.fspath(where))
                return
            except BlockingIOError:  # its queue of connections is full at the moment
                time.sleep(CONNECT_RETRY_S)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        raise DaemonUnreachableError(f"no daemon listens at {where}", hint=START_HINT) from error
    except PermissionError as error:
        raise RefusedError(
            f"uid {os.getuid()} has no permission to use the socket {where}",
            hint=f"join the group of {where.parent}, or start your own pccheckd",
        ) from error
    except OSError as error:
        if error.errno in (errno.EPROTOTYPE, errno.ENOTSOCK):
            raise ProtocolError(
                f"{where} is not a socket of pccheckd",
                hint="see which path pccheckd has as --socket",
            ) from error
        raise


def _send(connection: socket.socket, message: bytes, deadline: float) -> None:
    connection.settimeout(_left(deadline))
    connection.send(message, socket.MSG_NOSIGNAL)


def _receive(
    connection: socket.socket, deadline: float, *, descriptors_max: int = 0
) -> tuple[bytes, list[int]]:
    """One packet and its descriptors; more of them than expected are dropped by the kernel."""
    connection.settimeout(_left(deadline))
    room = socket.CMSG_SPACE(descriptors_max * array.array("i").itemsize) if descriptors_max else 0
    packet, ancillary, _flags, _address = connection.recvmsg(
        codec.PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not packet:
        raise ConnectionResetError(errno.ECONNRESET, "pccheckd closed the connection")
    return packet, list(descriptors)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return left


def raised(failure: Failure) -> PccheckError:
    """The exception that the daemon's failure stands for."""
    return error_from_wire(failure.code, failure.message, failure.hint, failure.retryable)
