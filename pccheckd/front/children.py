"""The daemon's side of fronts (program.py): one child process per uid, whose bytes are not trusted,
started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from pccheck_wire.errors import RefusedError
from pccheck_wire.packing import REPLY_BYTES_MAX, REQUEST_BYTES_MAX
from pccheckd.base.background import Background, Tasks
from pccheckd.base.logs import LOG

from . import framing

REQUESTS_IN_PROGRESS_MAX = 256
#: Answers of one uid that wait for its front: room for two of the largest.
ANSWERS_BYTES_MAX = 2 * REPLY_BYTES_MAX
READ_BYTES = 64 * 1024
START_LIMIT_S = 30.0
#: How long a new session waits for a front, to report one that cannot start. Then it begins without
#: one, since its peer's handshake has a limit: its requests wait at the endpoint.
READY_WAIT_S = 0.5
#: A front only forwards; one that accepts no answer for this long is stopped or hangs.
SEND_LIMIT_S = 10.0
END_LIMIT_S = 5.0
#: Between two starts; doubled with every front that did not last, up to PAUSE_LAST_S.
PAUSE_FIRST_S, PAUSE_LAST_S = 0.1, 30.0
LASTED_S = 60.0
STEP_S = 0.1
#: Peers that connect meanwhile wait here. Below program.FILES_MAX: idle connects end one front
#: at most.
BACKLOG = 128
_SAID_BYTES = 4096
_SAID_LETTERS = 160
#: All that a front needs of the environment; no arena per thread, which would take address space.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
#: Explanations for operators, by the last words of the process.
_MEANINGS = {
    "Too many open files": "a process of this user opens too many connections to it",
    "MemoryError": "a process of this user filled its memory up to the limit",
    "bad_alloc": "a process of this user filled its memory up to the limit",
    "OUT OF MEMORY": "a process of this user filled its memory up to the limit",
}

#: The answer to a request of a uid, None for no answer. Never raises.
Handle = Callable[[int, bytes], Awaitable[bytes | None]]


class FrontProcess:
    """One child process, from its start to its end."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.pid = process.pid
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
        take: Callable[[FrontProcess, bytes, bytes], Awaitable[None]],
    ) -> None:
        """Passes every request to `take`, which may make it wait, until the process ends or
        violates the protocol."""
        frames = framing.Unpacker(REQUEST_BYTES_MAX)
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

    async def answer(self, identity: bytes, message: bytes) -> None:
        """Answers to a peer that does not read are dropped."""
        if self._unsent_bytes + len(message) > ANSWERS_BYTES_MAX:
            LOG.warning("the front with pid %d reads too slowly: an answer is lost", self.pid)
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
        with contextlib.suppress(OSError):  # of another uid, without CAP_KILL: it reads the end
            self._process.kill()


class Keeper(Background):
    """Keeps a front for one uid, from the first session until there has been none for a while."""

    def __init__(
        self, uid: int, gid: int, listener: socket.socket, threads: Executor, handle: Handle
    ) -> None:
        self.sessions = 0
        self.restarts = 0
        self.idle: asyncio.TimerHandle | None = None
        self._uid, self._gid = uid, gid
        self._listener = listener
        self._threads = threads
        self._handle = handle
        self._trouble = ""  # why there has been no front yet
        self._decided = asyncio.Event()  # set once a front has served, or could not start
        self._front: FrontProcess | None = None
        self._room = asyncio.Semaphore(REQUESTS_IN_PROGRESS_MAX)
        self._work = Tasks(f"requests of uid {uid}")

    @property
    def serves(self) -> bool:
        """Whether there is a process now."""
        return self._front is not None

    async def ready(self) -> None:
        """Returns once a front has served, or after a moment. Raises RefusedError when none could
        be started so far."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_S):
                await self._decided.wait()
        if self._trouble:
            raise RefusedError(
                f"the process that receives your requests could not be started: {self._trouble}",
                hint="see pccheckd's log; try again",
                retryable=True,
            )

    async def close(self) -> None:
        """Ends the front; requests in progress are dropped."""
        self._listener.close()
        await super().close()
        await self._work.cancel()

    async def _run(self) -> None:
        pause_s = PAUSE_FIRST_S
        while True:
            began = time.monotonic()
            try:
                reason = await self._one()
            except Exception as error:  # the edge of this uid: it goes without for a while
                LOG.exception("uid %d: no process receives its requests", self._uid)
                reason = str(error)
            if time.monotonic() - began >= LASTED_S:
                pause_s = PAUSE_FIRST_S
            LOG.warning(
                "uid %d: the process that receives its requests ended: %s. Another one starts in "
                "%g s; checkpoints do not need it", self._uid, reason, pause_s,
            )  # fmt: skip
            self.restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_LAST_S)

    async def _one(self) -> str:
        """One front's life; why it ended."""
        try:
            front = await self._start()
        except OSError as error:
            return self._failed(str(error))
        served = False
        try:
            reader = await front.connect()
            if reader is not None:
                served = True
                self._front, self._trouble = front, ""
                self._decided.set()
                LOG.debug("uid %d: pid %d receives its requests", self._uid, front.pid)
                await front.serve(reader, self._take)
        finally:
            self._front = None
            reason = await front.end()
        return reason if served else self._failed(reason)

    def _failed(self, trouble: str) -> str:
        """No front could start: reports that to sessions that wait for the first one."""
        if self._trouble or not self._decided.is_set():
            self._trouble = trouble
            self._decided.set()
        return trouble

    async def _start(self) -> FrontProcess:
        started = self._threads.submit(_spawn, self._uid, self._gid, self._listener)
        try:
            return FrontProcess(*await asyncio.wrap_future(started))
        except asyncio.CancelledError:
            started.add_done_callback(_discard)
            raise

    async def _take(self, front: FrontProcess, identity: bytes, request: bytes) -> None:
        """Waits for a free place; meanwhile the front is not read, and reads nothing from its
        peers. Takes one request in a pass of the loop, which other users wait for."""
        await self._room.acquire()
        self._work.spawn(self._answer(front, identity, request))
        await asyncio.sleep(0)

    async def _answer(self, front: FrontProcess, identity: bytes, request: bytes) -> None:
        try:
            answer = await self._handle(self._uid, request)
            if answer is not None:
                await front.answer(identity, answer)
        finally:
            self._room.release()


def _spawn(
    uid: int, gid: int, listener: socket.socket
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """In a thread that lives as long as the daemon: the child ends with its parent thread."""
    ours, theirs = socket.socketpair()
    with theirs:
        ends = listener.fileno(), theirs.fileno()
        command = [sys.executable, "-P", "-m", "pccheckd.front.program"]
        process = subprocess.Popen(
            [*command, *map(str, (framing.VERSION, uid, gid, *ends, REQUEST_BYTES_MAX))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            pass_fds=ends, cwd="/", env=_environment(), start_new_session=True,
        )  # fmt: skip
    ours.setblocking(False)
    return process, ours


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith("PYTHON")}
    if "PYTHONPATH" in kept:  # it may be relative, and a front starts in /
        places = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places))
    return kept | {"MALLOC_ARENA_MAX": "1"}


def _discard(started: Future[tuple[subprocess.Popen[bytes], socket.socket]]) -> None:
    """A child whose start was cancelled."""
    if not started.cancelled() and started.exception() is None:
        process, link = started.result()
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


def listen(path: Path, uid: int) -> socket.socket:
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
