"""The lanes of a trainer, with a stand-in for the daemon's endpoint and real stores."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pccheck.nodes import voice as module
from pccheck.nodes.stores import JobStore
from pccheck.nodes.voice import Voice
from pccheck_wire import codec, messages, packing
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.messages import Carried, Carry, Hello, Reply, Request, Role, Welcome
from tests.support.descriptors import open_files
from tests.support.programs import ROOT
from tests.support.waiting import LIMIT_S, suspend, until

from .test_stores import Server, agent, unsent


class Endpoint:
    """A daemon's attach socket, for the lanes of one session."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path, self.token = directory / name, name.encode()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.connections: list[socket.socket] = []
        self.batches = 0
        self.arrived: list[tuple[socket.socket, Request]] = []

    def next(self, lane: int) -> tuple[socket.socket, int, Carry]:
        """The next message of a lane: its sender, number and body."""
        while True:
            for number, (sender, request) in enumerate(self.arrived):
                assert isinstance(request.body, Carry)
                if request.body.lane == lane:
                    self.arrived.pop(number)
                    return sender, request.number, request.body
            assert self.serve(1000 * LIMIT_S), "no message"

    def serve(self, limit_ms: float) -> bool:
        """Takes what comes first: a connection, a message, or its end."""
        arrivals = select.poll()
        places = {place.fileno(): place for place in (self.listener, *self.connections)}
        for place in places:
            arrivals.register(place, select.POLLIN)
        ready = arrivals.poll(limit_ms)
        for place, _ in ready[:1]:
            if place == self.listener.fileno():
                self.greet(self.listener.accept()[0])
            elif data := places[place].recv(packing.REQUEST_BYTES_MAX):
                request = codec.decode(data, Request)
                assert request.token == self.token
                self.arrived.append((places[place], request))
            else:
                self.connections.remove(places[place])
                places[place].close()
        return bool(ready)

    def greet(self, connection: socket.socket) -> None:
        assert codec.decode(connection.recv(packing.PACKET_BYTES), Hello).role is Role.OBSERVER
        welcome = Welcome(PROTOCOL_VERSION, "test", 1, b"of the lane", "", os.getpid())
        connection.send(codec.encode(welcome))
        self.connections.append(connection)

    def send(self, sender: socket.socket, number: int, body: messages.ReplyBody) -> None:
        for part in packing.packets(codec.encode(Reply(number, body))):
            sender.send(part)

    def give(self, lane: int, *operations: list[Any]) -> int:
        """Answers the next message of a lane; the batch."""
        sender, number, _ = self.next(lane)
        self.batches += 1
        self.send(sender, number, Carried(self.batches, packing.pieces(list(operations))))
        return self.batches

    def results(self, lane: int, batch: int) -> list[Any]:
        """Of the next messages; the lane then waits for more operations."""
        whole = b""
        while True:
            sender, number, body = self.next(lane)
            assert (body.batch, body.at) == (batch, len(whole))
            whole += b"".join(body.results)
            assert bool(number) is not body.more
            if not body.more:
                self.arrived.append((sender, Request(number, b"", Carry(lane))))
                return packing.joined([whole])

    def do(self, lane: int, *operations: list[Any]) -> list[Any]:
        return self.results(lane, self.give(lane, *operations))

    def close(self) -> None:
        for one in (self.listener, *self.connections):
            one.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    with contextlib.closing(Endpoint(tmp_path, "one")) as made:
        yield made


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.fixture
def voice(server: Server) -> Iterator[Voice]:
    with contextlib.closing(Voice(lambda: JobStore(agent(server.port)))) as made:
        yield made


def lanes() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("pccheck-voice"))


