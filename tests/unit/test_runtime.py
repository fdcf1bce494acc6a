"""The socket's directory and what lies beside the socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pccheckd import attach
from pccheckd.server import _write_note


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_a_directory_of_everybody_keeps_its_group(tmp_path: Path) -> None:
    shared, ours = tmp_path / "shared", tmp_path / "ours"
    shared.mkdir()
    shared.chmod(0o1777)
    for directory, group in ((shared, 0), (ours, 1)):
        attach.make_runtime(directory, "daemon")
        assert directory.stat().st_gid == group
    assert ours.stat().st_mode & 0o7777 == 0o750


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    target, note = tmp_path / "target", tmp_path / "note"
    target.write_text("kept")
    note.symlink_to(target)
    with pytest.raises(OSError):
        _write_note(note, "ctl-0")
    assert target.read_text() == "kept"
