"""The storage directory of a daemon, under its name."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck_native import layout
from pccheckd.storage.directory import StorageDirectory
from tests.support.descriptors import open_files


def test_a_directory_that_was_made_again_gets_the_note_of_a_private_daemon(tmp_path: Path) -> None:
    storage, socket = tmp_path / "storage", tmp_path / "attach.sock"
    storage.mkdir()
    directory = StorageDirectory(storage, private_socket=socket)
    note = layout.socket_note(storage)
    assert Path(note.read_text()) == socket
    shutil.rmtree(storage)
    assert "is not there" in directory.look()
    storage.mkdir()
    assert not directory.look()
    assert Path(note.read_text()) == socket
    directory.close()
    assert not note.exists()


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    """A directory that is mounted at another place of its own file system."""
    disk, place = tmp_path / "disk", tmp_path / "place"
    for made in (disk, place):
        made.mkdir()
    if subprocess.run(["mount", "--bind", str(disk), str(place)], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], capture_output=True)


def test_the_directory_below_a_mount_does_not_take_its_place(bound: Path) -> None:
    """Also on the same disk: a job there would begin at the start of training."""
    directory = StorageDirectory(bound)
    assert not directory.look()
    subprocess.run(["umount", "-l", str(bound)], check=True)
    assert "its own was unmounted" in directory.look()
    assert not list(bound.iterdir())
    subprocess.run(["mount", "--bind", str(bound.parent / "disk"), str(bound)], check=True)
    assert not directory.look()
    directory.close()


def test_the_note_of_another_daemon_stays(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    directory = StorageDirectory(storage, private_socket=tmp_path / "first.sock")
    shutil.rmtree(storage)
    storage.mkdir()
    other = StorageDirectory(storage, private_socket=tmp_path / "second.sock")
    assert directory.look()
    directory.close()
    assert Path(layout.socket_note(storage).read_text()).name == "second.sock"
    other.close()


def test_only_an_empty_directory_takes_the_place_of_the_one_that_was_removed(
    tmp_path: Path,
) -> None:
    """Processes number their runs by what is in a directory: other volumes have other runs."""
    storage, empty, filled = (tmp_path / name for name in ("storage", "empty", "filled"))
    for place in (storage, empty, filled):
        place.mkdir()
    volume = layout.volume_path(filled, 7, "job", 0)
    volume.parent.mkdir(parents=True)
    volume.touch()
    first, own = layout.identity(storage), layout.identity(filled)
    directory = StorageDirectory(storage)
    try:
        storage.rename(tmp_path / "away")
        empty.rename(storage)
        assert not directory.look()
        assert layout.identity(storage) == first
        copy = tmp_path / "copy"
        shutil.copytree(storage, copy)  # with its attributes
        assert layout.identity(copy) != first
        storage.rename(tmp_path / "away2")
        filled.rename(storage)
        assert not directory.look()
        assert layout.identity(storage) == own
    finally:
        directory.close()


def test_a_new_directory_that_is_removed_at_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    directory = StorageDirectory(storage)
    take = directory._taken

    def removed() -> int:
        lock = take()
        shutil.rmtree(storage)
        return lock

    monkeypatch.setattr(directory, "_taken", removed)
    try:
        shutil.rmtree(storage)
        storage.mkdir()
        descriptors = open_files()
        assert "cannot be read: No such file" in directory.look()
        assert open_files() == descriptors
        monkeypatch.undo()
        storage.mkdir()
        assert not directory.look()
    finally:
        directory.close()
