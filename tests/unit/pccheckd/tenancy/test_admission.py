"""Admission: in order, waiting or skipping as asked, and never stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pccheck_native import NativeError
from pccheck_wire.ends import Cause, in_words, sentence
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG
from pccheckd.tenancy.admission import PENDING_MAX, Admission
from pccheckd.tenancy.checkpoint import Checkpoint, End, failed


def checkpoint(snapshot: int, *, skip: bool = False, session: int = 1) -> Checkpoint:
    return Checkpoint(
        session=session, snapshot=snapshot, step=snapshot, payload_bytes=10, tree_offset=0,
        tree_bytes=1, skip_when_busy=skip, incarnation=1, world_size=1, requested_ns=0,
    )  # fmt: skip


class Desk(Admission):
    """Stands for a volume with so many free lanes; time passes only in `sleep`."""

    def __init__(self, free: int, answer: str = "NO_LANE") -> None:
        super().__init__(cast(Any, self))
        self.key = "a rank"
        self.free = free
        self.answer = answer
        self.cause = Cause.CODE
        self.begun: list[int] = []
        self.refused: list[tuple[int, State, str]] = []
        self.sleeps = 0
        self.on_sleep: Callable[[], None] = lambda: None

    async def attempt(self, item: Checkpoint) -> str:
        if not self.free:
            return self.answer
        self.free -= 1
        self.begun.append(item.snapshot)
        return ""

    def refuse(self, item: Checkpoint, end: End) -> None:
        self.refused.append((item.snapshot, end.to, sentence(end.why).reason))

    async def end_without_slot(self) -> End | None:
        return failed(self.cause, 7) if self.cause else None

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.on_sleep()
        await asyncio.sleep(0)

    def work_off(self, *items: Checkpoint) -> None:
        async def work() -> None:
            for item in items:
                self.submit(item)
            while len(self):
                await asyncio.sleep(0)

        asyncio.run(asyncio.wait_for(work(), 10))


def test_first_come_first_served() -> None:
    desk = Desk(free=5)
    desk.work_off(*(checkpoint(n) for n in (1, 2, 3)))
    assert desk.begun == [1, 2, 3] and not desk.sleeps


def test_waiting_ends_when_a_lane_comes_free() -> None:
    desk = Desk(free=1)

    def one_ends() -> None:
        if desk.sleeps % 3 == 0:
            desk.free += 1

    desk.on_sleep = one_ends
    desk.work_off(*(checkpoint(n) for n in (1, 2, 3)))
    assert desk.begun == [1, 2, 3] and desk.sleeps == 6 and not desk.refused


def test_skip_does_not_wait() -> None:
    desk = Desk(free=1)
    desk.work_off(checkpoint(1), checkpoint(2, skip=True))
    assert desk.begun == [1] and desk.sleeps == 0
    assert [(n, to) for n, to, _ in desk.refused] == [(2, State.SKIPPED)]


def test_a_slot_that_can_never_come_free_fails_at_once() -> None:
    desk = Desk(free=0, answer="NO_SLOT")
    desk.cause = Cause.SLOTS_PROTECTED
    desk.work_off(checkpoint(1))
    (refused,) = desk.refused
    assert refused[:2] == (1, State.FAILED) and "previous run" in refused[2]


def test_a_session_that_ends_takes_its_waiting_ones_along() -> None:
    desk = Desk(free=0)

    def ends() -> None:
        desk.drop(1)
        desk.free = 9

    desk.on_sleep = ends
    desk.work_off(checkpoint(1), checkpoint(2), checkpoint(3, session=2))
    assert [n for n, _, _ in desk.refused] == [1, 2] and desk.begun == [3]


@pytest.mark.parametrize("answer", ["", "NO_SLOT"])
async def test_the_core_ends_what_it_was_beginning_when_the_session_ended(answer: str) -> None:
    """The core may have copied the checkpoint already. If it were refused here, the other ranks
    would give it up."""
    desk = Desk(free=0)
    entered, goes_on = asyncio.Event(), asyncio.Event()

    async def attempt(item: Checkpoint) -> str:
        entered.set()
        await goes_on.wait()
        return answer

    desk.attempt = attempt  # type: ignore[method-assign]
    desk.submit(checkpoint(1))
    desk.submit(checkpoint(2))
    await entered.wait()
    desk.drop(1)
    assert [n for n, _, _ in desk.refused] == [2]
    goes_on.set()
    assert desk._task is not None
    await asyncio.wait_for(desk._task, 10)
    assert [n for n, _, _ in desk.refused] == ([2, 1] if answer else [2])
    assert not desk.sleeps


async def test_the_queue_is_bounded() -> None:
    desk = Desk(free=0)
    for number in range(PENDING_MAX + 5):
        desk.submit(checkpoint(number))
    assert len(desk.refused) == 5 and len(desk) == PENDING_MAX
    await desk.close()


def test_one_that_breaks_something_fails_alone() -> None:
    """The queue continues: otherwise every later checkpoint of the rank would wait for ever."""
    desk = Desk(free=5)
    attempt = desk.attempt

    async def broken(item: Checkpoint) -> str:
        if item.snapshot == 1:
            raise RuntimeError("fault")
        return await attempt(item)

    desk.attempt = broken  # type: ignore[method-assign]
    desk.work_off(checkpoint(1), checkpoint(2))
    assert desk.begun == [2]
    assert desk.refused == [(1, State.FAILED, "an internal error of the daemon")]


@pytest.mark.parametrize("ends", [True, False])
def test_an_error_of_one_that_was_refused_meanwhile_is_no_fault(
    caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """The session ended while the core began the checkpoint, and found its word changed. Otherwise
    only a trainer that violates the protocol changes the word, and that is no traceback, either."""
    refused: list[str] = []

    class Tenant:
        key = "key"
        group = SimpleNamespace(gives_up=lambda _: False)

        async def begin_save(self, item: Checkpoint) -> int:
            if ends:
                item.end(State.FAILED, 1, in_words("the trainer ended"))
            raise native("BAD_PEER")

        def refuse(self, item: Checkpoint, end: End) -> None:
            refused.append(sentence(end.why).reason)

    LOG.addHandler(caplog.handler)
    try:
        assert asyncio.run(Admission(cast(Any, Tenant())).attempt(checkpoint(1))) == ""
    finally:
        LOG.removeHandler(caplog.handler)
    assert refused == ([] if ends else ["the trainer violated the protocol"])
    assert "cannot begin" not in caplog.text


def native(code_name: str) -> NativeError:
    error = NativeError(code_name)
    error.code, error.code_name = -1, code_name
    return error
