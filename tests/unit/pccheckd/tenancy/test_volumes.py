"""What the daemon knows of a volume's checkpoints, which several threads read again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import _core, catalog
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.volumes import PINNED
from tests.support.loaded import KEY


async def test_a_read_that_ends_late_takes_back_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that became durable would be missing for a moment, and its job would give it up
    on the other ranks."""
    _, tenant = await registry.tenant(KEY)
    item, read = tenant.volumes.open[0], catalog.checkpoints_of
    newest = item.checkpoints[0].id.sequence

    def overtaken(volume: _core.Volume, path: Path) -> list[catalog.StoredCheckpoint]:
        found = read(volume, path)
        monkeypatch.setattr(catalog, "checkpoints_of", read)
        volume.flag(newest, set=PINNED, clear=0, now=True)
        item.read()
        assert item.pinned == {newest}
        return found

    monkeypatch.setattr(catalog, "checkpoints_of", overtaken)
    await tenant.volumes.refresh()
    assert item.pinned == {newest}
    assert await tenant.retention.flag(newest, clear=PINNED, now=True)  # it reads, too
    assert not item.pinned
    await tenant.close()


class Counting:
    """A volume that counts how often it reads a name."""

    def __init__(self, volume: _core.Volume) -> None:
        self._volume = volume
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._volume, name)

    def name(self, sequence: int) -> tuple[int, int, int]:
        self.reads += 1
        return self._volume.name(sequence)


async def test_a_manifest_is_read_once_for_its_name(registry: Registry) -> None:
    _, tenant = await registry.tenant(KEY)
    item = tenant.volumes.open[0]
    item.volume = volume = Counting(item.volume)  # type: ignore[assignment]
    for one in item.checkpoints * 2:
        assert item.name(one) == (0, 0, one.id.step, 0)
    await tenant.volumes.refresh()
    assert item.name(item.checkpoints[0])[2] == 3
    assert volume.reads == len(item.checkpoints) > 1
    await tenant.close()


class Recycling:
    """A volume whose slots leave its table at once, and are free once `commits` is set."""

    def __init__(self, volume: _core.Volume) -> None:
        self._volume = volume
        self.has_begun, self.commits = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._volume, name)

    def has_expendable(self) -> bool:
        return not self.has_begun.is_set()

    def recycle(self) -> None:
        self._loop.call_soon_threadsafe(self.has_begun.set)
        assert self.commits.wait(60)
        self._volume.recycle()


async def test_who_looks_for_a_slot_waits_for_one_that_is_being_freed(registry: Registry) -> None:
    """Else what is in memory only would end without a slot, beside a request that frees some."""
    _, tenant = await registry.tenant(KEY)
    item = tenant.volumes.open[0]
    item.volume = volume = Recycling(item.volume)  # type: ignore[assignment]
    first = asyncio.create_task(tenant.volumes.recycle())
    await volume.has_begun.wait()
    second = asyncio.create_task(tenant.volumes.recycle())
    await asyncio.sleep(0)
    volume.commits.set()
    assert await asyncio.gather(first, second) == [True, True]
    await tenant.close()
