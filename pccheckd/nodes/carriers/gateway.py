"""Requests to etcd v3 through its JSON gateway: HTTP in threads, with the standard library only.

Connections are kept. A request whose connection fails goes to the next member, if it may arrive
twice. Each new connection reads the file of credentials again, so that renewed certificates and
passwords need no restart."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pccheck_wire.errors import UsageError
from pccheckd.base.threads import Threads
from pccheckd.config import coordinator
from pccheckd.config.coordinator import Coordinator, Credentials

from .carrier import CarrierError

#: Requests at once; more wait for these.
THREADS = 4
#: Bytes of an answer: 64 values of 1 MiB in base64, and what is around them.
ANSWER_MAX = 96 << 20

# gRPC's codes, which the gateway repeats.
INVALID, NOT_FOUND, DENIED, UNAVAILABLE, UNAUTHENTICATED = 3, 5, 7, 14, 16
_FILE = "see the file of --coordinator-credentials"
#: Words of etcd's, and the fix.
_HINTS = {
    "permission denied": "grant its user READWRITE on the prefix pccheck/",
    "authentication failed": _FILE,
    "user name is empty": _FILE,
    "invalid auth token": _FILE,
    # etcd takes no other one through its gateway, once it has users.
    "CommonName": "its client certificate must have no CN",
    "HTTP request to an HTTPS server": "write etcds://",
    "Not Found": (_OLD := "etcd 3.4 or newer is needed, with its JSON gateway"),
    "page not found": _OLD,
}


class AnsweredError(CarrierError):
    """etcd refused a request. `number` is gRPC's code; 0 if the answer had none."""

    def __init__(self, message: str, number: int, hint: str) -> None:
        super().__init__(message, hint=hint, retryable=number not in (INVALID, DENIED))
        self.number = number

    @property
    def wants_token(self) -> bool:
        """Of a user: there is none, it has expired, or roles have changed since."""
        return self.number == UNAUTHENTICATED or any(
            words in self.message for words in ("user name is empty", "auth store is old")
        )


class Gateway:
    """One etcd. Many tasks of a loop may call `ask`."""

    def __init__(self, place: Coordinator, credentials: Path | None = None) -> None:
        """Connects at the first request. `credentials` is the file."""
        self._place, self._file = place, credentials
        self._threads = Threads(THREADS, "etcd")
        self._idle: list[_Line] = []
        self._first = 0  # the member that is asked first: it answered last

    def __str__(self) -> str:
        return f"etcd at {', '.join(map(_shown, self._place.hosts))}"

    async def ask(
        self, path: str, body: Mapping[str, Any], limit_s: float, *, again: bool = True
    ) -> dict[str, Any]:
        """The answer to POST /v3/`path`. `again`: the request may arrive twice. Raises
        CarrierError, and AnsweredError if etcd has refused the request. It takes longer than the
        limit where all threads are busy, or wait for the address of a name."""
        data, until = json.dumps(body).encode(), time.monotonic() + limit_s
        run = asyncio.get_running_loop().run_in_executor
        try:
            return await run(self._threads, self._ask, path, data, until, again)
        except RuntimeError as error:  # no thread, or closed
            raise CarrierError(f"{self} cannot be asked: {error}") from None

    def close(self) -> None:
        self._threads.stop()
        while self._idle:
            self._idle.pop().close()

    # -- in a thread ---------------------------------------------------------------------------

    def _ask(self, path: str, data: bytes, until: float, again: bool) -> dict[str, Any]:
        hosts = self._place.hosts
        order = [(self._first + n) % len(hosts) for n in range(len(hosts))]
        faults: list[str] = []
        while order and (left_s := until - time.monotonic()) > 0:
            member, limit = order[0], until - left_s + left_s / len(order)
            line = self._kept(member)
            kept = sent = line is not None
            try:
                line = line or _Line(self._place, member, self._file, limit)
                sent = True
                answer = line.ask(path, data, limit)
            except AnsweredError as error:
                if error.number != UNAVAILABLE or not again:
                    assert line is not None  # it has answered
                    self._put_back(line)
                    raise
                fault = error.message
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                fault = _words(error)
            else:
                self._first = member
                self._put_back(line)
                return answer
            if line is not None:
                line.close()
            if not (kept and again):  # a kept one may have ended with the member's last life
                faults.append(f"etcd at {_shown(hosts[member])}: {fault}")
                del order[0]
            if sent and not again:
                break
        raise CarrierError("; ".join(faults) or f"{self} did not answer in time")

    def _put_back(self, line: _Line) -> None:
        if line.is_usable:
            self._idle.append(line)
        else:
            line.close()

    def _kept(self, member: int) -> _Line | None:
        for number, line in enumerate(self._idle):
            if line.member == member:
                return self._idle.pop(number)
        return None


