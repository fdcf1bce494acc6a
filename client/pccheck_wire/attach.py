"""The client's side of the attach socket, synchronous: handshake, descriptors, and requests over it
(trainers use ZeroMQ instead, so that a request never blocks them). AF_UNIX SOCK_SEQPACKET.
Every call has a deadline. Nothing here is thread-safe."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

from . import codec
from .basics import PROTOCOL_VERSION, SAME_VERSION_HINT, Closing, socket_name
from .connection import DaemonSocket, pid_of, raise_failure
from .errors import ProtocolError, WaitTimeoutError, error_from_wire
from .messages import Answer, Failure, Hello, Lend, Reply, Request, RequestBody, Role, Welcome

CONNECT_LIMIT_S = 10.0


class Attachment(Closing):
    """A connection to the daemon after its handshake. Closing the connection ends the session.

    `page_fd` and `memory_fd` (-1 for observers) are for the native client, which duplicates them:
    `Client(attachment.memory_fd, attachment.page_fd)`.
    """

    def __init__(self, connection: DaemonSocket, welcome: Welcome, descriptors: list[int]) -> None:
        self.welcome = welcome
        self.path = Path(connection.path)
        self.page_fd, self.memory_fd = descriptors if descriptors else (-1, -1)
        self._connection = connection
        self._number = 0

    @property
    def socket(self) -> socket.socket:
        return self._connection.socket

    @property
    def daemon_pid(self) -> int:
        """As this process sees it; 0 in another PID namespace."""
        return pid_of(self.socket)

    def request(self, body: RequestBody, *, timeout_s: float = 30.0) -> Answer:
        """Sends one request and returns its answer. Raises what `send` and `receive` do."""
        return self.receive(self.send(body, timeout_s=timeout_s), timeout_s=timeout_s)

    def send(
        self, body: RequestBody, *, token: bytes = b"", is_answered: bool = True,
        timeout_s: float = 30.0,
    ) -> int:  # fmt: skip
        """The number of the request. `token`: of another session of this user, for which it is.
        Raises WaitTimeoutError, DaemonUnreachableError."""
        self._number += 1
        number = self._number if is_answered else 0
        message = codec.encode(Request(number, token or self.welcome.token, body))
        self._connection.send(message, timeout_s)
        return number

    def lend(self, number: int, descriptors: list[int], *, timeout_s: float) -> None:
        """Sends descriptors of GPU memory for the exposure of this number; the caller closes them.
        Raises what `send` does."""
        body = Lend(number, len(descriptors))
        message = codec.encode(Request(0, self.welcome.token, body))
        self._connection.send_with(message, descriptors, timeout_s)

    def receive(self, number: int, *, timeout_s: float) -> Answer:
        """The answer to a request; late answers to earlier requests are skipped.

        Raises the daemon's failure, WaitTimeoutError at the deadline, DaemonUnreachableError when
        the daemon ends before it answers.
        """
        plain, _ = self._connection.receive(timeout_s, number=number)
        answer = codec.from_plain(plain, Reply).body
        if isinstance(answer, Failure):
            raise error_from_wire(answer.code, answer.message, answer.hint, answer.retryable)
        return answer

    def close(self) -> None:
        self._connection.close()
        open_fds = {self.page_fd, self.memory_fd} - {-1}
        self.page_fd = self.memory_fd = -1  # before: Ctrl-C must not close a number twice
        for descriptor in open_fds:
            os.close(descriptor)


class Attempt:
    """A connection that has sent `Hello`. The answer may be waited for more than once."""

    def __init__(
        self, hello: Hello, path: str | os.PathLike[str] | None = None, *,
        timeout_s: float = CONNECT_LIMIT_S,
    ) -> None:  # fmt: skip
        """Raises DaemonUnreachableError (no process listens), RefusedError (the listening process
        is not trusted), WaitTimeoutError."""
        self._descriptors_wanted = 0 if hello.role is Role.OBSERVER else 2
        self._connection = DaemonSocket(socket_name(path), timeout_s=timeout_s)
        try:
            self._connection.send(codec.encode(hello), timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def answered(self) -> bool:
        """Whether `finish` would not wait: an answer has come, or the daemon has ended."""
        arrivals = select.poll()
        arrivals.register(self._connection.socket, select.POLLIN)
        return bool(arrivals.poll(0))

    def finish(self, *, timeout_s: float) -> Attachment:
        """Raises WaitTimeoutError, and may then be called again. After another error the attempt is
        over: ProtocolError (another version), DaemonUnreachableError when the daemon ends, the
        error with which the daemon refuses."""
        descriptors: list[int] = []
        try:
            plain, descriptors = self._connection.receive(timeout_s, descriptors_max=2)
            raise_failure(plain)
            welcome = codec.from_plain(plain, Welcome)
            if welcome.protocol != PROTOCOL_VERSION or len(descriptors) != self._descriptors_wanted:
                raise ProtocolError(
                    f"the daemon at {self._connection.path} answered with protocol "
                    f"{welcome.protocol} and {len(descriptors)} descriptors, not "
                    f"{PROTOCOL_VERSION} and {self._descriptors_wanted}",
                    hint=SAME_VERSION_HINT,
                )
            return Attachment(self._connection, welcome, descriptors)
        except WaitTimeoutError:
            raise
        except BaseException:
            self.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        self._connection.close()


def connect(
    hello: Hello, path: str | os.PathLike[str] | None = None, *, timeout_s: float = CONNECT_LIMIT_S
) -> Attachment:
    """Connects, sends `Hello` and returns the session. Raises the errors of `Attempt`."""
    attempt = Attempt(hello, path, timeout_s=timeout_s)
    try:
        return attempt.finish(timeout_s=timeout_s)
    except WaitTimeoutError:
        attempt.close()
        raise


def observe(
    path: str | os.PathLike[str] | None = None,
    *,
    version: str = "",
    timeout_s: float = CONNECT_LIMIT_S,
    storage: str = "",
) -> Attachment:
    """An observer's session: requests only, no memory."""
    hello = Hello(PROTOCOL_VERSION, Role.OBSERVER, version, os.getpid(), storage=storage)
    return connect(hello, path, timeout_s=timeout_s)
