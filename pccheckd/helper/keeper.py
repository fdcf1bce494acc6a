"""The daemon's side of helpers: child processes of one uid each, whose bytes are not trusted,
started again when they end. There are two kinds: fronts (`pccheckd/front/`) and peer servers
(`pccheckd/peer/`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from pccheck_wire.errors import RefusedError
from pccheck_wire.packing import REPLY_BYTES_MAX
from pccheckd.base.background import Background, Tasks
from pccheckd.base.logs import LOG

from . import framing

REQUESTS_IN_PROGRESS_MAX = 256
#: Answers of one uid that wait for its helper: room for two of the largest.
ANSWERS_BYTES_MAX = 2 * REPLY_BYTES_MAX
READ_BYTES = 64 * 1024
START_LIMIT_S = 30.0
#: How long a new session waits for a helper, to report one that cannot start. Then it begins
#: without one, since its peer's handshake has a limit: its requests wait at the endpoint.
READY_WAIT_S = 0.5
#: A helper that accepts no answer for this long is stopped or hangs.
SEND_LIMIT_S = 10.0
END_LIMIT_S = 5.0
#: Between two starts; doubled with every helper that did not last, up to PAUSE_LAST_S.
PAUSE_FIRST_S, PAUSE_LAST_S = 0.1, 30.0
LASTED_S = 60.0
STEP_S = 0.1
_SAID_BYTES = 4096
_SAID_LETTERS = 160
#: All that a helper needs of the environment; no arena per thread, which would take address space.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
#: Explanations for operators, by the last words of the process.
_MEANINGS = {
    "Too many open files": "a process of this user opens too many connections to it",
    "MemoryError": "a process of this user filled its memory up to the limit",
    "bad_alloc": "a process of this user filled its memory up to the limit",
    "OUT OF MEMORY": "a process of this user filled its memory up to the limit",
}


class Handed(NamedTuple):
    """An answer with a file, which goes to the helper."""

    message: bytes
    descriptor: int  # it is closed when it was sent, or could not be


#: The answer to a request of a uid, None for no answer. Never raises.
Handle = Callable[[int, bytes], Awaitable[bytes | Handed | None]]


class HelperKind(NamedTuple):
    """What runs in a helper."""

    module: str  # its arguments: confine.HelperArguments, then `more`
    does: str  # "receives requests": for the log and for people
    without: str  # what still works while there is none
    request_bytes_max: int
    more: tuple[str, ...] = ()
    secret: bytes = b""  # on its standard input
    takes_files: bool = False  # answers may be `Handed`


class HelperProcess:
    """One child process, from its start to its end."""

    def __init__(
        self, kind: HelperKind, process: subprocess.Popen[bytes], link: socket.socket,
        hand: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """`link` carries frames, `hand` descriptors."""
        self.pid = process.pid
        self._hand = hand
        self._kind = kind
        self._process = process
        self._link = link
        self._writer: asyncio.StreamWriter | None = None
        self._writing = asyncio.Lock()
        self._unsent_bytes = 0
        self._trouble = ""  # why it was dropped

    async def connect(self) -> asyncio.StreamReader | None:
        """Where to read requests, once it serves; None when it does not get ready."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link, limit=READ_BYTES)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                first = await reader.readexactly(len(framing.READY))
        except TimeoutError:
            self.drop("not ready in time")
            return None
        except (OSError, EOFError):
            return None
        if first != framing.READY:
            self.drop("its first message was not READY")
            return None
        return reader

    async def serve(
        self,
        reader: asyncio.StreamReader,
        take: Callable[[HelperProcess, bytes, bytes], Awaitable[None]],
    ) -> None:
        """Passes every request to `take`, which may make it wait, until the process ends or
        violates the protocol."""
        frames = framing.Unpacker(self._kind.request_bytes_max)
        try:
            while data := await reader.read(READ_BYTES):
                for identity, request in frames.feed(data):
                    if not identity:
                        raise framing.FramingError("a request does not name its sender")
                    await take(self, identity, request)
        except framing.FramingError as error:
            self.drop(f"it sent an invalid request: {error}")
        except OSError:
            pass  # it has ended

    async def answer(self, identity: bytes, answer: bytes | Handed) -> None:
        """Answers to a peer that does not read are dropped."""
        if isinstance(answer, Handed):
            self._give(identity, answer.descriptor)
            answer = answer.message
        await self._send(identity, answer)

    def _give(self, identity: bytes, descriptor: int) -> None:
        """Before the answer, so that it is there when the answer is read."""
        assert self._hand is not None
        try:
            socket.send_fds(self._hand, [identity], [descriptor], socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.drop("it did not accept descriptors")
        except OSError:
            pass  # it has ended
        finally:
            os.close(descriptor)

    async def _send(self, identity: bytes, message: bytes) -> None:
        if self._unsent_bytes + len(message) > ANSWERS_BYTES_MAX:
            LOG.warning(
                "the process that %s (pid %d) reads too slowly: an answer is lost",
                self._kind.does, self.pid,
            )  # fmt: skip
            return
        self._unsent_bytes += len(message)
        try:
            async with self._writing:
                if self._writer is None or self._writer.is_closing():
                    return
                async with asyncio.timeout(SEND_LIMIT_S):
                    self._writer.write(framing.pack(identity, message))
                    await self._writer.drain()
        except TimeoutError:
            self.drop("it did not accept answers")
        except OSError:
            pass  # it has ended
        finally:
            self._unsent_bytes -= len(message)

    def drop(self, trouble: str) -> None:
        """Ends it, for a reason; `serve` returns."""
        self._trouble = self._trouble or trouble
        self._kill()

    async def end(self) -> str:
        """It has ended on return; why it ended, as far as is known."""
        self._kill()
        await asyncio.sleep(0)  # what it had sent is read first
        until = time.monotonic() + END_LIMIT_S
        while self._process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.01)
        words = _last_words(self._process)
        if self._trouble:
            return self._trouble
        meaning = next((text for word, text in _MEANINGS.items() if word in words), "")
        return "; ".join(filter(None, (meaning, _how(self._process.returncode), words)))

    def _kill(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._link.close()
        if self._hand is not None:
            self._hand.close()
        with contextlib.suppress(OSError):  # of another uid, without CAP_KILL: it reads the end
            self._process.kill()


class Keeper(Background):
    """Keeps a helper for one uid."""

    def __init__(
        self, kind: HelperKind, uid: int, gid: int, listeners: Sequence[socket.socket],
        threads: Executor, handle: Handle,
    ) -> None:  # fmt: skip
        self.restarts = 0
        self._kind = kind
        self._uid, self._gid = uid, gid
        self._listeners = listeners
        self._threads = threads
        self._handle = handle
        self._trouble = ""  # why there has been no process yet
        self._decided = asyncio.Event()  # set once one has served, or could not start
        self._process: HelperProcess | None = None
        self._room = asyncio.Semaphore(REQUESTS_IN_PROGRESS_MAX)
        self._work = Tasks(f"requests of uid {uid}")

    @property
    def serves(self) -> bool:
        """Whether there is a process now."""
        return self._process is not None

    async def ready(self) -> None:
        """Returns once a process has served, or after a moment. Raises RefusedError when none
        could be started so far."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_S):
                await self._decided.wait()
        if self._trouble:
            raise RefusedError(
                f"the process that {self._kind.does} could not be started: {self._trouble}",
                hint="see pccheckd's log; try again",
                retryable=True,
            )

    async def close(self) -> None:
        """Ends the process; requests in progress are dropped."""
        for listener in self._listeners:
            listener.close()
        await super().close()
        await self._work.cancel()

    async def _run(self) -> None:
        pause_s = PAUSE_FIRST_S
        while True:
            began = time.monotonic()
            try:
                reason = await self._one()
            except Exception as error:  # the edge of this uid: it goes without for a while
                LOG.exception("uid %d: no process %s", self._uid, self._kind.does)
                reason = str(error)
            if time.monotonic() - began >= LASTED_S:
                pause_s = PAUSE_FIRST_S
            LOG.warning(
                "uid %d: the process that %s ended: %s. Another one starts in %g s; %s",
                self._uid, self._kind.does, reason, pause_s, self._kind.without,
            )  # fmt: skip
            self.restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_LAST_S)

    async def _one(self) -> str:
        """One process's life; why it ended."""
        try:
            process = await self._start()
        except OSError as error:
            return self._failed(str(error))
        served = False
        try:
            reader = await process.connect()
            if reader is not None:
                served = True
                self._process, self._trouble = process, ""
                self._decided.set()
                LOG.debug("uid %d: pid %d %s", self._uid, process.pid, self._kind.does)
                await process.serve(reader, self._take)
        finally:
            self._process = None
            reason = await process.end()
        return reason if served else self._failed(reason)

    def _failed(self, trouble: str) -> str:
        """None could start: reports that to sessions that wait for the first one."""
        if self._trouble or not self._decided.is_set():
            self._trouble = trouble
            self._decided.set()
        return trouble

    async def _start(self) -> HelperProcess:
        started = self._threads.submit(_spawn, self._kind, self._uid, self._gid, self._listeners)
        try:
            return HelperProcess(self._kind, *await asyncio.wrap_future(started))
        except asyncio.CancelledError:
            started.add_done_callback(_discard)
            raise

    async def _take(self, process: HelperProcess, identity: bytes, request: bytes) -> None:
        """Waits for a free place; meanwhile the process is not read, and reads nothing from its
        peers. Takes one request in a pass of the loop, which other users wait for."""
        await self._room.acquire()
        self._work.spawn(self._answer(process, identity, request))
        await asyncio.sleep(0)

    async def _answer(self, process: HelperProcess, identity: bytes, request: bytes) -> None:
        try:
            answer = await self._handle(self._uid, request)
            if answer is not None:
                await process.answer(identity, answer)
        finally:
            self._room.release()


def _spawn(
    kind: HelperKind, uid: int, gid: int, listeners: Sequence[socket.socket]
) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket | None]:
    """In a thread that lives as long as the daemon: the child ends with its parent thread."""
    with contextlib.ExitStack() as theirs:
        link, their_link = socket.socketpair()
        given = [*listeners, theirs.enter_context(their_link)]
        hand, their_hand = None, -1
        if kind.takes_files:
            hand, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given.append(theirs.enter_context(other))
            their_hand = other.fileno()
        places = ",".join(str(one.fileno()) for one in listeners)
        command = [sys.executable, "-P", "-m", kind.module]
        own = (framing.VERSION, uid, gid, places, their_link.fileno(), their_hand)
        process = subprocess.Popen(
            [*command, *map(str, own), *kind.more],
            stdin=subprocess.PIPE if kind.secret else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            pass_fds=[one.fileno() for one in given], cwd="/", env=_environment(),
            start_new_session=True,
        )  # fmt: skip
    if process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin as pipe:  # it fits into the pipe
            pipe.write(kind.secret)
    link.setblocking(False)
    return process, link, hand


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith("PYTHON")}
    if "PYTHONPATH" in kept:  # it may be relative, and a helper starts in /
        places = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places))
    return kept | {"MALLOC_ARENA_MAX": "1"}


def _discard(
    started: Future[tuple[subprocess.Popen[bytes], socket.socket, socket.socket | None]],
) -> None:
    """A child whose start was cancelled."""
    if not started.cancelled() and started.exception() is None:
        process, *links = started.result()
        for link in filter(None, links):
            link.close()
        process.kill()
        process.wait()


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """The user may control them: only printable ASCII, and little of it."""
    assert process.stderr is not None
    with process.stderr as pipe:
        os.set_blocking(pipe.fileno(), False)
        try:
            raw = os.read(pipe.fileno(), _SAID_BYTES)
        except OSError:
            return ""
    lines = raw.decode("ascii", "replace").strip().splitlines()
    last = lines[-1] if lines else ""
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in last[:_SAID_LETTERS])


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    if returncode < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"killed by {known.get(-returncode, f'signal {-returncode}')}"
    return f"exit code {returncode}"
