"""Volumes go whole, the newest last, and never from under anybody."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pccheck_native import dropping, layout
from pccheckd.storage import lock as daemon_storage
from tests.support.volumes import UID, Rank, make


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return make(tmp_path / "storage", 10, 20)


def outgrown(storage: Path) -> list[Path]:
    """The volume gets a follower; both, oldest first."""
    first = layout.volume_path(storage, UID, "job", 0)
    second = layout.volume_path(storage, UID, "job", 0, 1)
    second.write_bytes(first.read_bytes())
    return [first, second]


def test_what_would_go_is_named_with_its_room(storage: Path) -> None:
    (victim,) = dropping.victims(storage, uid=UID, job="job")
    assert victim.bytes == victim.file.path.stat().st_blocks * 512
    assert (victim.checkpoints, victim.newest_step, victim.done) == (2, 20, False)
    assert dropping.victims(storage, uid=UID, job="other") == []


def test_an_unreadable_volume_can_go_too(storage: Path) -> None:
    (path,) = storage.rglob("*.pcc")
    path.write_bytes(b"\xff" * 8192)
    (victim,) = dropping.victims(storage, job="job")
    assert victim.problem
    dropping.drop([victim.file.path])
    assert list(storage.rglob("*.pcc")) == []


def test_a_dropped_job_leaves_no_directory(storage: Path) -> None:
    dropping.drop([victim.file.path for victim in dropping.victims(storage)])
    assert [p.name for p in (storage / str(UID)).iterdir()] == []


def test_the_record_of_a_start_goes_with_the_last_volume(storage: Path) -> None:
    path = layout.volume_path(storage, UID, "job", 0)
    record = path.with_name(f"start-{bytes(range(16)).hex()}.json")
    record.touch()
    other = record.with_name("start-of-something-else.json")
    assert [one.file.path for one in dropping.victims(storage)] == [path]
    half = record.with_name(record.name + ".tmp")
    half.touch()
    servers = layout.servers_path(storage, UID, "job")
    servers.touch()
    servers.with_name(f"{servers.name}.tmp").touch()
    assert layout.jobs_with_servers(storage) == [(UID, "job")]
    assert layout.start_records(path.parent) == {bytes(range(16)): record}
    assert layout.left_records(path.parent) == []
    other.touch()
    dropping.drop([path])
    assert list(other.parent.iterdir()) == [other]


def test_an_interruption_leaves_the_newest_volume_or_nothing_of_it(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at every operation: what looks like a volume is always the last generation."""
    paths = outgrown(storage)
    images = {path: path.read_bytes() for path in paths}
    operations = {"rename": Path.rename, "unlink": Path.unlink}
    ended = False
    at = 0
    while not ended:
        for path, data in images.items():
            path.write_bytes(data)
        left = [at]

        def counted(name: str, left: list[int] = left) -> object:
            def do(self: Path, *arguments: object, **options: object) -> object:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                return operations[name](self, *arguments, **options)  # type: ignore[operator]

            return do

        with monkeypatch.context() as patched:
            for name in operations:
                patched.setattr(Path, name, counted(name))
            try:
                dropping.drop(paths)
                ended = True
            except KeyboardInterrupt:
                pass
        there = [file.path for file in layout.list_volumes(storage)]
        assert there in (paths, paths[1:], [])
        daemon_storage.sweep(storage)
        assert sorted(p for p in storage.rglob("*") if p.is_file()) == sorted(there)
        at += 1
    assert at == 5  # two renames, two removals, and none interrupted


def test_a_volume_in_use_is_left_alone_with_all_others(storage: Path) -> None:
    paths = outgrown(storage)
    holder = os.open(paths[1], os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(dropping.InUseError, match=r"rank-0\.1"):
        dropping.drop(paths)
    os.close(holder)
    assert all(path.exists() for path in paths)


def test_room_that_could_not_be_given_back_is_when_the_next_is_dropped(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = outgrown(storage)
    making = second.with_name("rank-0.2.pcc.xyz.tmp")  # another volume on its way
    making.touch()
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(first.name):
            raise OSError(errno.EIO, "the disk", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(OSError, match="the disk"):
        dropping.drop([first, second])
    (left,) = (path for path in first.parent.iterdir() if path != making)
    assert left.name.startswith(first.name) and dropping.victims(storage) == []
    with pytest.raises(OSError, match="the disk"):
        dropping.clear(storage)
    monkeypatch.undo()
    assert dropping.clear(storage) == 1
    assert list(first.parent.iterdir()) == [making]
    assert dropping.clear(storage) == 0
    making.unlink()


def test_a_job_is_done_when_all_its_ranks_are(tmp_path: Path) -> None:
    place = make(tmp_path / "storage", 10, rank=0, world_size=2)
    make(place, 10, rank=1, world_size=2)
    for rank in (0, 1):
        (job,) = dropping.jobs(place)
        assert not job.done
        with Rank(place, rank=rank, world_size=2) as made:
            made.volume.finish(1)
    (job,) = dropping.jobs(place)
    assert job.done
    assert job.bytes == sum(p.stat().st_blocks * 512 for p in place.rglob("*.pcc"))
