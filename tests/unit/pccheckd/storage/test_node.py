"""The id of a node: made once, kept in the storage directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pccheck_native import layout
from pccheck_wire.errors import DamagedError
from pccheckd.storage.node import node_of


def test_an_id_is_made_once_and_moves_with_its_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for place in (first, second):
        place.mkdir()
    node = node_of(first)
    assert node_of(first) == node
    assert node_of(second).id != node.id
    moved = first.rename(tmp_path / "moved")
    assert node_of(moved) == node
    assert (moved / layout.NODE_NAME).stat().st_mode & 0o777 == 0o600
    assert [one.name for one in moved.iterdir()] == [layout.NODE_NAME]


def test_a_copy_of_the_directory_is_at_another_place(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    node = node_of(storage)
    copy = node_of(Path(shutil.copytree(storage, tmp_path / "copy")))
    assert copy.id == node.id
    assert copy.place != node.place


def test_what_a_crash_left_is_no_id(tmp_path: Path) -> None:
    (tmp_path / f"{layout.NODE_NAME}.tmp").write_bytes(b"00")
    assert node_of(tmp_path) == node_of(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"00" * 15, b"00" * 16, b"ff" * 16 + b"\xff", b"ff" * 17, b"x" * 32]
)
def test_what_is_no_id_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / layout.NODE_NAME
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=f"{path} does not hold.*rm {path}"):
        node_of(tmp_path)
    assert path.read_bytes() == content


def test_no_link_is_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "id"
    elsewhere.write_text("ab" * 16)
    (tmp_path / layout.NODE_NAME).symlink_to(elsewhere)
    with pytest.raises(DamagedError, match=f"{layout.NODE_NAME}.*no regular file"):
        node_of(tmp_path)
