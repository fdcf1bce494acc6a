"""The daemon's side of fronts, against processes that are none; and real ones that come and go."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pccheck_wire.errors import RefusedError
from pccheck_wire.packing import REPLY_BYTES_MAX, REQUEST_BYTES_MAX
from pccheckd.front import endpoints, program
from pccheckd.front.endpoints import ControlServer
from pccheckd.helper import framing, keeper

LIMIT_S = 60
UID, GID = os.getuid(), os.getgid()
READY = f"os.write(3, {framing.READY!r})"


async def echo(uid: int, request: bytes) -> bytes | None:
    """A number is answered with so many bytes."""
    assert uid == UID
    return b"x" * int(request) if request.isdigit() else request


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pcc-") as directory:  # AF_UNIX paths are short
        yield Path(directory) / "attach.sock"


@pytest.fixture
async def server(place: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ControlServer]:
    monkeypatch.setattr(keeper, "READY_WAIT_S", LIMIT_S)
    server = ControlServer(place)
    server.serve(echo)
    yield server
    await server.close()
    assert server.fronts == 0
    assert list(place.parent.iterdir()) == []


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Starts something else for a front: Python whose descriptor 3 is the daemon's."""
    monkeypatch.setattr(keeper, "PAUSE_LAST_S", 0.1)

    def pretend(script: str) -> None:
        def spawn(
            _kind: keeper.HelperKind, _uid: int, _gid: int, _listeners: object
        ) -> tuple[subprocess.Popen[bytes], socket.socket]:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs:
                number = theirs.fileno()
                program = f"import os, time\nos.dup2({number}, 3)\nos.close({number})\n{script}"
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", program], stderr=subprocess.PIPE, pass_fds=[number]
                )
            return process, ours

        monkeypatch.setattr(keeper, "_spawn", spawn)

    return pretend


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def request(address: str, data: bytes) -> bytes:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        dealer.send(data)
        assert dealer.poll(LIMIT_S * 1000)
        return dealer.recv()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"{READY}; os.write(3, b'\\xff' * 5); time.sleep(99)", "invalid request: a message of"),
        (
            f"{READY}; os.write(3, {framing.READY!r}); time.sleep(99)",
            "a request does not name its sender",
        ),
        ("os.write(3, b'garbage, not READY'); time.sleep(99)", "first message was not READY"),
        (f"{READY}; os.close(3); time.sleep(99)", "killed by SIGKILL"),
        (f"{READY}; os.kill(os.getpid(), 35)", "killed by signal 35"),
        (f"{READY}; raise MemoryError", "filled its memory up to the limit"),
        (f"{READY}; os.write(2, b'\\x1b[31mred'); os._exit(3)", "exit code 3; ?[31mred"),
    ],
)
async def test_what_is_no_front_is_ended_and_named(
    server: ControlServer,
    pretend: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    script: str,
    said: str,
) -> None:
    pretend(script)
    try:
        await server.join(UID, GID)
    except RefusedError as error:
        assert "not READY" in error.message and error.retryable
    await until(lambda: server.restarts > 1)
    server.leave(UID)
    assert said in caplog.text


async def test_a_front_that_takes_nothing_is_ended(
    server: ControlServer,
    pretend: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And what it was to be sent is bounded until then."""
    monkeypatch.setattr(keeper, "SEND_LIMIT_S", 0.5)
    wanted = framing.pack(b"peer", str(REPLY_BYTES_MAX).encode())
    pretend(f"{READY}\nfor _ in range(9): os.write(3, {wanted!r})\ntime.sleep(99)")
    await server.join(UID, GID)
    await until(lambda: server.restarts > 0)
    assert "an answer is lost" in caplog.text
    assert "did not accept answers" in caplog.text


async def test_requests_wait_in_the_front_while_the_daemon_is_busy(
    place: Path, pretend: Callable[[str], None]
) -> None:
    frame = framing.pack(b"peer", b"x" * 1000)
    pretend(f"{READY}\nwhile True: os.write(3, {frame!r})")
    taken = 0
    release = asyncio.Event()

    async def busy(_uid: int, _data: bytes) -> bytes | None:
        nonlocal taken
        taken += 1
        await release.wait()
        return None

    server = ControlServer(place)
    server.serve(busy)
    await server.join(UID, GID)
    await until(lambda: taken == keeper.REQUESTS_IN_PROGRESS_MAX)
    for _ in range(100):
        await asyncio.sleep(0)
    assert taken == keeper.REQUESTS_IN_PROGRESS_MAX
    release.set()
    await until(lambda: taken > keeper.REQUESTS_IN_PROGRESS_MAX)
    await server.close()


async def test_the_largest_messages_pass(server: ControlServer) -> None:
    address = await server.join(UID, GID)
    largest = b"r" * REQUEST_BYTES_MAX
    assert await asyncio.to_thread(request, address, largest) == largest
    answer = await asyncio.to_thread(request, address, str(REPLY_BYTES_MAX).encode())
    assert answer == b"x" * REPLY_BYTES_MAX
    assert server.restarts == 0


async def test_a_front_goes_when_nobody_needs_it_any_more(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "IDLE_S", 0.01)
    first = await server.join(UID, GID)
    assert await server.join(UID, GID) == first
    assert server.fronts == 1
    server.leave(UID)
    assert await asyncio.to_thread(request, first, b"one session is left") != b""
    server.leave(UID)
    await until(lambda: server.fronts == 0)
    assert not Path(first.removeprefix("ipc://")).exists()
    assert await server.join(UID, GID) == first
    assert await asyncio.to_thread(request, first, b"it serves again") == b"it serves again"
    assert server.restarts == 0


async def test_what_cannot_be_started_is_said(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(RefusedError, match="No such file"):
        await server.join(UID, GID)


def test_limits_fit_together() -> None:
    from pccheckd.jobs.sessions import CONNECTIONS_PER_UID_MAX

    assert 2 * CONNECTIONS_PER_UID_MAX < program.FILES_MAX
    assert endpoints.BACKLOG < program.FILES_MAX // 2  # what waited in there ends no second front
    queued = CONNECTIONS_PER_UID_MAX * program.REQUESTS_WAITING * REQUEST_BYTES_MAX
    assert queued + 4 * REPLY_BYTES_MAX + (40 << 20) < program.ADDRESS_SPACE_BYTES


async def test_a_front_of_another_version_says_so(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "VERSION", 0)
    with pytest.raises(RefusedError, match="restart the daemon"):
        await server.join(UID, GID)


async def test_a_session_does_not_wait_for_a_slow_start(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests do, at the endpoint."""
    monkeypatch.setattr(keeper, "READY_WAIT_S", 0)
    server = ControlServer(place)
    server.serve(echo)
    address = await server.join(UID, GID)
    assert server.fronts == 0
    assert await asyncio.to_thread(request, address, b"early") == b"early"
    await server.close()
