"""A place that holds checkpoints, and how one of them is read.

Two places so far: a storage directory (`directory.py`) and a daemon (`remote.py`). A bucket is a
place, too: nothing here is about files of this machine or about a session's memory.
restore() asks its daemon which checkpoint it gets, since all ranks of a job get the same one there;
it reads that checkpoint like everyone else, through `Payloads` and `state_reader.py`. It
reads parts that lie on other nodes from there (`peers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pccheck_native import catalog
from pccheck_native.subset import Subset
from pccheck_wire.tree import Tree


class Source(Protocol):
    """Where checkpoints are. Every call looks again: a job may save meanwhile."""

    path: Path  #: its name in messages
    served: bool  #: a daemon writes there meanwhile

    def held(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None, sizes: bool = False
    ) -> catalog.Catalog:
        """What is there and matches, and what cannot be read; with `sizes` also how much each
        checkpoint has of its own. Reads no payload."""

    def open(self, parts: Sequence[catalog.StoredCheckpoint]) -> Payloads:
        """Opens one checkpoint: the part of one rank, then those of other ranks, as `held` has
        them. A source that can keeps all of them until the payloads are closed. Raises
        RecycledError when the first part is not there any more."""

    def verify(self, checkpoint: catalog.StoredCheckpoint, part: Subset | None) -> tuple[int, bool]:
        """Reads and checks what one rank has stored, or a part of it. Returns how many bytes that
        were, and whether the flag that it is damaged was removed. Raises as `Payloads` does."""


class Payloads(Protocol):
    """What the ranks have stored of one open checkpoint. Only bytes that match their checksums get
    out. Raises DamagedError, UnreadableError; RecycledError when the source has it no more."""

    reaches_gpus: bool  #: takes device ranges

    def packed_tree(self, rank: int) -> bytes | bytearray:
        """The tree as it is in the payload: of an image it is an index."""

    def tree(self, rank: int) -> Tree:
        """What the bytes of a rank are; damage elsewhere in its payload does not hide the tree."""

    def read_into(
        self, rank: int, offset: int, length: int, ranges: bytes, device_ranges: bytes = b""
    ) -> None:
        """Reads payload [offset, offset + length) of a rank, in bytes, and fills packed ranges of
        memory (address, offset, length), which ascend and do not overlap; and of GPUs (also device,
        0) where `reaches_gpus`."""

    def close(self) -> None:
        """Lets the source replace the checkpoint. May be called again."""
