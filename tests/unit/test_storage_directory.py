"""The storage directory of a daemon, under its name."""

from __future__ import annotations

import shutil
from pathlib import Path

from pccheck_native import layout
from pccheckd.storage.directory import StorageDirectory


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
