"""The observer's plain maps are the wire's messages; failures of every kind become our errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pccheck_store import observer
from pccheck_wire import codec, packing
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import (
    DaemonUnreachableError,
    PccheckError,
    ProtocolError,
    RefusedError,
    WaitTimeoutError,
)
from pccheck_wire.messages import (
    Drop,
    Failure,
    Hello,
    ListServers,
    ListVolumes,
    Reply,
    Report,
    Request,
    Role,
    Status,
    Trace,
    Verify,
    Welcome,
)
from pccheckctl.output.documents import rows

TOKEN = b"t" * 16
WELCOME = codec.encode(Welcome(1, "0.1.0", 1, TOKEN, "", 42))


class FakeDaemon:
    """Answers each packet with the next answer, which is packets or a function of the request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: list[list[bytes]] = []
        self.heard: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            for answer in self.answers:
                self.heard.append(connection.recv(1 << 16))
                for packet in answer:
                    connection.send(packet)

    def close(self) -> None:
        self._thread.join(5)
        self._socket.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    made = FakeDaemon(tmp_path / "s")
    yield made
    made.close()


def reply(document: dict[str, object]) -> list[bytes]:
    return packing.packets(codec.encode(Reply(1, Report(document))))


def test_hello_is_the_wire_s() -> None:
    message = codec.decode(observer.msgpack.packb(observer.hello()), Hello)
    assert message.role is Role.OBSERVER
    assert message.protocol == PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (lambda o: o.drop("job", uid=7, dry_run=True), Drop("job", None, 7, dry_run=True)),
        (lambda o: o.drop("job", rank=2, dry_run=False), Drop("job", 2)),
        (lambda o: o.servers(), ListServers()),
        (lambda o: o.listing("job"), ListVolumes("job")),
        (lambda o: o.verify("job", rank=2, sequence=3, uid=7), Verify("job", 2, 3, 7)),
        (lambda o: o.verify("j", rank=0, subset="5%", seed=4), Verify("j", subset="5%", seed=4)),
        (lambda o: o.trace(30), Trace(30.0)),
    ],
)
def test_requests_are_the_wire_s(
    daemon: FakeDaemon, ask: Callable[[observer.Observer], dict[str, object]], body: object
) -> None:
    daemon.answers = [[WELCOME], reply({"schema": 1})]
    with observer.Observer(str(daemon.path)) as opened:
        assert ask(opened)["schema"] == 1
    daemon.close()
    assert codec.decode(daemon.heard[1], Request) == Request(1, TOKEN, body)  # type: ignore[arg-type]


def test_a_long_reply_comes_in_several_packets(daemon: FakeDaemon) -> None:
    document: dict[str, object] = {"checkpoints": [], "volumes": [], "long": ["x" * 1000] * 300}
    packets = reply(document)
    assert len(packets) > 1
    daemon.answers = [[WELCOME], packets]
    with observer.Observer(str(daemon.path)) as opened:
        assert opened.listing() == document


def test_a_failure_keeps_code_and_hint(daemon: FakeDaemon) -> None:
    failure = codec.encode(Failure("REFUSED", "not you", "be another"))
    daemon.answers = [[failure]]
    with pytest.raises(RefusedError, match="not you") as caught:
        observer.Observer(str(daemon.path))
    assert caught.value.hint == "be another"


def test_a_failure_in_a_reply_is_raised(daemon: FakeDaemon) -> None:
    daemon.answers = [[WELCOME], [codec.encode(Reply(1, Failure("STRANGE", "what?")))]]
    with observer.Observer(str(daemon.path)) as opened, pytest.raises(PccheckError, match="what"):
        opened.status()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachableError, match="no daemon listens"):
        observer.Observer(str(tmp_path / "nothing"))


def test_a_daemon_that_hangs_up(daemon: FakeDaemon) -> None:
    daemon.answers = [[]]
    with pytest.raises(DaemonUnreachableError, match="hung up"):
        observer.Observer(str(daemon.path))


def test_somebody_else_listens(daemon: FakeDaemon) -> None:
    daemon.answers = [[b"\xc1"]]
    with pytest.raises(ProtocolError, match="does not speak"):
        observer.Observer(str(daemon.path))


def test_a_stream_socket_is_not_ours(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        with pytest.raises(ProtocolError, match="not the socket"):
            observer.Observer(str(tmp_path / "s"))


def test_a_silent_daemon_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(WaitTimeoutError, match="did not answer"):
            observer.Observer(str(tmp_path / "s"), timeout_s=0.05)


def test_status_is_completed_with_ranks_that_nobody_connected_to(daemon: FakeDaemon) -> None:
    known = {"uid": 1, "job": "a", "rank": 0, "newest": {"step": 5}}
    volumes = [{"uid": 1, "job": job, "rank": 0, "incarnation": 2} for job in ("a", "b")]
    checkpoints = [
        {"uid": 1, "job": "b", "rank": 0, "sequence": 3, "step": 9, "damaged": True},
        {"uid": 1, "job": "b", "rank": 0, "sequence": 2, "step": 8, "damaged": False},
        {"uid": 1, "job": "b", "rank": 0, "sequence": 1, "step": 7, "damaged": False},
    ]
    listed = Reply(2, Report({"volumes": volumes, "checkpoints": checkpoints}))
    daemon.answers = [[WELCOME], reply({"ranks": [known]}), [codec.encode(listed)]]
    with observer.Observer(str(daemon.path)) as opened:
        first, second = rows(opened.status(), "ranks")
    assert first == known | {"stale": False}
    assert (second["job"], second["connected"]) == ("b", False)
    assert second["newest"] == {"sequence": 2, "step": 8, "wall_ns": None}
    daemon.close()
    assert codec.decode(daemon.heard[1], Request) == Request(1, TOKEN, Status())


def test_the_late_answer_of_an_earlier_request_is_not_taken_for_the_next(
    daemon: FakeDaemon,
) -> None:
    late = codec.encode(Reply(1, Report({"late": True})))
    daemon.answers = [[WELCOME], [], [late, codec.encode(Reply(2, Report({"late": False})))]]
    with observer.Observer(str(daemon.path)) as opened:
        with pytest.raises(WaitTimeoutError):
            opened.listing(timeout_s=0.05)
        assert opened.config() == {"late": False}


def test_status_does_not_fail_with_the_list(daemon: FakeDaemon) -> None:
    daemon.answers = [[WELCOME], reply({"ranks": []})]
    with observer.Observer(str(daemon.path)) as opened:
        assert opened.status() == {"ranks": []}
