"""A client's requests over ZeroMQ: answers by their number, deadlines, and daemons that end."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pccheck.daemon import connection as module
from pccheck.daemon.connection import Connection
from pccheck_wire import codec
from pccheck_wire.errors import DaemonUnreachableError, StorageFullError, WaitTimeoutError
from pccheck_wire.messages import Describe, Done, Failure, Reply, Report, Request, Status
from tests.support.waiting import until

TOKEN = b"t" * 16
LIMIT_S = 90.0
Answer = Callable[[Request], list[Reply]]


class Client:
    """The native native: it only tells whether the daemon lives."""

    unmapped = 0

    def __init__(self, *_: int) -> None:
        self.lives = True
        self.closed = False

    def alive(self) -> bool:
        if self.closed:
            raise ValueError("closed")
        return self.lives

    def close(self) -> None:
        self.closed = True


class Server:
    """A ROUTER in a thread; `heard` has every request, `answer` makes the replies."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}"
        self.heard: list[Request] = []
        self.answer: Answer = lambda request: [Reply(request.number, Done())]
        self.came = threading.Semaphore(0)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._bound = threading.Event()
        self._thread.start()
        assert self._bound.wait(LIMIT_S)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(self.endpoint)
            self._bound.set()
            while not self._ends.is_set():
                if not router.poll(10):
                    continue
                who, data = router.recv_multipart()
                request = codec.decode(data, Request)
                self.heard.append(request)
                for reply in self.answer(request):
                    router.send_multipart([who, codec.encode(reply)])
                self.came.release()

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.came.acquire(timeout=LIMIT_S)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


class Attachment:
    def __init__(self, endpoint: str) -> None:
        self.welcome = SimpleNamespace(endpoint=endpoint, token=TOKEN, pid=77)
        self.path, self.memory_fd, self.page_fd = Path("/s"), -1, -1
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "Client", Client)
    made = Server(tmp_path / "s")
    yield made
    made.end()


@pytest.fixture
def connection(server: Server) -> Iterator[Connection]:
    attachment: Any = Attachment(server.endpoint)
    made = Connection(attachment)
    yield made
    made.close()


def native(connection: Connection) -> Client:
    found: Any = connection.native
    return found


def test_an_answer_belongs_to_its_request(server: Server, connection: Connection) -> None:
    """Late answers to earlier requests, and answers to none, are not taken for it."""
    late = [Reply(1, Report({"late": True})), Reply(99, Report({"whose": 99}))]
    server.answer = lambda request: []
    with pytest.raises(WaitTimeoutError, match=r"did not answer within 0\.05 s"):
        connection.request(Status(), timeout_s=0.05)
    server.answer = lambda request: [*late, Reply(request.number, Report({"mine": True}))]
    assert connection.request(Status(), timeout_s=LIMIT_S) == Report({"mine": True})
    assert [(one.number, one.token) for one in server.heard] == [(1, TOKEN), (2, TOKEN)]


def test_a_failure_is_raised_with_its_hint(server: Server, connection: Connection) -> None:
    failure = Failure("STORAGE_FULL", "no space", "drop a job", retryable=True)
    server.answer = lambda request: [Reply(request.number, failure)]
    with pytest.raises(StorageFullError) as raised:
        connection.request(Status(), timeout_s=LIMIT_S)
    assert (raised.value.message, raised.value.hint) == ("no space", "drop a job")
    assert raised.value.retryable


def test_a_daemon_that_ends_is_not_waited_for(server: Server, connection: Connection) -> None:
    def ends(_: Request) -> list[Reply]:
        native(connection).lives = False
        return []

    server.answer = ends
    with pytest.raises(DaemonUnreachableError, match=r"\(pid 77\) has ended"):
        connection.request(Status(), timeout_s=LIMIT_S)
    assert not connection.alive()


def test_an_answer_that_came_before_the_end_counts(
    server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon answers and ends before the client looks."""
    look = connection.alive

    def looks_late() -> bool:
        server.wait()
        arrivals = zmq.Poller()
        arrivals.register(connection._socket, zmq.POLLIN)
        assert arrivals.poll(LIMIT_S * 1000)
        native(connection).lives = False
        return look()

    monkeypatch.setattr(connection, "alive", looks_late)
    assert connection.request(Status(), timeout_s=LIMIT_S) == Done()
    assert not look()


def test_a_front_that_ends_fails_the_request_and_not_the_session(
    server: Server, connection: Connection
) -> None:
    connection.request(Status(), timeout_s=LIMIT_S)
    server.answer = lambda request: server._ends.set() or []  # type: ignore[func-returns-value]
    with pytest.raises(DaemonUnreachableError, match="ended during a request") as raised:
        connection.request(Status(), timeout_s=LIMIT_S)
    assert "try again" in raised.value.hint
    assert connection.alive()


def test_what_is_posted_has_no_answer(server: Server, connection: Connection) -> None:
    connection.post(Describe(1))
    server.wait()
    assert [one.number for one in server.heard] == [0]
    assert not connection._waiting


def test_a_callback_runs_in_a_later_pump_and_once(server: Server, connection: Connection) -> None:
    server.answer = lambda request: [Reply(request.number, Done())] * 2
    answers: list[object] = []
    connection.ask(Describe(1), answers.append)
    server.wait()
    assert answers == []
    until(lambda: (connection.pump(), bool(answers))[1])
    connection.request(Status(), timeout_s=LIMIT_S)
    assert answers == [Done()]


def test_answers_that_never_come_are_forgotten(server: Server, connection: Connection) -> None:
    server.answer = lambda request: []
    for _ in range(module._WAITING_MAX + 5):
        connection.ask(Describe(1), lambda _: None)
    assert len(connection._waiting) == module._WAITING_MAX
    assert 1 not in connection._waiting  # the oldest ones


def test_a_forked_child_has_no_connection(connection: Connection) -> None:
    assert connection.alive()
    connection.pid = os.getpid() + 1
    assert not connection.alive()


def test_a_closed_one_is_not_alive_and_sends_nothing(connection: Connection) -> None:
    connection.close()
    assert not connection.alive()
    with pytest.raises(DaemonUnreachableError):
        connection.post(Describe(1))


def test_an_attempt_that_fails_leaves_nothing_open(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[Client] = []

    def make(*_: int) -> Client:
        links.append(Client())
        return links[0]

    def no_socket() -> object:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(module, "Client", make)
    monkeypatch.setattr(module, "_context", no_socket)
    attachment: Any = Attachment(server.endpoint)
    with pytest.raises(zmq.ZMQError):
        Connection(attachment)
    assert links[0].closed and attachment.closed