def test_the_lanes_do_what_the_daemon_asks_for(endpoint: Endpoint, voice: Voice) -> None:
    voice.follow(endpoint.path, endpoint.token)
    assert endpoint.do(
        0, ["set", "a", b"1"], ["add", "n", 7], ["swap", "a", b"2"], ["get", ["a", "b", "n"]]
    ) == [None, 7, b"1", [b"1", None, b"7"]]
    assert endpoint.do(0, ["ring", "a", b"4", "bell"], ["get", ["a"]]) == [1, [b"4"]]
    assert endpoint.do(1, ["listen", "bell", 0, ["a"], 9.0], ["listen", "bell", 1, ["a"], 0]) == [
        [1, [b"4"]], None,
    ]  # fmt: skip
    waiting = endpoint.give(1, ["listen", "bell", 1, ["c", "absent"], 1e9])
    assert endpoint.do(0, ["ring", "c", b"3", "bell"]) == [2]
    assert endpoint.results(1, waiting) == [[2, [b"3", None]]]


def test_the_next_batch_begins_where_the_results_became_too_long(
    endpoint: Endpoint, voice: Voice
) -> None:
    voice.follow(endpoint.path, endpoint.token)
    long = os.urandom(packing.VALUE_BYTES_MAX)
    several = [["set", "a", long], ["swap", "a", b"x"], ["swap", "a", b"x"], ["add", "n", 1]]
    assert endpoint.do(0, *several) == [None, long]
    assert endpoint.do(0, ["add", "n", 1]) == [1]


@pytest.mark.parametrize(
    "operation",
    [
        ["set", "a"],
        ["listen", "a", 0, [], 1.0],
        ["get", []],
        ["get", "a"],
        ["swap", "a", b""],
        [],
        None,
        5,
    ],
)
def test_what_is_no_operation_is_an_error(
    endpoint: Endpoint, voice: Voice, operation: list[Any]
) -> None:
    voice.follow(endpoint.path, endpoint.token)
    (error,) = endpoint.do(0, operation)
    assert error[0] == "error"
    assert endpoint.do(0, ["add", "n", 1]) == [1]


def test_a_rank_that_is_not_asked_keeps_no_connection_and_no_store(endpoint: Endpoint) -> None:
    opened = []

    class Store(JobStore):
        def _open(self) -> None:
            opened.append(1)

    with contextlib.closing(Voice(Store)) as voice:
        voice.follow(endpoint.path, endpoint.token)
        for lane in (0, 1):
            sender, number, _ = endpoint.next(lane)
            endpoint.send(sender, number, Carried())
        while endpoint.connections:
            assert endpoint.serve(1000 * LIMIT_S)
    assert opened == []
    assert not endpoint.arrived, "asked again at once"


def test_the_lanes_follow_to_the_next_daemon_and_leave_a_wait(
    endpoint: Endpoint, voice: Voice, tmp_path: Path
) -> None:
    voice.follow(endpoint.path, endpoint.token)
    endpoint.give(1, ["listen", "never", 0, ["n"], 1e9])
    assert endpoint.do(0, ["add", "n", 1]) == [1]
    threads = lanes()
    voice.leave()
    with contextlib.closing(Endpoint(tmp_path, "two")) as second:
        voice.follow(second.path, second.token)
        for lane in (0, 1):
            sender, number, body = second.next(lane)
            assert (body.batch, body.results) == (0, [])
            second.arrived.append((sender, Request(number, b"", body)))
        assert second.do(0, ["add", "n", 1]) == [2]
        assert second.do(1, ["listen", "n", 1, ["n"], 1.0]) == [[2, [b"2"]]]
    assert lanes() == threads == ["pccheck-voice-0", "pccheck-voice-1"]


