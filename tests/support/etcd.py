"""An etcd for tests. Without more it is a stand-in for its JSON gateway, strict in what it takes.
With PCC_ETCD=PATH it is the real program (`make etcd-check`)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from base64 import b64decode, b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, Self

from pccheckd.config.coordinator import Coordinator
from tests.support.certificates import Certificates
from tests.support.waiting import suspend, until

PROGRAM = os.environ.get("PCC_ETCD", "")

Json = dict[str, Any]


class Server(Protocol):
    """Both kinds. It listens at the same port in all its lives, and keeps what it holds."""

    place: Coordinator

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def forget(self) -> None:
        """Starts a killed one with nothing in it."""

    def hang(self) -> None: ...
    def heal(self) -> None: ...
    def ask(self, path: str, **body: Any) -> Json:
        """As an administrator would ask, before there are users."""

    def admit(self, user: str, password: str, prefix: str) -> None:
        """From now on only this user is served, and for this prefix only."""

    def widen(self, prefix: str) -> None:
        """The user may use this prefix, too; tokens of before have ended."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def server(directory: Path, certificates: Certificates | None = None) -> Server:
    """One that has not been started."""
    return (Real if PROGRAM else StandIn)(directory, certificates)


def text(value: str) -> str:
    return b64encode(value.encode()).decode()


class _Asked:
    place: Coordinator
    certificates: Certificates | None

    def ask(self, path: str, *, token: str = "", **body: Any) -> Json:
        host, port = self.place.hosts[0]
        url = f"http{'s' if self.place.tls else ''}://{host}:{port}/v3/{path}"
        head = {"Authorization": token} if token else {}
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        context = self.certificates and self.certificates.context()
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return json.loads(answer.read())  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        raise NotImplementedError


