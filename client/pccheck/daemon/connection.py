"""One connection to a daemon: the attach socket, the native client, and ZeroMQ for requests."""

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

from pccheck_native import Client
from pccheck_wire import attach, codec, messages, packing
from pccheck_wire.basics import START_HINT
from pccheck_wire.errors import (
    DaemonUnreachableError,
    PccheckError,
    RefusedError,
    RequestLostError,
    WaitTimeoutError,
    error_from_wire,
)
from pccheck_wire.messages import Failure, Reply, ReplyBody, Request, RequestBody

#: How long a thread sleeps while it waits: another thread may have received its answer.
_POLL_MS = 10
#: A thread that wakes so late: this process was stopped. That time does not count.
_STOPPED_S = 1.0
_WAITING_MAX = 64
#: libzmq starts two threads, and ends the process when it cannot.
THREADS_FREE = 3
#: Descriptors that have to be free: libzmq ends the process when it gets none.
FILES_FREE = 32

Callback = Callable[[ReplyBody], None]

#: Asked twice, these do what they do when they are asked once.
_REPEATABLE = (
    messages.Describe, messages.Goodbye, messages.ListVolumes, messages.Open, messages.Pin,
    messages.Restored,
)  # fmt: skip

#: By process id, never destroyed: a context that is collected with its socket waits for ever.
_CONTEXTS: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Raises where libzmq would end the process: OSError when the process has no threads left for
    it, RefusedError in a sandbox that forbids what every thread of it does."""
    made = _CONTEXTS.get(os.getpid())
    if made is None:
        _require_threads()
        _require_scheduling()
        made = _CONTEXTS[os.getpid()] = zmq.Context()
        made.socket(zmq.DEALER).close(0)  # starts its threads, now that there are some
    return made


def _require_threads() -> None:
    """Raises OSError EAGAIN when this process can start fewer than THREADS_FREE threads."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        while len(started) < THREADS_FREE:
            thread = threading.Thread(target=end.wait, name="pccheck-room", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    finally:
        end.set()
        for thread in started:
            thread.join()


def _require_scheduling() -> None:
    """Raises RefusedError when threads must not set their scheduling policy, even as it is."""
    try:
        os.sched_setscheduler(0, os.sched_getscheduler(0), os.sched_getparam(0))
    except OSError as error:
        raise RefusedError(
            "cannot connect: this process may not set the scheduling policy of its threads "
            f"({error.strerror})",
            hint="allow sched_getparam and sched_setscheduler in its sandbox (seccomp profile, "
            "SystemCallFilter= of its unit)",
            retryable=True,
        ) from error


def require_files() -> None:
    """Raises RefusedError when this process is about to run out of descriptors."""
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(held) < FILES_FREE:
            held.append(os.dup(held[0]))
    except OSError as error:
        raise RefusedError(
            f"cannot connect: this process can open fewer than {FILES_FREE} more files "
            f"({error.strerror})",
            hint="raise the limit: ulimit -n",
            retryable=True,
        ) from error
    finally:
        for descriptor in held:
            os.close(descriptor)


class Connection:
    """One session with one daemon. Its parts end together; methods are thread-safe."""

    def __init__(self, attachment: attach.Attachment, *, saves_alone: bool = True) -> None:
        self.welcome = attachment.welcome
        self.path = attachment.path
        self.pid = os.getpid()
        self.saves_alone = saves_alone  #: no other rank's checkpoint belongs to its own
        self.load_broken_off = False  #: by Ctrl-C; the daemon may still be reading
        self._attachment = attachment
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callback] = {}
        self.snapshots, self.loads = itertools.count(1), itertools.count(1)  #: their numbers
        self.steps: dict[int, int] = {}  #: of the snapshots that have an entry in the page
        self._break_count = 0
        with contextlib.ExitStack() as undo:  # an attempt that fails leaves no descriptor open
            undo.callback(attachment.close)
            self.native = Client(attachment.memory_fd, attachment.page_fd)
            undo.callback(self.native.close)
            self._socket: zmq.Socket[bytes] = _context().socket(zmq.DEALER)
            undo.callback(self._socket.close, 0)
            self._socket.linger = 0
            self._breaks = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            undo.callback(self._breaks.close, 0)
            self._socket.connect(attachment.welcome.endpoint)
            undo.pop_all()

    def alive(self) -> bool:
        """About a microsecond; False once the daemon or this session has ended."""
        try:
            return os.getpid() == self.pid and self.native.alive()
        except ValueError:  # closed
            return False

    def has_to_make_way(self) -> bool:
        """Whether a snapshot of this process is about to be taken (`MakeWay`): nothing else comes
        over this socket. About a microsecond."""
        arrivals = select.poll()  # select() refuses descriptors from 1024 on
        try:
            arrivals.register(self._attachment.socket, select.POLLIN)
            return bool(arrivals.poll(0)) and self.alive()
        except (OSError, ValueError):  # closed
            return False

    def request(self, body: RequestBody, *, timeout_s: float) -> ReplyBody:
        """Waits for the answer. A request that was lost is sent again where that is safe.

        Raises the daemon's failure, WaitTimeoutError, DaemonUnreachableError when the daemon ends
        meanwhile, and RequestLostError."""
        answers: list[ReplyBody] = []
        deadline = time.monotonic() + timeout_s
        with self._lock:
            breaks = self._count_breaks()  # those before the request do not count
            number = self._send(body, answers.append)
            arrivals = select.poll()
            try:
                arrivals.register(int(self._socket.get(zmq.FD)), select.POLLIN)
            except zmq.ZMQError as error:  # closed by a signal handler
                raise self.gone() from error
        try:
            while not answers:
                with self._lock:  # not while it waits: a training thread may want to send
                    # These come first: an answer that arrived before the end still counts.
                    broke, alive = self._count_breaks() != breaks, self.alive()
                    self.pump()
                if answers:
                    break
                if not alive:
                    raise self.gone()
                if broke and isinstance(body, _REPEATABLE):
                    with self._lock:
                        self._waiting.pop(number, None)
                        breaks = self._count_breaks()
                        number = self._send(body, answers.append)
                elif broke:
                    raise RequestLostError(
                        "pccheckd's process for this user's requests ended during a request",
                        hint="try again: unless pccheckd itself has ended, it starts another one, "
                        "and its log has the reason",
                    )
                before = time.monotonic()
                if before >= deadline:
                    raise WaitTimeoutError(
                        f"pccheckd (pid {self.welcome.pid}) did not answer within {timeout_s:g} s",
                        hint="see whether it is stopped or overloaded: pccheckctl status",
                    )
                arrivals.poll(_POLL_MS)
                slept_s = time.monotonic() - before
                deadline += slept_s if slept_s > _STOPPED_S else 0
        finally:
            self._waiting.pop(number, None)
        if isinstance(answers[0], Failure):
            found = answers[0]
            raise error_from_wire(found.code, found.message, found.hint, found.retryable)
        return answers[0]

    def post(self, body: RequestBody) -> None:
        """Sends what needs no answer. Never blocks."""
        with self._lock:
            self._send(body, None)

    def lend(self, number: int, descriptors: list[int], *, timeout_s: float) -> None:
        """As `Attachment.lend`. Training thread only."""
        self._attachment.lend(number, descriptors, timeout_s=timeout_s)

    def ask(self, body: RequestBody, callback: Callback) -> None:
        """Sends; the callback runs in a later `pump`, if an answer comes. Never blocks."""
        with self._lock:
            while len(self._waiting) >= _WAITING_MAX:  # answers that were lost
                self._waiting.pop(min(self._waiting, default=0), None)
            self._send(body, callback)

    def pump(self) -> None:
        """Handles the answers that have arrived."""
        with self._lock:
            while self._waiting:  # nothing arrives without a request
                try:
                    # In one operation: a signal handler that comes between two frames would
                    # receive the second one. A reply has one frame.
                    data = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return
                except zmq.ZMQError as error:  # closed by another thread
                    raise self.gone() from error
                reply = codec.decode(data, Reply, bytes_max=packing.REPLY_BYTES_MAX)
                callback = self._waiting.pop(reply.number, None)
                if callback is not None:
                    callback(reply.body)

    def _send(self, body: RequestBody, callback: Callback | None) -> int:
        number = next(self._numbers) if callback else 0
        data = codec.encode(Request(number, self.welcome.token, body))
        if callback is not None:  # before it is sent: a signal handler may receive the answer
            self._waiting[number] = callback
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._waiting.pop(number, None)
            if isinstance(error, zmq.Again):
                raise WaitTimeoutError(
                    "the daemon accepts no more requests", hint="see: pccheckctl status"
                ) from error
            raise self.gone() from error
        return number

    def _count_breaks(self) -> int:
        """How often the connection to the daemon's endpoint has broken. libzmq connects again by
        itself; requests in flight are lost."""
        with contextlib.suppress(zmq.ZMQError):  # no more of them
            while True:
                self._breaks.recv_multipart(zmq.NOBLOCK)
                self._break_count += 1
        return self._break_count

    def gone(self) -> PccheckError:
        """Why this connection does not live any more."""
        with contextlib.suppress(ValueError):  # closed
            if self.native.unmapped:
                return RefusedError(
                    "this process cannot map the daemon's memory: "
                    f"{os.strerror(self.native.unmapped)}",
                    hint="raise the limit: ulimit -v, or vm.max_map_count", retryable=True,
                )  # fmt: skip
        return DaemonUnreachableError(
            f"pccheckd at {self.path} (pid {self.welcome.pid}) has ended", hint=START_HINT
        )

    def close(self) -> None:
        """Ends the session, in spite of Ctrl-C; may be called again. The core's rest is lost."""
        with self._lock, contextlib.ExitStack() as ends:  # the last one comes first
            ends.callback(self._attachment.close)
            ends.callback(self._socket.close, 0)
            ends.callback(self._breaks.close, 0)
            ends.enter_context(contextlib.suppress(zmq.ZMQError))
            ends.callback(self._socket.disable_monitor)
            ends.callback(self.native.close)

    def forget_in_child(self) -> None:
        """In a forked child: closes the sockets, so that the daemon notices the parent's end."""
        with contextlib.suppress(OSError):
            os.close(self._attachment.socket.detach())
            os.close(self._attachment.memory_fd)
            os.close(self._attachment.page_fd)
