"""The one place that speaks to the daemon: attach, the native link, and ZeroMQ for requests."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import threading
import time
from collections.abc import Callable

import zmq

from pccheck_native import Link
from pccheck_wire import attach, codec
from pccheck_wire.basics import START_HINT
from pccheck_wire.errors import (
    DaemonUnreachableError,
    PccheckError,
    ProtocolError,
    RefusedError,
    WaitTimeoutError,
    error_from_wire,
)
from pccheck_wire.messages import Failure, Hello, Reply, ReplyBody, Request, RequestBody

BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 5.0
#: After a daemon that is there but does not answer: an attempt costs training time.
BACKOFF_SLOW_S = 30.0
RETRY_CONNECT_S = 2.0
#: Descriptors that have to be free: libzmq ends the process when it gets none.
FILES_FREE = 32
#: How long a thread that waits for its answer sleeps, should another thread have taken it.
_POLL_MS = 10
_WAITING_MAX = 64

Callback = Callable[[ReplyBody], None]


#: One per process, by its id, and never destroyed: a context that is garbage together with its
#: socket would wait for that socket for ever.
_CONTEXTS: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    made = _CONTEXTS.get(os.getpid())
    if made is None:
        made = _CONTEXTS[os.getpid()] = zmq.Context()
    return made


class Connection:
    """One session with one daemon. Its parts end together; methods are thread-safe."""

    def __init__(self, attachment: attach.Attachment, *, saves_alone: bool = True) -> None:
        self.welcome = attachment.welcome
        self.path = attachment.path
        self.pid = os.getpid()
        self.saves_alone = saves_alone  #: no other rank's checkpoint belongs to its own
        self.load_broken_off = False  #: by Ctrl-C; the daemon may still be at it
        self._attachment = attachment
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callback] = {}
        self._snapshots = itertools.count(1)
        self._loads = itertools.count(1)
        self._break_count = 0
        with contextlib.ExitStack() as undo:  # an attempt that fails leaves no descriptor open
            undo.callback(attachment.close)
            self.link = Link(attachment.link_fd, attachment.page_fd)
            undo.callback(self.link.close)
            self._socket: zmq.Socket[bytes] = _context().socket(zmq.DEALER)
            undo.callback(self._socket.close, 0)
            self._socket.linger = 0
            self._breaks = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            undo.callback(self._breaks.close, 0)
            self._socket.connect(attachment.welcome.endpoint)
            undo.pop_all()

    def next_snapshot(self) -> int:
        return next(self._snapshots)

    def next_load(self) -> int:
        return next(self._loads)

    def alive(self) -> bool:
        """About a microsecond; False once the daemon or this session has ended."""
        try:
            return os.getpid() == self.pid and self.link.alive()
        except ValueError:  # closed
            return False

    def request(self, body: RequestBody, *, timeout_s: float) -> ReplyBody:
        """Waits for the answer. Raises the daemon's failure, WaitTimeoutError,
        DaemonUnreachableError when it ends meanwhile, or the front that request or answer is in."""
        answers: list[ReplyBody] = []
        deadline = time.monotonic() + timeout_s
        with self._lock:
            number = self._send(body, answers.append)
            breaks = self._break_count
            arrivals = select.poll()
            arrivals.register(int(self._socket.get(zmq.FD)), select.POLLIN)
        try:
            while not answers:
                with self._lock:  # not while it waits: a training thread may want to send
                    # Asked first: an answer that came before still counts.
                    broke, alive = self._count_breaks() != breaks, self.alive()
                    self.pump()
                if answers:
                    break
                if not alive:
                    raise self.gone()
                if broke:
                    raise DaemonUnreachableError(
                        "pccheckd's process that takes this user's requests has ended, and the "
                        "request with it",
                        hint="try again; pccheckd starts another one, and its log says why",
                    )
                if time.monotonic() >= deadline:
                    raise WaitTimeoutError(
                        f"pccheckd (pid {self.welcome.pid}) did not answer within {timeout_s:g} s",
                        hint="is it stopped or overloaded? its log tells",
                    )
                arrivals.poll(_POLL_MS)
        finally:
            self._waiting.pop(number, None)
        if isinstance(answers[0], Failure):
            found = answers[0]
            raise error_from_wire(found.code, found.message, found.hint, found.retryable)
        return answers[0]

    def post(self, body: RequestBody) -> None:
        """Sends without wanting an answer. Never blocks."""
        with self._lock:
            self._send(body, None)

    def ask(self, body: RequestBody, callback: Callback) -> None:
        """Sends; the callback runs in a later `pump`, if an answer comes. Never blocks."""
        with self._lock:
            while len(self._waiting) >= _WAITING_MAX:  # answers that will not come any more
                self._waiting.pop(next(iter(self._waiting)))
            self._send(body, callback)

    def pump(self) -> None:
        """Takes the answers that have arrived."""
        with self._lock:
            while self._waiting:  # nothing comes unasked
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                except zmq.ZMQError as error:  # closed by another thread
                    raise self.gone() from error
                reply = codec.decode(frames[-1], Reply, bytes_max=codec.REPLY_BYTES_MAX)
                callback = self._waiting.pop(reply.number, None)
                if callback is not None:
                    callback(reply.body)

    def _send(self, body: RequestBody, callback: Callback | None) -> int:
        self._count_breaks()  # nothing of this one's
        number = next(self._numbers) if callback else 0
        data = codec.encode(Request(number, self.welcome.token, body))
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again as error:
            raise WaitTimeoutError("the daemon does not take requests any more") from error
        except zmq.ZMQError as error:
            raise self.gone() from error
        if callback is not None:
            self._waiting[number] = callback
        return number

    def _count_breaks(self) -> int:
        """How often the way to the daemon has been interrupted. libzmq makes another one by itself;
        what was under way is lost."""
        with contextlib.suppress(zmq.ZMQError):  # no more of them
            while True:
                self._breaks.recv_multipart(zmq.NOBLOCK)
                self._break_count += 1
        return self._break_count

    def gone(self) -> DaemonUnreachableError:
        return DaemonUnreachableError(
            f"the pccheckd at {self.path} (pid {self.welcome.pid}) has ended",
            hint=START_HINT,
        )

    def close(self) -> None:
        """Ends the session. What the link had not handed over is lost."""
        with self._lock:
            self.link.close()
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._breaks.close(0)
            self._socket.close(0)
            self._attachment.close()

    def forget_in_child(self) -> None:
        """In a forked child: lets the sockets go, so that the parent's end is noticed."""
        with contextlib.suppress(OSError):
            os.close(self._attachment.socket.detach())
            os.close(self._attachment.link_fd)
            os.close(self._attachment.page_fd)


