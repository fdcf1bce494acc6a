"""The manifest of a checkpoint that lies on another node, and the blocks that follow it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from pccheck_native import NativeError, _core
from tests.support.coreloop import BLOCK_BYTES, Loop, address, pack

TREE = b"the tree"
DATA = bytearray(os.urandom(5 * BLOCK_BYTES + 100))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[bytes, bytes, bytes]:
    """The manifest of a checkpoint, its digest, and its payload."""
    with Loop(tmp_path / "v") as loop:
        sequence = loop.save(1, [DATA], TREE)
        entry = next(one for one in loop.volume.table() if one.sequence == sequence)
        payload = loop.volume.read(sequence, 0, entry.payload_bytes)
        return loop.volume.manifest(sequence), entry.digest, payload


def damaged(manifest: bytes, digest: bytes) -> bool:
    try:
        _core.manifest_facts(manifest, digest)
    except NativeError as error:
        assert error.code_name == "DAMAGED"
        return True
    return False


def test_a_manifest_says_where_the_tree_is(stored: tuple[bytes, bytes, bytes]) -> None:
    manifest, digest, payload = stored
    payload_bytes, tree_offset, tree_bytes, block_bytes = _core.manifest_facts(manifest, digest)
    assert (payload_bytes, block_bytes) == (len(payload), BLOCK_BYTES)
    assert payload[tree_offset : tree_offset + tree_bytes] == TREE


def test_any_other_byte_or_length_or_digest_is_damage(stored: tuple[bytes, bytes, bytes]) -> None:
    manifest, digest, _ = stored
    for at in range(len(manifest)):
        changed = bytearray(manifest)
        changed[at] ^= 1 << at % 8
        assert damaged(bytes(changed), digest), at
    assert all(damaged(manifest[:size], digest) for size in range(len(manifest)))
    assert damaged(manifest + bytes(8), digest)
    assert damaged(manifest, bytes(16))


def test_blocks_fill_the_ranges_that_want_them(stored: tuple[bytes, bytes, bytes]) -> None:
    manifest, _, payload = stored
    chance = random.Random(5)
    for _ in range(200):
        marks = sorted(chance.sample(range(len(payload) + 1), 6))
        wanted = [(marks[i], marks[i + 1]) for i in (0, 2, 4)]
        memory = [bytearray(end - start) for start, end in wanted]
        ranges = pack(
            [(address(m), start, len(m)) for m, (start, _) in zip(memory, wanted, strict=True)]
        )
        at = 0
        while at < len(payload):
            blocks = payload[at : at + BLOCK_BYTES * chance.randint(1, 3)]
            _core.manifest_place(manifest, blocks, at, ranges)
            at += len(blocks)
        assert memory == [payload[start:end] for start, end in wanted]


def test_blocks_that_do_not_match_reach_no_memory(stored: tuple[bytes, bytes, bytes]) -> None:
    manifest, _, payload = stored
    memory = bytearray(len(payload))
    ranges = pack([(address(memory), 0, len(memory))])
    for at in range(0, BLOCK_BYTES, 97):
        changed = bytearray(payload[:BLOCK_BYTES])
        changed[at] ^= 1
        with pytest.raises(NativeError):
            _core.manifest_place(manifest, changed, 0, ranges)
    with pytest.raises(NativeError):  # those of another place
        _core.manifest_place(manifest, payload[:BLOCK_BYTES], BLOCK_BYTES, ranges)
    assert memory == bytes(len(payload))


@pytest.mark.parametrize(
    ("offset", "length"),
    [(1, BLOCK_BYTES), (0, BLOCK_BYTES - 1), (2**63, BLOCK_BYTES), (5 * BLOCK_BYTES, 2**14)],
)
def test_only_whole_blocks_of_the_payload_are_taken(
    stored: tuple[bytes, bytes, bytes], offset: int, length: int
) -> None:
    with pytest.raises(OSError, match="Invalid"):
        _core.manifest_place(stored[0], bytes(length), offset, b"")


def test_what_is_no_manifest_is_refused() -> None:
    assert damaged(b"", bytes(16)) and damaged(bytes(4096), bytes(16))
    with pytest.raises(OSError, match="Invalid"):
        _core.manifest_place(b"short", b"", 0, b"")
    with pytest.raises(OSError, match="Invalid"):
        _core.manifest_place(bytes(4096), b"", 0, b"")


def test_a_volume_is_read_through_a_descriptor(tmp_path: Path) -> None:
    with Loop(tmp_path / "v") as loop:
        sequence = loop.save(1, [DATA], TREE)
    fd = os.open(tmp_path / "v", os.O_RDONLY)
    (tmp_path / "v").rename(tmp_path / "elsewhere")
    volume = _core.Volume(tmp_path / "v", writable=False, allow_buffered=True, fd=fd)
    assert volume.read(sequence, 0, len(DATA)) == DATA
    volume.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
