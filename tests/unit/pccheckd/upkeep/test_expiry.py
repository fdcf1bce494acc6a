"""What makes a finished job old: watched time, no wall clock. A job is reported before it is
dropped, and a few are dropped at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pccheck_native import dropping, layout
from pccheckd.config.options import Config
from pccheckd.core.engine import Engine
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.volumes import Key
from pccheckd.upkeep import expiry
from pccheckd.upkeep.expiry import Expiry, Idle
from tests.support.coreloop import BLOCK_BYTES

UID = 7
AGE_S = 7200.0


class Place:
    """Finished jobs, and a monotonic clock that is set by hand."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engine = Engine(config)
        self.registry = Registry(self.engine)
        self.now_s = 1000.0
        self.begin()

    def begin(self) -> None:
        """A daemon that has just started."""
        self.expiry = Expiry(self.registry, clock=lambda: self.now_s)

    async def finish(self, *names: str) -> None:
        for name in names:
            _, tenant = await self.registry.tenant(Key(UID, name, 0))
            if not tenant.volumes.open:
                await tenant.volumes.make(
                    100, incarnation=1, start=bytes(16), world_size=1, next_sequence=1
                )
            await tenant.binding.finish()

    async def look(self, *, after_s: float = 0.0) -> list[str]:
        self.now_s += after_s
        return [job.job for job in await self.expiry.look()]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    config = Config(
        tmp_path, tmp_path / "s", dram_bytes=1 << 24, chunk_bytes=1 << 16, slots=2, keep=1,
        block_bytes=BLOCK_BYTES, allow_any_filesystem=True, expire_finished_s=AGE_S,
    )  # fmt: skip
    place = Place(config)
    place.engine.start()
    yield place
    place.engine.stop()


async def test_said_at_one_look_and_dropped_at_the_next(place: Place, tmp_path: Path) -> None:
    await place.finish("job")
    assert await place.look() == []
    assert await place.look(after_s=AGE_S - 1) == []
    assert await place.look(after_s=1) == []  # it is due now, and reported
    assert len(layout.list_volumes(tmp_path)) == 1
    assert await place.look() == ["job"]
    assert layout.list_volumes(tmp_path) == []
    assert await place.look(after_s=AGE_S) == []


async def test_only_watched_time_counts(place: Place, tmp_path: Path) -> None:
    """The wall clock, and the time in which no daemon ran, do not count."""
    await place.finish("job")
    await place.registry.jobs[UID, "job"].tenants[0].close()
    del place.registry.jobs[UID, "job"]
    (file,) = layout.list_volumes(tmp_path)
    os.utime(file.path, (0, 0))
    for _ in range(3):
        assert await place.look() == []
    assert await place.look(after_s=AGE_S / 2) == []
    place.begin()
    assert await place.look(after_s=100 * AGE_S) == []  # between two daemons
    assert await place.look(after_s=AGE_S / 4) == []
    assert await place.look(after_s=AGE_S / 4) == []
    assert await place.look() == ["job"]


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": 1, "jobs": [5, {"uid": "x"}]}'])
async def test_what_is_lost_begins_anew(place: Place, tmp_path: Path, content: str | None) -> None:
    await place.finish("job")
    for after_s in (0.0, AGE_S):
        assert await place.look(after_s=after_s) == []
    if content is None:
        (tmp_path / expiry.STATE_NAME).unlink()
    else:
        (tmp_path / expiry.STATE_NAME).write_text(content)
    place.begin()
    for _ in range(3):
        assert await place.look() == []


async def test_a_job_in_use_or_written_to_begins_anew(place: Place, tmp_path: Path) -> None:
    await place.finish("read", "written")
    assert await place.look() == []
    tenant = place.registry.jobs[UID, "read"].tenants[0]
    tenant.uses.add_reader()
    assert await place.look(after_s=AGE_S) == []
    tenant.uses.add_reader(-1)
    (written,) = layout.list_volumes(tmp_path, job="written")
    os.utime(written.path)
    for _ in range(2):
        assert await place.look() == []
    assert await place.look(after_s=AGE_S) == []
    assert sorted(await place.look()) == ["read", "written"]


async def test_one_look_drops_a_few(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(expiry, "DROPS_MAX", 2)
    await place.finish("a", "b", "c")
    for after_s in (0.0, AGE_S):
        assert await place.look(after_s=after_s) == []
    assert len(await place.look()) == 2
    assert len(layout.list_volumes(tmp_path)) == 1
    assert len(await place.look()) == 1


async def test_a_file_that_cannot_be_written_keeps_nothing_from_being_watched(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: Idle, _storage: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Idle, "store", full)
    await place.finish("job")
    for after_s in (0.0, AGE_S):
        assert await place.look(after_s=after_s) == []
    assert await place.look() == ["job"]


async def test_expiry_waits_for_nothing_while_trainers_wait_for_it(place: Place) -> None:
    await place.finish("job")
    for after_s in (0.0, AGE_S):
        await place.look(after_s=after_s)
    verified = threading.Event()
    long = asyncio.create_task(place.engine.scan(UID, verified.wait, 30))
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(place.look(), 20) == ["job"]
    finally:
        verified.set()
        await long


async def test_a_job_that_cannot_be_dropped_does_not_keep_the_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = dropping.drop

    def failing(paths: list[Path]) -> None:
        if "after" in str(paths[0]):
            raise OSError(errno.EIO, "no")
        drop(paths)

    monkeypatch.setattr(dropping, "drop", failing)
    await place.finish("after", "job")
    for after_s in (0.0, AGE_S):
        await place.look(after_s=after_s)
    assert await place.look() == ["job"]
