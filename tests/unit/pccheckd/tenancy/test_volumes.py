"""What the daemon knows of a volume's checkpoints, which several threads read again."""

from __future__ import annotations

from pathlib import Path

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
