"""The small HTTP server, against readers that are slow, rude or many."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from pccheck_wire.errors import UsageError
from pccheckd.config.metrics_place import Place, parse
from pccheckd.observe import listener as module
from pccheckd.observe.listener import HttpAnswer, Listener

LARGE = b"x" * (16 << 20)


def hello() -> HttpAnswer:
    return HttpAnswer(200, b"hello\n")


def large() -> HttpAnswer:
    return HttpAnswer(200, LARGE)


def late() -> HttpAnswer:
    raise TimeoutError


def broken() -> HttpAnswer:
    raise RuntimeError("no")


@pytest.fixture
def port() -> Iterator[int]:
    pages = {"/hello": hello, "/large": large, "/late": late, "/broken": broken}
    listener = Listener(parse("0"), pages)
    listener.start()
    yield listener.port
    listener.stop()
    assert not listener._thread.is_alive()


def ask(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=90) as channel:
        channel.sendall(request)
        return b"".join(iter(lambda: channel.recv(1 << 20), b""))


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=90) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_pages(port: int) -> None:
    assert get(port, "/hello") == (200, b"hello\n")
    assert get(port, "/hello?x=1") == (200, b"hello\n")
    assert get(port, "/large") == (200, LARGE)
    code, body = get(port, "/")
    assert code == 404 and b"/hello" in body
    assert get(port, "/late")[0] == 503
    assert get(port, "/broken")[0] == 500
    assert get(port, "/hello")[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"HEAD /hello HTTP/1.1\r\n\r\n", b"200"),
        (b"POST /hello HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /hello HTTP/2\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_odd_requests(port: int, request_: bytes, status: bytes) -> None:
    answer = ask(port, request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert not answer.endswith(b"hello\n")
    assert get(port, "/hello")[0] == 200


def test_a_reader_that_does_not_read_holds_nobody_up(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=90) as slow:
        slow.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert get(port, "/hello")[0] == 200
        with socket.create_connection(("127.0.0.1", port), timeout=90):  # and one that says nothing
            assert get(port, "/hello")[0] == 200


def test_many_that_say_nothing_keep_no_probe_out_and_fill_no_log(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    idle = [socket.create_connection(("127.0.0.1", port), timeout=90) for _ in range(
        module.CONNECTIONS_MAX)]  # fmt: skip
    try:
        assert get(port, "/hello")[0] == 200
        assert idle[0].recv(1) == b""  # the oldest one had to go
    finally:
        for channel in idle:
            channel.close()
    assert get(port, "/hello")[0] == 200
    assert not caplog.records


def test_an_address_in_use_is_told() -> None:
    with (
        Listener(Place("127.0.0.1", 0), {}) as first,
        pytest.raises(UsageError, match="in use"),
    ):
        Listener(Place("127.0.0.1", first.port), {})


def test_a_stop_comes_to_its_end_with_readers_connected() -> None:
    listener = Listener(parse("0"), {"/large": large})
    listener.start()
    with socket.create_connection(("127.0.0.1", listener.port), timeout=90) as slow:
        slow.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert slow.recv(10)
        listener.stop()
        assert not listener._thread.is_alive()
