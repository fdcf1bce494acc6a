"""Exposures in pieces, the choice of a trainer, and the CUDA driver beside the daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pccheck_native import EXPOSURE_BYTES_MAX, Event, SaveTimes
from pccheck_native.transfer import DriverState
from pccheck_wire import codec, packing
from pccheck_wire.errors import RefusedError, UsageError
from pccheck_wire.messages import Chose, Expose, Request
from pccheckd.core import gpus
from pccheckd.core.exposing import UNFINISHED_BYTES_MAX, Exposing, checked
from pccheckd.tenancy.pulling import Pulling
from tests.support.jobs import saving

ROOM = UNFINISHED_BYTES_MAX


def test_pieces_become_one_exposure() -> None:
    made = Exposing()
    assert made.take(Expose(1, [b"ab", b"c"], more=True), room_bytes=ROOM) is None
    assert made.held_bytes == 3
    assert made.take(Expose(1, [], more=True), room_bytes=ROOM) is None
    assert made.take(Expose(1, [b"d"]), room_bytes=ROOM) == b"abcd"
    assert made.held_bytes == 0
    assert made.take(Expose(2, [b"e"]), room_bytes=ROOM) == b"e"


def test_a_new_map_drops_the_half_received_one() -> None:
    made = Exposing()
    made.take(Expose(1, [b"old"], more=True), room_bytes=ROOM)
    assert made.take(Expose(3, [b"new"], more=True), room_bytes=ROOM) is None
    assert made.take(Expose(3, [b"er"]), room_bytes=ROOM) == b"newer"


@pytest.mark.parametrize("number", [0, 2, 3])
def test_map_numbers_grow(number: int) -> None:
    made = Exposing()
    assert made.take(Expose(3, [b"x"]), room_bytes=ROOM) == b"x"
    with pytest.raises(UsageError, match=r"\$\.body\.map"):
        made.take(Expose(number, [b"x"]), room_bytes=ROOM)
    assert made.take(Expose(4, [b"y"]), room_bytes=ROOM) == b"y"


def test_too_much_is_refused_and_forgotten() -> None:
    made, piece = Exposing(), bytes(EXPOSURE_BYTES_MAX // 2)
    for _ in range(2):
        assert made.take(Expose(1, [piece], more=True), room_bytes=ROOM) is None
    with pytest.raises(RefusedError, match="at most") as caught:
        made.take(Expose(1, [b"x"]), room_bytes=ROOM)
    assert "pushed" in caught.value.hint
    assert made.held_bytes == 0
    with pytest.raises(UsageError):  # the rest of it, sent before the answer was there
        made.take(Expose(1, [b"x"]), room_bytes=ROOM)
    with pytest.raises(RefusedError, match="are incomplete"):
        made.take(Expose(2, [b"xy"], more=True), room_bytes=1)
    assert made.held_bytes == 0


def test_a_full_message_fits_the_wire() -> None:
    pieces = [bytes(codec.PIECE_BYTES)] * codec.PIECES_MAX
    body = Expose(2**63 - 1, pieces, more=True)
    data = codec.encode(Request(2**63 - 1, bytes(16), body))
    assert len(data) <= packing.REQUEST_BYTES_MAX
    assert codec.decode(data, Request).body == body


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [("steal", ""), ("", ""), ("pull", "x" * 201), ("push", "a\nb"), ("push", "\x1b[31mred")],
)
def test_a_choice_that_cannot_be(transfer: str, reason: str) -> None:
    with pytest.raises(UsageError, match=r"\$\.body\."):
        checked(Chose(transfer, reason))


def test_a_choice() -> None:
    assert checked(Chose("pull", "r" * 200)) == ("pull", "r" * 200)


# -- how pulled copies end ---------------------------------------------------------------------


def counting() -> Pulling:
    no_port: Any = None
    return Pulling(no_port)


def ended(
    pulling: Pulling, kind: str, error: str = "", *, stage: str = "copy", session: int = 1,
    number: int = 1,
) -> None:  # fmt: skip
    times = SaveTimes(*[0] * len(SaveTimes._fields))
    event = Event(kind, 1, session, 1, 1, 0, -1, error, stage, 0, 0, 0, 0, times, None)
    pulling.note(saving(session=session, map=number), event)


def test_failed_copies_of_a_session_are_counted() -> None:
    pulling = counting()
    for count, error in enumerate(("DEVICE", "BAD_HANDLE", "DEVICE_LOST")):
        assert pulling.failed(1) == count
        ended(pulling, "failed", error)
    assert (pulling.failed(1), pulling.failed(2)) == (3, 0)
    pulling.refused()
    assert pulling.failed(1) == 0


@pytest.mark.parametrize(
    ("stage", "error", "number"),
    [("write", "EIO", 1), ("copy", "ABORTED", 1), ("copy", "DAMAGED", 1), ("copy", "DEVICE", 0)],
)
def test_what_is_no_fault_of_the_driver_does_not_count(stage: str, error: str, number: int) -> None:
    pulling = counting()
    ended(pulling, "failed", error, stage=stage, number=number)
    assert pulling.failed(1) == 0


def test_a_copy_that_succeeds_and_another_session_begin_anew() -> None:
    pulling = counting()
    for _ in range(2):
        ended(pulling, "failed", "DEVICE")
    ended(pulling, "copied")
    ended(pulling, "failed", "DEVICE")
    assert pulling.failed(1) == 1
    for _ in range(2):
        ended(pulling, "failed", "DEVICE", session=2)
    assert (pulling.failed(1), pulling.failed(2)) == (0, 2)


# -- the driver --------------------------------------------------------------------------------


class Native:
    """Replaces the compiled module's driver, and the process that tries the driver first."""

    def __init__(self, *missing: str, gate: threading.Event | None = None) -> None:
        self.missing = list(missing) or [""]
        self.gate = gate
        self.closed = False
        self.loads = 0

    def tried(self) -> str:
        if self.gate is not None:
            self.gate.wait(60)
        return self.missing.pop(0) if len(self.missing) > 1 else self.missing[0]

    def cuda_missing(self) -> str:
        self.loads += 1
        return self.missing[0]

    def cuda_driver(self) -> tuple[int, int]:
        return 12080, 8

    def Gpus(self) -> Native:  # noqa: N802
        return self

    def info(self) -> list[object]:
        return []

    def close(self) -> None:
        self.closed = True