def test_without_an_answer_the_same_results_are_sent_again(
    endpoint: Endpoint, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CARRY_LIMIT_S", 0.0)
    monkeypatch.setattr(module, "LATE_S", 0.05)

    def until_done(batch: int, operation: list[Any]) -> tuple[socket.socket, int, Carry]:
        """Answers messages, some of them too late, until one has the results."""
        while (found := endpoint.next(0))[2].batch != batch:
            endpoint.send(*found[:2], Carried(batch, packing.pieces([operation])))
        return found

    voice.follow(endpoint.path, endpoint.token)
    sender, number, sent = until_done(1, ["add", "n", 1])
    _, later, again = endpoint.next(0)
    assert again == sent
    assert later > number
    endpoint.send(sender, number, Carried(2, packing.pieces([["add", "n", 1]])))  # too late
    assert packing.joined(until_done(3, ["get", ["n"]])[2].results) == [[b"1"]]


def test_a_refusal_is_not_the_end(
    endpoint: Endpoint, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CARRY_LIMIT_S", 0.01)
    voice.follow(endpoint.path, endpoint.token)
    sender, number, _ = endpoint.next(0)
    endpoint.send(sender, number, messages.Failure("REFUSED", "no such session"))
    other, _, body = endpoint.next(0)
    assert other != sender
    assert body == Carry(0)


def test_a_thread_that_cannot_start_is_tried_with_the_next_connection(
    endpoint: Endpoint, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", start)
        voice.follow(endpoint.path, endpoint.token)
        voice.leave()
    assert (lanes(), open_files()) == ([], before)
    voice.follow(endpoint.path, endpoint.token)
    assert endpoint.do(0, ["add", "n", 1]) == [1]


def test_close_ends_the_threads_also_beside_a_stopped_server(
    endpoint: Endpoint, voice: Voice, server: Server
) -> None:
    voice.follow(endpoint.path, endpoint.token)
    assert endpoint.do(0, ["add", "n", 1]) == [1]
    assert endpoint.do(1, ["listen", "n", 0, ["n"], 1]) == [[1, [b"1"]]]
    endpoint.give(1, ["listen", "none", 0, ["n"], 1e9])
    suspend(server.pid)
    endpoint.give(0, ["add", "n", 1])
    voice.close()
    until(lambda: lanes() == [])
    voice.close()


def test_a_forked_child_has_no_lanes_and_disturbs_none(endpoint: Endpoint, voice: Voice) -> None:
    voice.follow(endpoint.path, endpoint.token)
    assert endpoint.do(0, ["add", "n", 1]) == [1]
    waiting = endpoint.give(1, ["listen", "late", 0, ["any"], 1e9])
    child = os.fork()
    if child == 0:
        voice.forget_in_child()
        voice.close()
        os._exit(len(lanes()))
    assert os.waitpid(child, 0)[1] == 0
    assert endpoint.do(0, ["ring", "any", b"1", "late"]) == [1]
    assert endpoint.results(1, waiting) == [[1, [b"1"]]]


@pytest.fixture
def process(endpoint: Endpoint, server: Server) -> Iterator[subprocess.Popen[str]]:
    """With a voice; ends when it gets a line: "close" closes the voice before."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDS, str(endpoint.path)], cwd=ROOT, text=True,
        env=os.environ | agent(server.port), stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as made:  # fmt: skip
        yield made
        made.kill()


@pytest.mark.parametrize("first", [[], [["add", "n", 1]]], ids=["connecting", "in-an-operation"])
@pytest.mark.parametrize("end", ["close", "leave"])
def test_the_process_ends_while_a_thread_hangs_in_the_store(
    endpoint: Endpoint, server: Server, process: subprocess.Popen[str], first: list[Any], end: str
) -> None:
    """The server's kernel still answers: the thread is in torch's C++."""
    if first:
        endpoint.do(0, *first)
    suspend(server.pid)
    endpoint.give(0, ["add", "n", 1])
    until(lambda: unsent(server.port))
    _, said = process.communicate(f"{end}\n", timeout=LIMIT_S)
    assert process.returncode == 0
    assert "terminate" not in said


def test_the_end_of_a_waiting_process_is_silent(
    endpoint: Endpoint, server: Server, process: subprocess.Popen[str]
) -> None:
    """torch's own wait() would log a warning, with a stack."""
    assert endpoint.do(1, ["listen", "none", 0, ["n"], 0.01]) == [None]
    waiting = endpoint.give(1, ["listen", "none", 0, ["n"], 1e9])
    assert endpoint.do(0, ["add", "n", 1]) == [1]
    assert waiting
    assert process.communicate("close\n", timeout=LIMIT_S)[1] == ""
    assert process.returncode == 0


ENDS = """
import sys
from pathlib import Path
from pccheck.nodes.voice import Voice

voice = Voice()
voice.follow(Path(sys.argv[1]), b"one")
if input() == "close":
    voice.close()
"""
