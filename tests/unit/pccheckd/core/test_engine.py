"""Work in threads: no user waits for the work of another user, and the loop waits for none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pccheckd.config.options import Config
from pccheckd.core.engine import Engine

LIMIT_S = 90.0
USERS = range(1000, 1024)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    config = Config(tmp_path, tmp_path / "s", dram_bytes=1 << 24, allow_any_filesystem=True)
    engine = Engine(config)
    engine.start()
    yield engine
    engine.stop()


class Blocked:
    """Work that is begun and does not end before `let_go`."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()

    def __call__(self) -> None:
        self.begun.release()
        self.let_go.wait(LIMIT_S)

    async def wait_begun(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.begun.acquire, timeout=LIMIT_S)


async def test_long_reads_of_many_users_keep_nobody_from_a_short_one(engine: Engine) -> None:
    """Their own list and drop go on, and so do another's: also his long reads."""
    blocked = Blocked()
    long = [asyncio.create_task(engine.scan(uid, blocked)) for uid in USERS]
    try:
        await blocked.wait_begun(len(USERS))
        for uid in (USERS[0], USERS[-1] + 1):
            assert await engine.look(uid, lambda: "listed") == "listed"
            assert await engine.document(uid, lambda: "told") == "told"
        assert await engine.scan(USERS[-1] + 1, lambda: "verified") == "verified"
    finally:
        blocked.let_go.set()
    await asyncio.gather(*long)


@pytest.mark.parametrize("kind", ["scan", "look", "document"])
async def test_a_user_has_one_at_a_time_however_often_he_disconnects(
    engine: Engine, kind: str
) -> None:
    """A call that is not waited for any more still holds its thread."""
    enter, blocked = getattr(engine, kind), Blocked()
    asked = asyncio.create_task(enter(7, blocked))
    await blocked.wait_begun(1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    began = threading.Event()
    second = asyncio.create_task(enter(7, began.set))
    for _ in range(3):  # so the task could run
        await asyncio.sleep(0)
        assert await enter(8, began.is_set) is False
    blocked.let_go.set()
    await second
    assert began.is_set()


async def test_who_hangs_up_before_his_turn_leaves_it_to_the_next(engine: Engine) -> None:
    blocked = Blocked()
    first = asyncio.create_task(engine.scan(7, blocked))
    await blocked.wait_begun(1)
    waiting = asyncio.create_task(engine.scan(7, blocked))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    blocked.let_go.set()
    await first
    assert await engine.scan(7, lambda: "mine") == "mine"
