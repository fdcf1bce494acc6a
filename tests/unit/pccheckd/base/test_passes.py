"""What one user sends costs another user one request in each pass of the event loop, at most."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pccheckd.control.attach import AttachServer
from pccheckd.control.handlers import Handlers
from pccheckd.core.descriptors import Descriptors
from pccheckd.front.endpoints import FRONT
from pccheckd.helper import framing
from pccheckd.helper.keeper import HelperProcess, Keeper
from pccheckd.jobs.sessions import Session, Sessions

ONE, OTHER = 1, 2  # users
CONNECTIONS, PACKETS = 20, 3


class Loop(asyncio.SelectorEventLoop):
    """Counts its passes."""

    passes = 0

    def _run_once(self) -> None:
        self.passes += 1
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, type[Loop]]]:
    return "asyncio", {"loop_factory": Loop}


@pytest.fixture
async def loop(anyio_backend: object) -> Loop:
    return cast(Loop, asyncio.get_running_loop())


class Answers:
    """As much of the handlers as a connection uses: notes in which pass it is asked."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.passes: defaultdict[int, list[int]] = defaultdict(list)  # by user

    async def answer(self, uid: int, _data: bytes, _session: object = None) -> None:
        self.passes[uid].append(self._loop.passes)


def session(uid: int) -> Session:
    return cast(Session, SimpleNamespace(uid=uid, descriptors=Descriptors()))


@contextlib.contextmanager
def connections(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(count)]
        for pair in pairs:
            for end in pair:
                end.setblocking(False)
                stack.enter_context(end)
        yield pairs


async def test_many_connections_of_a_user_are_read_one_after_another(loop: Loop) -> None:
    answers = Answers(loop)
    server = AttachServer(cast(socket.socket, None), cast(Sessions, None), cast(Handlers, answers))
    with connections(CONNECTIONS + 1) as pairs:
        users = [*[ONE] * CONNECTIONS, OTHER]
        for _, theirs in pairs:
            for _ in range(PACKETS):
                theirs.send(b"request")
        serving = [
            asyncio.ensure_future(server._requests(ours, session(uid)))
            for uid, (ours, _) in zip(users, pairs, strict=True)
        ]
        while len(answers.passes[ONE]) < CONNECTIONS * PACKETS:
            assert not any(one.done() for one in serving)
            await asyncio.sleep(0)
        for _, theirs in pairs:
            theirs.close()
        await asyncio.gather(*serving)
    its, others = answers.passes[ONE], answers.passes[OTHER]
    assert len(set(its)) == len(its) == CONNECTIONS * PACKETS
    assert len(others) == PACKETS and others[-1] < its[3 * PACKETS]


async def test_requests_over_zeromq_are_taken_one_after_another(loop: Loop) -> None:
    answers = Answers(loop)
    keeper = Keeper(FRONT, ONE, ONE, [], cast(Executor, None), answers.answer)
    front = HelperProcess(FRONT, cast(Any, SimpleNamespace(pid=1)), cast(socket.socket, None))
    reader = asyncio.StreamReader()
    reader.feed_data(framing.pack(b"peer", b"request") * CONNECTIONS)
    reader.feed_eof()
    await front.serve(reader, keeper._take)
    await keeper._work.settle()
    assert len(set(answers.passes[ONE])) == len(answers.passes[ONE]) == CONNECTIONS