class _Line:
    """A connection to one member, with the token of its user."""

    def __init__(self, place: Coordinator, member: int, file: Path | None, until: float) -> None:
        """Raises OSError, and CarrierError for what is wrong with the file."""
        self.member = member
        try:
            self._credentials = coordinator.check(place, file) if file else Credentials()
            host, port = place.hosts[member]
            self._http = (
                http.client.HTTPSConnection(host, port, context=_context(self._credentials))
                if place.tls
                else http.client.HTTPConnection(host, port)
            )
        except UsageError as error:
            raise CarrierError(error.message, hint=error.hint) from None
        self._token = ""
        self._http.timeout = _left(until)
        self._http.connect()
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_usable(self) -> bool:
        """Neither has etcd ended it, nor refused its user: the next one reads the file again."""
        return self._http.sock is not None and bool(self._token or not self._credentials.user)

    def close(self) -> None:
        self._http.close()

    def ask(self, path: str, data: bytes, until: float) -> dict[str, Any]:
        """Raises OSError, HTTPException and AnsweredError."""
        for last in (False, True):
            if self._credentials.user and not self._token:
                self._authenticate(until)
            try:
                return self._post(path, data, until)
            except AnsweredError as error:
                if not (self._credentials.user and error.wants_token):
                    raise
                self._token = ""
                if last:
                    raise
        raise AssertionError

    def _authenticate(self, until: float) -> None:
        who = {"name": self._credentials.user, "password": self._credentials.password}
        token = self._post("auth/authenticate", json.dumps(who).encode(), until).get("token")
        if not isinstance(token, str) or not (token.isascii() and token.isprintable()):
            raise AnsweredError("etcd gave no token", 0, _FILE)
        self._token = token

    def _post(self, path: str, data: bytes, until: float) -> dict[str, Any]:
        self._http.sock.settimeout(_left(until))
        head = {"Content-Type": "application/json"}
        if self._token:
            head["Authorization"] = self._token
        self._http.request("POST", f"/v3/{path}", data, head)
        with self._http.getresponse() as response:
            read = bytearray()
            while piece := response.read(1 << 20):
                read += piece
                if len(read) > ANSWER_MAX:
                    raise http.client.HTTPException(f"an answer of more than {ANSWER_MAX} bytes")
                _left(until)
        return _answer(response.status, bytes(read))


def _left(until: float) -> float:
    if (left_s := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


def _context(credentials: Credentials) -> ssl.SSLContext:
    """Raises UsageError."""
    named = ", ".join(filter(None, (credentials.ca, credentials.certificate, credentials.key)))
    try:
        made = ssl.create_default_context(cafile=credentials.ca or None)
        if credentials.certificate:
            made.load_cert_chain(credentials.certificate, credentials.key)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(f"one of {named} cannot be used: {error.strerror or error}") from None
    return made


def _answer(status: int, read: bytes) -> dict[str, Any]:
    """Raises AnsweredError for whatever is not the answer of etcd's gateway."""
    try:
        data = json.loads(read)
    except (ValueError, RecursionError):
        data = None
    if status == 200 and isinstance(data, dict) and "error" not in data:
        return data
    number = 0
    text = read[:200].decode(errors="replace").strip()
    if isinstance(data, dict):
        error = data.get("error")
        fields = error if isinstance(error, dict) else data
        text = str(fields.get("message") or error or text)[:200]
        code = fields.get("code", fields.get("grpc_code"))
        number = code if isinstance(code, int) else 0
    hint = next((fix for words, fix in _HINTS.items() if words in text), "")
    raise AnsweredError(f"etcd answered {status}: {text}", number, hint)


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message} ({_FILE})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, (http.client.RemoteDisconnected, ConnectionError)):
        return f"the connection ended ({getattr(error, 'strerror', None) or 'no answer'})"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"no HTTP ({error!r})"


def _shown(host: tuple[str, int]) -> str:
    name = f"[{host[0]}]" if ":" in host[0] else host[0]
    return f"{name}:{host[1]}"