class Transport:
    """Keeps a connection; connects again with back-off when it broke."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        hello: Callable[[], Hello],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = attach.socket_path(path)
        self.error: PccheckError | None = None  #: why there is no connection
        self._hello = hello
        self._clock = clock
        self._connection: Connection | None = None
        self._delay_s = BACKOFF_FIRST_S
        self._next_try = 0.0

    def current(self) -> Connection | None:
        """The connection, if it lives."""
        connection = self._connection
        return connection if connection is not None and connection.alive() else None

    def drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.error = connection.gone()
            connection.close()

    def may_try(self) -> bool:
        return self._clock() >= self._next_try

    def connect(self, *, timeout_s: float) -> Connection:
        """Connects now. Raises PccheckError, and remembers it and when to try again."""
        self.drop()
        try:
            _require_files()
            hello = self._hello()
            self._connection = Connection(
                attach.connect(hello, self.path, timeout_s=timeout_s),
                saves_alone=hello.solo or hello.world_size == 1,
            )
        except (PccheckError, OSError, zmq.ZMQError) as error:
            self.error = _as_ours(error)
            slow = not isinstance(self.error, DaemonUnreachableError)
            self._next_try = self._clock() + (BACKOFF_SLOW_S if slow else self._delay_s)
            self._delay_s = min(2 * self._delay_s, BACKOFF_LAST_S)
            if self.error is error:
                raise
            raise self.error from error
        self.error = None
        self._delay_s, self._next_try = BACKOFF_FIRST_S, 0.0
        return self._connection

    def forget_in_child(self) -> None:
        if self._connection is not None:
            self._connection.forget_in_child()


def _require_files() -> None:
    """Raises RefusedError while this process is about to run out of descriptors."""
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(held) < FILES_FREE:
            held.append(os.dup(held[0]))
    except OSError as error:
        raise RefusedError(
            f"this process has fewer than {FILES_FREE} files left to open: {error.strerror}",
            hint="raise its limit: ulimit -n",
            retryable=True,
        ) from error
    finally:
        for descriptor in held:
            os.close(descriptor)


def _as_ours(error: Exception) -> PccheckError:
    if isinstance(error, PccheckError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE):
        return DaemonUnreachableError(f"the daemon hung up: {error}", hint=START_HINT)
    return ProtocolError(f"the session could not be set up: {error}")
