"""The socket's directory and what lies beside the socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pccheck_wire.errors import NoStoreError
from pccheckd.control import attach
from pccheckd.front.endpoints import _remove_noted, _write_note


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_a_directory_of_everybody_keeps_its_group(tmp_path: Path) -> None:
    shared, ours = tmp_path / "shared", tmp_path / "ours"
    shared.mkdir()
    shared.chmod(0o1777)
    for directory, group in ((shared, 0), (ours, 1)):
        attach.make_runtime(directory, "daemon")
        assert directory.stat().st_gid == group
    assert ours.stat().st_mode & 0o7777 == 0o750


def test_a_link_in_the_place_of_the_socket_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is put there right after the socket was bound."""
    target, path = tmp_path / "target", tmp_path / "attach.sock"
    target.touch(mode=0o600)

    def swapped(made: socket.socket, _address: str) -> None:
        path.symlink_to(target)

    monkeypatch.setattr(socket.socket, "bind", swapped)
    with pytest.raises(NoStoreError, match="another user has created a file there"):
        attach.listen(path, "")
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    target, note = tmp_path / "target", tmp_path / "note"
    target.write_text("kept")
    note.symlink_to(target)
    with pytest.raises(OSError):
        _write_note(note, "ctl-0")
    assert target.read_text() == "kept"


def test_a_planted_pipe_is_not_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "note"
    os.mkfifo(note)
    with pytest.raises(OSError):
        _write_note(note, "ctl-0")
    _remove_noted(note)
    _write_note(note, "ctl-0")
    assert note.read_text() == "ctl-0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_planted_note_names_nothing_to_remove(tmp_path: Path) -> None:
    """It would name the endpoints of another daemon in the same directory."""
    note, other = tmp_path / "note", tmp_path / f"ctl-{'0' * 32}"
    other.mkdir()
    note.write_text(other.name)
    os.chown(note, 12345, 12345)
    _remove_noted(note)
    assert other.is_dir() and not note.exists()
    note.write_text(other.name)
    _remove_noted(note)
    assert not other.exists() and not note.exists()
