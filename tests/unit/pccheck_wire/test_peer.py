"""Whose daemon a client connects to."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_wire import connection as peer
from pccheck_wire.errors import RefusedError, UsageError

STRANGER = 12345
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that only root can have made there."""
    with tempfile.TemporaryDirectory(dir="/run", prefix="pcc-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@root_only
def test_a_directory_that_root_gave_to_the_service(place: Path) -> None:
    path = place / "attach.sock"
    assert peer.placed_by_root(path, STRANGER)  # root's own: only root puts sockets there
    os.chown(place, STRANGER, STRANGER)
    assert peer.placed_by_root(path, STRANGER)
    assert not peer.placed_by_root(path, STRANGER + 1)
    for mode in (0o775, 0o757, 0o1777):
        place.chmod(mode)
        assert not peer.placed_by_root(path, STRANGER)


@root_only
def test_a_directory_that_others_could_have_made(place: Path, tmp_path: Path) -> None:
    (place / "mine").mkdir()
    assert peer.placed_by_root(place / "mine" / "attach.sock", STRANGER)
    os.chown(place, STRANGER, STRANGER)
    assert not peer.placed_by_root(place / "mine" / "attach.sock", STRANGER)
    assert not peer.placed_by_root(place / "missing" / "attach.sock", STRANGER)
    # Everybody may make names in the directory of temporary files.
    assert not peer.placed_by_root(tmp_path / "attach.sock", STRANGER)


@root_only
def test_a_link_is_as_good_as_its_owner(place: Path, tmp_path: Path) -> None:
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    assert peer.placed_by_root(place / "link" / "attach.sock", STRANGER)
    os.chown(place / "link", STRANGER + 1, -1, follow_symlinks=False)
    assert not peer.placed_by_root(place / "link" / "attach.sock", STRANGER)
    (tmp_path / "link").symlink_to(place / "real")
    assert not peer.placed_by_root(tmp_path / "link" / "attach.sock", STRANGER)
    assert not peer.placed_by_root(tmp_path / "link" / ".." / "real" / "attach.sock", STRANGER)


def test_the_variable_names_a_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer.named_uid() is None
    monkeypatch.setenv(peer.VARIABLE, "12345")
    assert peer.named_uid() == STRANGER
    for wrong in ("root", "-1", "1.5", "\u0661"):
        monkeypatch.setenv(peer.VARIABLE, wrong)
        with pytest.raises(UsageError, match="not a uid"):
            peer.named_uid()


def test_ones_own_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer.require_trusted(ours, "/tmp/attach.sock")
        if os.getuid() != 0:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
            with pytest.raises(RefusedError, match=f"runs as uid {os.getuid()}"):
                peer.require_trusted(ours, "/tmp/attach.sock")


def test_a_large_uid_is_not_negative() -> None:
    raw = struct.pack("iII", 5, 3_000_000_000, 7)
    connection: Any = SimpleNamespace(getsockopt=lambda *_: raw)
    assert peer.credentials(connection) == (5, 3_000_000_000, 7)
