"""A small HTTP server for a few readers: metrics and health.

It has its own thread and loop. A slow scraper costs only its connection, and the server can report
when the daemon's loop hangs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from pccheck_wire.errors import UsageError
from pccheckd.base.logs import LOG
from pccheckd.config.metrics_place import Place

HEAD_BYTES_MAX = 8192
HEAD_LIMIT_S = 5.0
#: For a reader to take the whole answer.
BODY_LIMIT_S = 30.0
#: One more connection closes the oldest. To refuse it instead would let any user of the node fail
#: the probe of /healthz, after which the daemon is restarted.
CONNECTIONS_MAX = 16
STOP_LIMIT_S = 5.0
TEXT = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
            500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


class Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = TEXT


Page = Callable[[], Awaitable[Answer]]


def bind(place: Place) -> socket.socket:
    """A listening socket. Raises UsageError."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((place.host, place.port))
        made.listen(CONNECTIONS_MAX)
    except OSError as error:
        made.close()
        raise UsageError(
            f"--metrics: cannot listen at {place}: {error.strerror}",
            hint="choose a free port, and an address of this machine",
        ) from error
    return made


class Listener:
    """Serves `pages` by path until it is stopped. The pages run on this thread's loop."""

    def __init__(self, listening: socket.socket, pages: Mapping[str, Page]) -> None:
        self.port: int = listening.getsockname()[1]
        self._listening = listening
        self._pages = pages
        self._serving: dict[asyncio.Task[None], None] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits a moment for answers under way."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(STOP_LIMIT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            LOG.exception("metrics and health are no longer served")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listening, limit=HEAD_BYTES_MAX
        )
        await self._ended.wait()
        server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._serving) >= CONNECTIONS_MAX:
            oldest = next(iter(self._serving))
            del self._serving[oldest]
            oldest.cancel()
        self._serving[task] = None
        try:
            async with asyncio.timeout(HEAD_LIMIT_S):
                method, path = await _request(reader)
            answer, head = await self._answer(method, path), method == "HEAD"
            async with asyncio.timeout(BODY_LIMIT_S):
                writer.write(_response(answer, head=head))
                await writer.drain()
        except (OSError, EOFError, TimeoutError):
            pass  # it has gone, or is too slow
        except asyncio.CancelledError:
            pass  # Python 3.11 would log each task that ends as cancelled
        except Exception:  # the edge of this connection
            LOG.exception("a request for metrics failed")
        finally:
            self._serving.pop(task, None)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # it does not read
            else:
                writer.close()

    async def _answer(self, method: str, path: str) -> Answer:
        page = self._pages.get(path.partition("?")[0])
        if not method:
            return Answer(400, b"not a request\n")
        if method not in ("GET", "HEAD"):
            return Answer(405, b"only GET\n")
        if page is None:
            return Answer(404, f"try {', '.join(sorted(self._pages))}\n".encode())
        try:
            return await page()
        except TimeoutError:
            return Answer(503, b"the daemon's event loop does not answer\n")
        except Exception:
            LOG.exception("the page %s failed", path[:40])
            return Answer(500, b"see the daemon's log\n")


async def _request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Method and path, both empty for an invalid request. Raises EOFError, OSError."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return "", ""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    return (words[0], words[1]) if len(words) == 3 and words[2].startswith("HTTP/1.") else ("", "")


def _response(answer: Answer, *, head: bool) -> bytes:
    lines = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + (b"" if head else answer.body)
