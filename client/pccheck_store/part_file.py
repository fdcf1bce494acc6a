"""A part of an open checkpoint as a safetensors file that exists nowhere: its header is made from
the tree, and its tensors are read from the volume when they are asked for."""

from __future__ import annotations

import bisect
import ctypes
import struct

from pccheck_native import catalog
from pccheck_wire import tree
from pccheck_wire.errors import UsageError

from . import selection
from .reading.state_reader import StateReader
from .safetensors_layout import Piece, header_of, metadata_of, pieces_of, read_strided

WHOLE = "state"  #: the name of all, when tensors lie beside the parts


def parts_of(content: tree.Tree) -> list[str]:
    """The parts that have tensors. With tensors outside of these the only part is WHOLE."""
    items = content.root.items if isinstance(content.root, tree.Mapping) else []
    counts = {
        key: _tensors(node)
        for key, node in items
        if isinstance(key, str)
        and "/" not in key
        and isinstance(node, tree.Mapping | tree.Sequence)
    }
    if sum(counts.values()) != _tensors(content.root):
        return [WHOLE]
    return [key for key, count in counts.items() if count]


def _tensors(node: tree.Node) -> int:
    return sum(isinstance(one, (tree.Tensor, tree.Array)) for _, one in tree.walk(node))


class PartFile:
    """The file. Every byte is checked; raises as `source.Payloads` does."""

    def __init__(
        self, one: catalog.StoredCheckpoint, reader: StateReader, content: tree.Tree, name: str
    ) -> None:
        """`reader` is one of the checkpoint, `content` what it returned, `name` a part as `show`
        names it, or WHOLE. Raises FileNotFoundError when there is no such part."""
        part, only = content, ""
        if name != WHOLE or WHOLE not in parts_of(content):
            try:
                part, only = selection.only(content, name, one.id.job), name
            except UsageError as error:
                raise FileNotFoundError(error.message) from error
        pieces, _ = pieces_of(part)
        metadata, _ = metadata_of(one, part, only)
        self._reader = reader
        self._header = header_of(metadata, pieces)
        found = (piece for piece in pieces if piece.nbytes)
        self._pieces = sorted(found, key=lambda piece: piece.target)
        self._starts = [len(self._header) + piece.target for piece in self._pieces]
        #: The last tensor that was read as a whole.
        self._kept: tuple[Piece, bytearray] | None = None
        self.size = len(self._header) + sum(piece.nbytes for piece in self._pieces)
        self.durable_at = one.wall_ns / 1e9  #: seconds since 1970

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, or to the end of the file."""
        start, end = max(start, 0), min(end, self.size)
        if start >= end:
            return b""
        head = self._header[start:end]
        made = bytearray(head).ljust(end - start, b"\0")
        anchor = ctypes.c_char.from_buffer(made)
        address = ctypes.addressof(anchor)
        ranges: list[bytes] = []
        for index in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._starts)):
            piece, begin = self._pieces[index], self._starts[index]
            first, last = max(start, begin), min(end, begin + piece.nbytes)
            if begin >= end:
                break
            if first < last and piece.divisible:
                at = address + first - start, piece.source + first - begin, last - first
                ranges.append(struct.pack("<QQQ", *at))
            elif first < last:
                made[first - start : last - start] = self._whole(piece)[
                    first - begin : last - begin
                ]
        if ranges:
            self._reader.read_into(b"".join(ranges))
        return bytes(made)

    def _whole(self, piece: Piece) -> bytearray:
        """A tensor that is no single run of bytes in a payload."""
        if self._kept is None or self._kept[0] is not piece:
            data = bytearray(piece.nbytes)
            read_strided(self._reader, piece, memoryview(data))
            self._kept = piece, data
        return self._kept[1]

    def close(self) -> None:
        self._reader.close()
