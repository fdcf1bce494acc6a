"""Requests that nobody waits for: a fault in one is logged, and told where there is a way."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest

from pccheck_wire import codec
from pccheck_wire.messages import Chose, Request, Restored
from pccheckd.base.logs import LOG
from pccheckd.control.attach import AttachServer
from tests.unit.pccheckd.control.test_handlers import Place
from tests.unit.pccheckd.control.test_handlers import place as place  # a fixture


class FaultError(RuntimeError):
    """An error of our own: no peer could have caused it."""


def fail(*_: object, **__: object) -> object:
    raise FaultError("of ours")


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(LOG, "propagate", True)
    caplog.set_level(logging.INFO, LOG.name)
    yield caplog


def one_way(place: Place, body: Chose | Restored) -> bytes:
    return codec.encode(Request(0, place.session.token, body))


def told(log: pytest.LogCaptureFixture) -> list[str]:
    return [str(one.exc_info[1]) for one in log.records if one.exc_info]


async def test_a_fault_in_what_needs_no_answer_is_logged(
    place: Place, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.job, "restored", fail)
    message = one_way(place, Restored(7))
    assert await place.handlers.answer(place.session.uid, message) is None
    refused = codec.encode(Request(0, place.session.token, Chose("push", "")))
    place.session.role = next(r for r in type(place.session.role) if r.value == "reader")
    assert await place.handlers.answer(place.session.uid, refused) is None
    assert told(log) == ["of ours"]
    assert any("requires a trainer" in record.getMessage() for record in log.records)


async def test_a_fault_while_requests_are_served_is_logged_and_ends_the_session(
    place: Place, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair(type=socket.SOCK_SEQPACKET))
        ours.setblocking(False)
        server = AttachServer(cast(socket.socket, None), place.sessions, place.handlers)
        monkeypatch.setattr(place.handlers, "answer", fail)
        theirs.send(b"a request")
        with pytest.raises(FaultError):
            await asyncio.wait_for(server._until_gone(ours, place.session), 20)
