"""A part of what is kept, for a check that need not read everything: "5%" or "2/20".

    P%    each piece is read with a chance of P in a hundred, drawn from the seed: runs with
          different seeds read different pieces, the same seed reads the same ones again
    N/T   part N of T, 1 <= N <= T: every T-th piece; T runs with N = 1 .. T read everything once

A piece is a 256th of a checkpoint's payload, in whole MiB, at most 64 of them. Which pieces are
read depends on nothing but sequence, size and seed, so the daemon and the command line agree. The
tree, which says what the bytes are, is always read.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from pccheck_native._core import Volume
from pccheck_native.catalog import StoredCheckpoint

MIB = 1 << 20
PIECE_BYTES_MAX = 64 * MIB
PIECES = 256
PARTS_MAX = 1_000_000
SEED_MAX = 2**63 - 1
_WHOLE = 1 << 64


class Subset(NamedTuple):
    """Which pieces to read. `parts` 0: by chance."""

    percent: float = 100.0
    part: int = 0
    parts: int = 0
    seed: int = 0

    @property
    def text(self) -> str:
        """What `parse` makes it of again."""
        if self.parts:
            return f"{self.part}/{self.parts}"
        return f"{self.percent:.6f}".rstrip("0").rstrip(".") + "%"

    def takes(self, sequence: int, piece: int) -> bool:
        """Whether this piece of a checkpoint is in it."""
        if self.parts:
            # Checkpoints begin at different places, or small ones would all fall into part 1.
            return (sequence + piece) % self.parts == self.part - 1
        drawn = blake2b(struct.pack("<QQQ", self.seed, sequence, piece), digest_size=8).digest()
        return int.from_bytes(drawn, "little") < self.percent / 100 * _WHOLE

    def ranges(self, sequence: int, payload_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of every piece to read, ascending."""
        step = piece_bytes(payload_bytes)
        for piece, offset in enumerate(range(0, payload_bytes, step)):
            if self.takes(sequence, piece):
                yield offset, min(step, payload_bytes - offset)


def piece_bytes(payload_bytes: int) -> int:
    """Small enough for a fair share of a small checkpoint, large enough to be read fast."""
    return max(MIB, min(-(-payload_bytes // PIECES // MIB) * MIB, PIECE_BYTES_MAX))


class Pieces:
    """Reads and verifies pieces of checkpoints, into one buffer of its own. Not thread-safe."""

    def __init__(self, bytes_max: int, *, threads: int = 2) -> None:
        """`threads`: as of `Volume.read_into`; 0 reads in the calling thread."""
        self._bytes_max = bytes_max
        self._threads = threads
        self._buffer: ctypes.Array[ctypes.c_char] | None = None

    def check(self, volume: Volume, sequence: int, offset: int, length: int) -> None:
        """One piece of at most `bytes_max`. Raises as `Volume.read_into` does."""
        if self._buffer is None:
            self._buffer = ctypes.create_string_buffer(self._bytes_max)
        target = struct.pack("<QQQ", ctypes.addressof(self._buffer), offset, length)
        volume.read_into(sequence, target, threads=self._threads)


def verify_part(volume: Volume, found: StoredCheckpoint, subset: Subset) -> int:
    """Reads and checks the pieces, and always the tree and the manifest; how many bytes of the
    payload that were, each counted once. Raises as `Volume.read_into` does."""
    count, tree_end = found.tree_bytes, found.tree_offset + found.tree_bytes
    volume.read(found.id.sequence, found.tree_offset, found.tree_bytes)
    pieces = Pieces(piece_bytes(found.payload_bytes))
    for offset, length in subset.ranges(found.id.sequence, found.payload_bytes):
        pieces.check(volume, found.id.sequence, offset, length)
        again = min(offset + length, tree_end) - max(offset, found.tree_offset)
        count += length - max(again, 0)
    return count


def parse(text: str, seed: int = 0) -> Subset:
    """Raises ValueError with the valid forms."""
    share = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", text)
    if share and 0 < float(share[1]) <= 100:
        return Subset(percent=float(share[1]), seed=seed)
    part = re.fullmatch(r"(\d{1,7})/(\d{1,7})", text)
    if part and 1 <= int(part[1]) <= int(part[2]) <= PARTS_MAX:
        return Subset(part=int(part[1]), parts=int(part[2]))
    raise ValueError(f"{text[:40]!r} is neither a share like 5% nor a part like 2/20")
