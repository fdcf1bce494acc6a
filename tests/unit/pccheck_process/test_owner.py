"""Whose image is restored: root runs nothing as root that another user has stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import _core, catalog
from pccheck_native.identity import CheckpointId
from pccheck_process import restoring
from pccheck_wire.errors import NoCheckpointError, RefusedError, UsageError


def stored(uid: int, sequence: int, flags: int = _core.SLOT_IMAGE) -> catalog.StoredCheckpoint:
    name = CheckpointId(uid, "job", 0, sequence, sequence, 1, 1, b"", b"")
    return catalog.StoredCheckpoint(
        name, 10, tree_offset=0, tree_bytes=1, wall_ns=0, flags=flags, slot=0,
        volume_path=Path("volume"), base=0, own_bytes=10,
    )  # fmt: skip


class Holds:
    """A source with these checkpoints."""

    path, served = Path("/"), False

    def __init__(self, *checkpoints: catalog.StoredCheckpoint) -> None:
        self._checkpoints = checkpoints

    def held(self, *, uid: int | None = None, job: str = "", **_: object) -> catalog.Catalog:
        mine = [one for one in self._checkpoints if uid in (None, one.id.uid)]
        return catalog.Catalog(mine, {}, [], [])


def test_the_owner_is_the_volumes_and_not_what_the_image_says() -> None:
    source: Any = Holds(stored(4242, 1), stored(4242, 2))
    assert restoring.owner(source, "job", None) == 4242


def test_root_gets_no_image_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when that image is newer than root's own."""
    mine = stored(0, 1)
    source: Any = Holds(mine, stored(4242, 9))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert restoring._snapshots(source, restoring.RestoreWanted("job")) == [mine]


def test_root_trusts_the_user_of_a_daemon_that_serves_the_directory(tmp_path: Path) -> None:
    """As that of the shipped unit. A directory that is only named may be anybody's."""
    volume = tmp_path / "volume"
    volume.touch()
    os.chown(tmp_path, 4242, 4242)
    os.chown(volume, 4242, 4242)
    source: Any = Holds(stored(0, 1)._replace(volume_path=volume))
    source.path = tmp_path
    with pytest.raises(RefusedError, match="belongs to uid 4242"):
        restoring.owner(source, "job", None)
    source.served = True
    assert restoring.owner(source, "job", None) == 0


def test_several_users_with_one_job_name() -> None:
    source: Any = Holds(stored(4242, 1), stored(4243, 2))
    with pytest.raises(UsageError, match="4242, 4243"):
        restoring.owner(source, "job", None)
    assert restoring.owner(source, "job", 4243) == 4243


def test_checkpoints_of_tensors_are_no_snapshots() -> None:
    source: Any = Holds(stored(0, 1, flags=0))
    with pytest.raises(NoCheckpointError, match="no process snapshot of job 'job'"):
        restoring.owner(source, "job", None)
