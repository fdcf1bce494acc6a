"""Unreadable messages on the attach socket of a real daemon: they are answered, and do no harm."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import ClassVar, cast

import msgpack
import pytest

from pccheck_wire import attach, codec, packing
from pccheck_wire.basics import SAME_VERSION_HINT
from pccheck_wire.errors import ProtocolError
from pccheck_wire.messages import Failure, Reply, Report, RequestBody, Status
from tests.support.daemon import Daemon

LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Future:
    """A request of a later version."""

    TAG: ClassVar[str] = "future"
    number: int = 5


def request(**changes: object) -> bytes:
    plain = {"t": "request", "number": 7, "token": b"t", "body": {"t": "status"}} | changes
    return cast(bytes, msgpack.packb(plain))


def answer_to(observer: attach.Attachment, packet: bytes) -> Reply:
    observer.socket.settimeout(LIMIT_S)
    observer.socket.send(packet)
    answer = codec.decode(
        observer.socket.recv(packing.PACKET_BYTES), Reply, bytes_max=packing.REPLY_BYTES_MAX
    )
    assert isinstance(answer, Reply)
    return answer


@pytest.mark.parametrize(
    ("packet", "number", "said"),
    [
        (b"\xc1garbage", 0, "not a message"),
        (b"x" * (packing.REQUEST_BYTES_MAX + 1), 0, "the limit is 65536"),
        (msgpack.packb([1, 2]), 0, "a map is expected"),
        (request(number="7"), 0, "$.number"),
        (request(number=-1), 0, "$.number"),
        (request(more=1), 7, "$.more: no such field"),
        (request(body={"t": "future"}), 7, "$.body.t"),
        (request(body={"t": "status", "deep": 1}), 7, "$.body.deep"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_read_is_answered_with_the_fix(
    daemon: Daemon, packet: bytes, number: int, said: str
) -> None:
    with attach.observe(daemon.socket) as observer:
        for _ in range(2):
            reply = answer_to(observer, packet)
            assert isinstance(reply.body, Failure)
            assert (reply.number, reply.body.code) == (number, "PROTOCOL")
            assert said in reply.body.message
            assert reply.body.hint == SAME_VERSION_HINT
        assert isinstance(observer.request(Status()), Report)  # it costs that request only


@pytest.mark.parametrize("mangle", [False, True])
def test_an_unreadable_request_is_answered_at_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, mangle: bool
) -> None:
    """An error is returned at once, not at the time limit of the request, which is long for a
    verify."""
    with attach.observe(daemon.socket) as observer:
        with monkeypatch.context() as patch:
            if mangle:  # so that the number of the request cannot be read either
                patch.setattr(codec, "encode", lambda _: b"\xc1")
            with pytest.raises(ProtocolError, match=r"cannot be read.*same version"):
                observer.request(cast(RequestBody, Future()), timeout_s=LIMIT_S)
        assert isinstance(observer.request(Status()), Report)


def test_a_hello_that_cannot_be_read_is_answered_too(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(LIMIT_S)
        raw.connect(str(daemon.socket))
        raw.send(b"\xc1")
        told = codec.decode(raw.recv(packing.PACKET_BYTES), Failure)
        assert (told.code, told.hint) == ("PROTOCOL", SAME_VERSION_HINT)
        assert raw.recv(1) == b""


def test_a_flood_that_is_not_read_stays_in_its_own_socket(daemon: Daemon) -> None:
    """The daemon reads no more requests while their answers are not read; other clients are
    served."""
    with attach.observe(daemon.socket) as flood, attach.observe(daemon.socket) as other:
        flood.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            for _ in range(1_000_000):
                flood.socket.send(b"\xc1" * 1000)
                if not _ % 100:
                    assert isinstance(other.request(Status()), Report)
        assert isinstance(other.request(Status()), Report)