def driven(monkeypatch: pytest.MonkeyPatch, native: Native, *, installed: bool = True) -> None:
    for name in ("cuda_missing", "cuda_driver", "Gpus"):
        monkeypatch.setattr(f"pccheckd.core.gpus._core.{name}", getattr(native, name))
    monkeypatch.setattr(gpus, "_missing_elsewhere", native.tried)
    monkeypatch.setattr(gpus, "_installed", lambda: installed)
    monkeypatch.setenv("CUDA_DISABLE_PERF_BOOST", "1")


@asynccontextmanager
async def loading() -> AsyncIterator[gpus.Driver]:
    driver = gpus.Driver()
    driver.start()
    await driver.ready()
    try:
        yield driver
    finally:
        driver.take_away()


async def test_a_driver_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Native()
    driven(monkeypatch, native)
    async with loading() as driver:
        assert driver.state == DriverState("driver 12.8")
        assert driver.take_away() is native  # type: ignore[comparison-overlap]
        assert driver.take_away() is None


async def test_without_a_driver_tensors_are_pushed_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driven(monkeypatch, Native("libcuda.so.1 is not there"), installed=False)
    async with loading() as driver:
        assert driver.gpus is None and driver.info() == []
        assert "libcuda.so.1 is not there" in driver.state.missing and not driver.state.may_pass


async def test_a_driver_that_fails_is_tried_again_in_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = Native("cuInit: not yet", "cuInit: still not", "")
    driven(monkeypatch, native)
    monkeypatch.setattr(gpus, "RETRY_S", 0.001)
    async with loading() as driver:
        while driver.state.missing:
            assert driver.state.may_pass
            await asyncio.sleep(0.001)
    assert native.loads == 1  # this process has seen no failure


async def test_nobody_waits_long_for_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts from the start, not from each trainer's coming."""
    monkeypatch.setattr(gpus, "DRIVER_LIMIT_S", 0.0)
    gate = threading.Event()
    native = Native(gate=gate)
    driven(monkeypatch, native)
    try:
        async with loading() as driver:
            assert driver.gpus is native  # type: ignore[comparison-overlap]
            assert driver.state.missing and driver.state.may_pass
    finally:
        gate.set()
