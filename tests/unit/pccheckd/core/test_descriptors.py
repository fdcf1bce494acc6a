"""Descriptors that come for an exposure: kept until it comes, closed in every other case."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck_wire.errors import RefusedError, UsageError
from pccheck_wire.messages import Lend
from pccheckd.core import descriptors
from pccheckd.core.descriptors import Descriptors, Lot

ROOM = 8


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(descriptors, "ARRIVAL_LIMIT_S", 0.01)
    before = open_files()
    yield
    assert open_files() <= before  # fewer: something before these tests is collected late


def lend(session: Descriptors, number: int, came: int, *, said: int | None = None) -> None:
    """A packet with `came` descriptors, as the attach server handles it."""
    session.packet.put([os.open(os.devnull, os.O_RDONLY) for _ in range(came)])
    try:
        session.receive(Lend(number, came if said is None else said), room=ROOM)
    finally:
        session.packet.close()


def taken(session: Descriptors, number: int, count: int) -> int:
    async def ask() -> int:
        lot = await session.collect(number, count)
        held = len(lot)
        assert len(lot.packed()) == 4 * held
        lot.close()
        return held

    try:
        return asyncio.run(ask())
    finally:
        session.close()


def test_what_was_sent_comes_with_its_exposure() -> None:
    session = Descriptors()
    lend(session, 3, 2)
    lend(session, 3, 1)
    assert len(session) == 3
    assert taken(session, 3, 3) == 3


def test_an_exposure_that_comes_first_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "ARRIVAL_LIMIT_S", 60.0)
    session = Descriptors()

    async def both() -> int:
        asking = asyncio.create_task(session.collect(2, 3))
        for _ in range(3):
            await asyncio.sleep(0)
            lend(session, 2, 1)
        lot = await asking
        held = len(lot)
        lot.close()
        return held

    assert asyncio.run(both()) == 3


@pytest.mark.parametrize(
    ("sent", "number", "count"),
    [
        ([], 1, 3),  # none
        ([(1, 2)], 1, 3),  # fewer
        ([(1, 3), (1, 3)], 1, 3),  # twice
        ([(1, 3)], 1, 0),  # not said
        ([(2, 3)], 1, 3),  # for another exposure
        ([(1, 3)], 2, 3),
        ([(1, 3), (2, 3)], 1, 3),
    ],
)
def test_other_descriptors_are_refused(
    sent: list[tuple[int, int]], number: int, count: int
) -> None:
    session = Descriptors()
    for map_number, came in sent:
        lend(session, map_number, came)
    with pytest.raises(RefusedError, match=f"came, not {count}") as caught:
        taken(session, number, count)
    assert caught.value.retryable


@pytest.mark.parametrize(("came", "said"), [(0, 3), (3, 0), (0, 0), (2, 3)])
def test_a_packet_without_what_it_says_ends_the_exposure(came: int, said: int) -> None:
    session = Descriptors()
    lend(session, 1, 2)
    with pytest.raises(UsageError):
        lend(session, 1, came, said=said)
    assert len(session) == 0
    lend(session, 1, 2)  # is dropped, too
    with pytest.raises(RefusedError, match=f"{came} came"):
        taken(session, 1, 2)


def test_a_user_has_a_limit() -> None:
    session = Descriptors()
    lend(session, 1, ROOM)
    with pytest.raises(RefusedError, match="too many"):
        lend(session, 1, 1)
    assert len(session) == 0
    with pytest.raises(RefusedError, match="too many"):
        taken(session, 1, ROOM + 1)


def test_a_newer_exposure_drops_what_came_for_the_one_before() -> None:
    session = Descriptors()
    lend(session, 1, 4)
    lend(session, 2, 1)
    assert len(session) == 1
    with pytest.raises(UsageError, match="must not fall"):
        lend(session, 1, 1)
    assert taken(session, 2, 1) == 1
    lend(session, 3, 2)
    assert taken(session, 4, 0) == 0


def test_no_close_waits_for_a_socket_that_lingers() -> None:
    with socket.socket() as sent:
        sent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
        lot = Lot()
        lot.put([os.dup(sent.fileno())])
        lot.close()
        lingers = sent.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)
    assert struct.unpack("ii", lingers)[0] == 0