class Real(_Asked):
    """etcd itself, in a process."""

    def __init__(self, directory: Path, certificates: Certificates | None) -> None:
        self._directory, self.certificates = directory, certificates
        self.place = Coordinator((("127.0.0.1", _free_port()),), tls=certificates is not None)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        scheme, (host, port) = "https" if self.place.tls else "http", self.place.hosts[0]
        peer = f"http://127.0.0.1:{_free_port()}"
        command = [
            PROGRAM, "--data-dir", self._directory / "etcd", "--log-level", "error", "--name", "e",
            "--listen-client-urls", f"{scheme}://{host}:{port}",
            "--advertise-client-urls", f"{scheme}://{host}:{port}",
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"e={peer}", "--logger", "zap",
        ]  # fmt: skip
        if made := self.certificates:
            command += ["--cert-file", made.server[0], "--key-file", made.server[1]]
            command += ["--client-cert-auth", "--trusted-ca-file", made.ca]
        with (self._directory / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, self._log)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log()
        try:
            self.ask("maintenance/status")
        except OSError as error:  # HTTPError is one: who may not ask has been answered
            return hasattr(error, "code")
        return True

    def _log(self) -> str:
        return (self._directory / "etcd.log").read_text()[-2000:]

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def forget(self) -> None:
        shutil.rmtree(self._directory / "etcd")
        self.start()

    def hang(self) -> None:
        assert self._process is not None
        suspend(self._process.pid)

    def heal(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def admit(self, user: str, password: str, prefix: str) -> None:
        self.ask("auth/user/add", name="root", password="root's")
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/role/add", name="ours")
        self.ask("auth/role/grant", name="ours", perm=_permission(prefix))
        self.ask("auth/user/add", name=user, password=password)
        self.ask("auth/user/grant", user=user, role="ours")
        self.ask("auth/enable")

    def widen(self, prefix: str) -> None:
        root = self.ask("auth/authenticate", name="root", password="root's")["token"]
        self.ask("auth/role/grant", token=root, name="ours", perm=_permission(prefix))

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()


def _permission(prefix: str) -> Json:
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return {"permType": "READWRITE", "key": text(prefix), "range_end": text(end)}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# -- the stand-in ------------------------------------------------------------------------------


class RefusedError(Exception):
    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.answer = status, {"error": message, "message": message, "code": code}


def _whole(value: Any) -> int:
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise RefusedError(400, 3, f"json: cannot unmarshal {value!r} into an int64")
    return int(value)


def _bytes(value: Any) -> bytes:
    try:
        return b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise RefusedError(400, 3, f"illegal base64 data: {value!r}") from None


def _one_of(*words: str) -> Any:
    def checked(value: Any) -> str:
        if value not in words:
            raise RefusedError(400, 3, f"unknown value {value!r} for enum")
        return str(value)

    return checked


_RANGE = {"key": _bytes}
_PUT = {"key": _bytes, "value": _bytes, "lease": _whole}
_OPERATION = {"request_range": _RANGE, "request_put": _PUT}
_COMPARE = {
    "key": _bytes, "target": _one_of("CREATE", "MOD"), "result": _one_of("EQUAL"),
    "create_revision": _whole, "mod_revision": _whole,
}  # fmt: skip
#: What each request may have; etcd refuses every other field.
_SHAPES: dict[str, Any] = {
    "kv/txn": {"compare": [_COMPARE], "success": [_OPERATION], "failure": [_OPERATION]},
    "lease/grant": {"TTL": _whole},
    "lease/keepalive": {"ID": _whole},
    "lease/revoke": {"ID": _whole},
    "lease/timetolive": {"ID": _whole, "keys": bool},
    "auth/authenticate": {"name": str, "password": str},
}


def _checked(value: Any, shape: Any) -> Any:
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise RefusedError(400, 3, "json: cannot unmarshal into an array")
        return [_checked(item, shape[0]) for item in value]
    if not isinstance(shape, dict):
        return shape(value)
    for name in value:
        if name not in shape:
            raise RefusedError(400, 3, f"unknown field {name!r}")
    return {name: _checked(item, shape[name]) for name, item in value.items()}


class State:
    """Keys, leases and the user of a stand-in."""

    def __init__(self) -> None:
        self.revision, self.granted = 1, 0
        self.keys: dict[bytes, tuple[bytes, int, int, int]] = {}  # value, created, modified, lease
        self.leases: dict[int, int] = {}  # id -> TTL
        self.user: tuple[str, str] | None = None
        self.prefixes: list[str] = []
        self.tokens: set[str] = set()

    def answer(self, path: str, body: Json, token: str) -> Json:
        if path not in _SHAPES:
            raise RefusedError(404, 5, "Not Found")
        body = _checked(body, _SHAPES[path])
        return getattr(self, path.replace("/", "_"))(body, token)  # type: ignore[no-any-return]

    def kv_txn(self, body: Json, token: str) -> Json:
        branches = [body.get("success", []), body.get("failure", [])]
        if max(map(len, branches)) > 128:
            raise RefusedError(400, 3, "etcdserver: too many operations in txn request")
        for operation in (*branches[0], *branches[1]):
            ((_, request),) = operation.items()  # one of them
            self._may(request["key"], token)
            if "value" in request and request.get("lease", 0) not in {0, *self.leases}:
                raise RefusedError(404, 5, "etcdserver: requested lease not found")
        holds = all(map(self._holds, body.get("compare", [])))
        responses = [self._do(operation) for operation in branches[not holds]]
        return self._answer(succeeded=holds, responses=responses)

    def lease_grant(self, body: Json, token: str) -> Json:
        self._may(b"", token)
        self.granted += 1
        number = 7_587_000_000_000_000_000 + self.granted  # too large for a double
        self.leases[number] = body["TTL"]
        return self._answer(ID=str(number), TTL=str(body["TTL"]))

    def lease_keepalive(self, body: Json, token: str) -> Json:
        self._may(b"", token)
        ttl = self.leases.get(body["ID"])
        return {"result": self._answer(ID=str(body["ID"]), TTL=ttl and str(ttl))}

    def lease_revoke(self, body: Json, token: str) -> Json:
        if self.leases.pop(body["ID"], None) is None:
            raise RefusedError(404, 5, "etcdserver: requested lease not found")
        self.keys = {key: kept for key, kept in self.keys.items() if kept[3] != body["ID"]}
        return self._answer()

    def lease_timetolive(self, body: Json, token: str) -> Json:
        found = [b64encode(k).decode() for k, kept in self.keys.items() if kept[3] == body["ID"]]
        ttl = str(self.leases[body["ID"]])
        return self._answer(ID=str(body["ID"]), TTL=ttl, grantedTTL=ttl, keys=found)

    def auth_authenticate(self, body: Json, token: str) -> Json:
        if (body["name"], body["password"]) != self.user:
            raise RefusedError(
                400, 3, "etcdserver: authentication failed, invalid user ID or password"
            )
        self.tokens.add(made := f"token.{len(self.tokens)}.{self.revision}")
        return self._answer(token=made)

    def _holds(self, compare: Json) -> bool:
        _, created, modified, _ = self.keys.get(compare["key"], (b"", 0, 0, 0))
        if compare["target"] == "CREATE":
            return created == int(compare["create_revision"])
        return modified == int(compare["mod_revision"])

    def _do(self, operation: Json) -> Json:
        if request := operation.get("request_put"):
            self.revision += 1
            _, created, _, _ = self.keys.get(request["key"], (b"", self.revision, 0, 0))
            held = (request.get("value", b""), created, self.revision, request.get("lease", 0))
            self.keys[request["key"]] = held
            return {"response_put": self._answer()}
        key = operation["request_range"]["key"]
        if key not in self.keys:
            return {"response_range": self._answer()}
        value, created, modified, lease = self.keys[key]
        found = {
            "key": b64encode(key).decode(), "create_revision": str(created),
            "mod_revision": str(modified), "version": "1",
        }  # fmt: skip
        if value:
            found["value"] = b64encode(value).decode()
        if lease:
            found["lease"] = str(lease)
        return {"response_range": self._answer(kvs=[found], count="1")}

    def _may(self, key: bytes, token: str) -> None:
        if self.user is None:
            return
        if not token:
            raise RefusedError(400, 3, "etcdserver: user name is empty")
        if token not in self.tokens:
            raise RefusedError(401, 16, "etcdserver: invalid auth token")
        if key and not any(key.startswith(prefix.encode()) for prefix in self.prefixes):
            raise RefusedError(403, 7, "etcdserver: permission denied")

    def _answer(self, **fields: Any) -> Json:
        """Without what is 0, false or empty, like etcd."""
        return {
            "header": {"revision": str(self.revision)},
            **{k: v for k, v in fields.items() if v},
        }


class StandIn(_Asked):
    """Lives in threads of this process. `requests` has the path of each request that arrived;
    `faults` has what happens to the next ones: "close" ends the connection before the request is
    carried out, "unanswered" after it, any other text is an answer with status 503, and the last
    one of the connection."""

    def __init__(self, directory: Path, certificates: Certificates | None = None) -> None:
        self.certificates = certificates
        self.state = State()
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.place = Coordinator((("127.0.0.1", _free_port()),), tls=certificates is not None)
        self._server: _Server | None = None
        self._answering = threading.Event()
        self._answering.set()
        self._lock = threading.Lock()

    def start(self) -> None:
        self._server = _Server(self.place.hosts[0], self)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        assert self._server is not None
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        self._server = None

    def forget(self) -> None:
        self.state = State()
        self.start()

    def hang(self) -> None:
        self._answering.clear()

    def heal(self) -> None:
        self._answering.set()

    def admit(self, user: str, password: str, prefix: str) -> None:
        self.state.user, self.state.prefixes = (user, password), [prefix]

    def widen(self, prefix: str) -> None:
        self.state.prefixes.append(prefix)
        self.state.tokens.clear()

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self.kill()

    def take(self, path: str, data: bytes, token: str, named: bool) -> tuple[int, bytes] | None:
        """Status and body of the answer; None ends the connection."""
        self._answering.wait()
        with self._lock:
            self.requests.append(path)
            fault = self.faults.pop(0) if self.faults else ""
            if fault == "close":
                return None
            if fault not in ("", "unanswered"):
                return 503, fault.encode()
            if named and self.state.user:
                return (
                    400,
                    b"CommonName of client sending a request will be ignored",
                )
            try:
                answer = self.state.answer(path, json.loads(data), token)
            except RefusedError as error:
                return error.status, json.dumps(error.answer).encode()
            return None if fault else (200, json.dumps(answer).encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: StandIn) -> None:
        self.owner = owner
        self.connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def handle_error(self, *where: object) -> None:
        if not isinstance(sys.exception(), OSError):  # a connection that ends in its handshake
            super().handle_error(*where)  # type: ignore[arg-type]

    def hang_up(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    wbufsize = -1  # head and body in one packet
    named = False  # whether the client's certificate has a CN

    def setup(self) -> None:
        if made := self.server.owner.certificates:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*made.server)
            context.load_verify_locations(made.ca)
            context.verify_mode = ssl.CERT_REQUIRED
            self.request = context.wrap_socket(self.request, server_side=True)
            self.named = "commonName" in str(self.request.getpeercert()["subject"])
        self.server.connections.add(self.request)
        super().setup()

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path.startswith("/v3/")
        taken = self.server.owner.take(
            self.path[4:], data, self.headers.get("Authorization", ""), self.named
        )
        if taken is None:
            self.close_connection = True
            return
        status, answer = taken
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        if status == 503:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass
