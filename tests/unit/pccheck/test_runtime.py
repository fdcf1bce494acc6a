"""The socket's directory and what lies beside the socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pccheck_wire.errors import NoStoreError
from pccheckd.control import attach
from pccheckd.front.endpoints import _prefix, _remove_left


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


def test_endpoints_of_a_killed_daemon_are_removed(tmp_path: Path) -> None:
    ours, other, target = (tmp_path / name for name in ("a.sock", "b.sock", "target"))
    left, its = (tmp_path / f"{_prefix(one)}{'0' * 24}" for one in (ours, other))
    for place in (left, its, target):
        place.mkdir()
        (place / "1000.sock").touch()
    planted = tmp_path / f"{_prefix(ours)}{'1' * 24}"
    planted.symlink_to(target)
    _remove_left(ours)
    assert not left.exists() and (its / "1000.sock").exists() and (target / "1000.sock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_has_created_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    planted = tmp_path / f"{_prefix(path)}{'0' * 24}"
    planted.mkdir()
    os.chown(planted, 12345, 12345)
    _remove_left(path)
    assert planted.is_dir()
