"""A small HTTP server for a few readers: metrics and health.

It has threads of its own. A slow scraper costs only its connection, and the server can report when
the daemon's loop hangs."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple

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


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    kind: str = TEXT


#: Runs in a thread of its connection. Raises TimeoutError when the daemon's loop does not answer.
Page = Callable[[], HttpAnswer]


class Listener(ThreadingMixIn, TCPServer):
    """Serves `pages` by path until it is stopped."""

    allow_reuse_address = True
    request_queue_size = CONNECTIONS_MAX
    daemon_threads = True

    def __init__(self, place: Place, pages: Mapping[str, Page]) -> None:
        """Listens from now on. Raises UsageError when it cannot."""
        self.address_family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        self.pages = pages
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        try:
            super().__init__((place.host, place.port), _Request)
        except OSError as error:
            raise UsageError(
                f"--metrics: cannot listen at {place}: {error.strerror}",
                hint="choose a free port, and an address of this machine",
            ) from error
        self.port: int = self.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends what is under way. Blocks for a moment."""
        self.shutdown()
        for connection in list(self._open):
            self._end(connection)
        self._thread.join(STOP_LIMIT_S)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        present = list(self._open)
        if len(present) >= CONNECTIONS_MAX:
            self._end(present[0])
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else the reader has gone, or is too slow
            LOG.exception("a request for metrics failed")

    def _end(self, connection: socket.socket) -> None:
        """Its thread reads the end, and closes it."""
        self._open.pop(connection, None)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    server: Listener
    protocol_version = default_request_version = "HTTP/1.1"
    error_message_format, error_content_type = "%(message)s\n", TEXT

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BytesIO(_head(self.request))
        self.request.settimeout(BODY_LIMIT_S)

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if self.command not in ("GET", "HEAD"):
            self.send_error(405, "only GET")
        elif page is None:
            self.send_error(404, f"try {', '.join(sorted(self.server.pages))}")
        else:
            self._send(page)

    def _send(self, page: Page) -> None:
        try:
            answer = page()
        except TimeoutError:
            self.send_error(503, "the daemon's event loop does not answer")
            return
        except Exception:
            LOG.exception("the page %s failed", self.path[:40])
            self.send_error(500, "see the daemon's log")
            return
        self.send_response_only(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "pccheckd"

    def log_message(self, *_: object) -> None:
        """Readers must not fill the log."""


def _head(connection: socket.socket) -> bytes:
    """The head of a request; empty when the reader has gone. Raises OSError when it is late."""
    head, deadline = b"", time.monotonic() + HEAD_LIMIT_S
    while b"\r\n\r\n" not in head:
        connection.settimeout(max(0.0, deadline - time.monotonic()))
        more = connection.recv(HEAD_BYTES_MAX)
        if not more:
            return b""
        head += more
        if len(head) > HEAD_BYTES_MAX:
            return b"too long a head\r\n\r\n"  # which is answered like any other nonsense
    return head
