"""Nothing that runs beside the daemon's requests ends in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from pccheckd.base import background
from pccheckd.base.background import Background, Tasks
from pccheckd.base.logs import LOG

LIMIT_S = 90.0


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[
    pytest.LogCaptureFixture
]:  # fmt: skip
    monkeypatch.setattr(LOG, "propagate", True)
    monkeypatch.setattr(background, "RESTART_S", 0.0)
    caplog.set_level(logging.INFO, LOG.name)
    yield caplog


class Failing(Background):
    """Fails three times, then works."""

    def __init__(self) -> None:
        self.begun = 0
        self.well = asyncio.Event()

    async def _run(self) -> None:
        self.begun += 1
        if self.begun <= 3:
            raise RuntimeError(f"fault {self.begun}")
        self.well.set()
        await asyncio.Event().wait()


async def test_what_fails_is_told_with_its_traceback_and_begun_anew(
    log: pytest.LogCaptureFixture,
) -> None:
    task = Failing()
    task.start()
    await asyncio.wait_for(task.well.wait(), LIMIT_S)
    await task.close()
    assert task.begun == 4
    told = [record for record in log.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in told] == ["Failing failed and restarts"] * 3
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == [
        "fault 1", "fault 2", "fault 3",
    ]  # fmt: skip


async def test_a_piece_of_work_that_fails_is_told(log: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("fault")

    tasks = Tasks("job 5")
    tasks.spawn(fail())
    tasks.spawn(asyncio.sleep(0))
    await tasks.settle()
    await asyncio.sleep(0)
    (told,) = log.records
    assert told.getMessage() == "job 5: background work failed"
    assert told.exc_info and str(told.exc_info[1]) == "fault"
