"""Sharded tensors in another cut: which bytes of which ranks' payloads fill a block.

A checkpoint holds every sharded tensor as blocks, one per rank. A rank of another world, mesh or
placement needs parts of several of them, and a whole tensor needs all. Only those parts are read.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import parts, tree
from .errors import StateMismatchError
from .tree import ITEM_BYTES

#: A range as reads take it: address, offset in the payload, bytes.
_RANGE = struct.Struct("<QQQ")

#: Size of a dimension, and its strides in bytes at the address and in the payload.
_Dimension = tuple[int, int, int]


class Block(NamedTuple):
    """Part of a tensor of shape `whole`: `shape` elements from `offsets` on. `start` is the place
    of the first one: an address, or an offset in the merged payloads of all ranks."""

    start: int
    whole: Sequence[int]
    shape: Sequence[int]
    offsets: Sequence[int]
    strides: Sequence[int]  # in elements
    dtype: str


def block_of(node: object) -> tuple[tree.Tensor, list[int]] | None:
    """The memory of a tensor's node, and its offsets in the whole tensor; None for other nodes."""
    if isinstance(node, tree.Shard):
        return node.local, node.offsets
    return (node, [0] * len(node.shape)) if isinstance(node, tree.Tensor) else None


class Blocks:
    """The blocks that ranks have saved, by the path in the state. The tree of rank -1 is a merged
    one."""

    def __init__(self, trees: Mapping[int, tree.Tree]) -> None:
        self._found: dict[str, dict[tuple[int, ...], Block]] = defaultdict(dict)
        for rank, described in trees.items():
            within: tree.Tensor | None = None  # of the shard before, which the walk shows, too
            for path, node in tree.walk(described.root):
                found = block_of(node)
                if found is None or node is within:
                    continue
                local, offsets = found
                within = local
                if local.extent < 0:
                    continue
                start = described.extents[local.extent].offset + local.offset
                if start < tree.ELSEWHERE:
                    whole = node.shape if isinstance(node, tree.Shard) else local.shape
                    block = Block(
                        parts.place(rank, start), whole, local.shape, offsets, local.strides,
                        local.dtype,
                    )  # fmt: skip
                    # Of replicas the first one is taken.
                    self._found[path].setdefault((*offsets, *local.shape), block)

    def place(self, path: str) -> tuple[int, ...]:
        """Equal for paths that shared memory on all ranks."""
        return tuple(sorted(block.start for block in self._found[path].values()))

    def ranges(self, path: str, wanted: Block) -> bytes:
        """Packed ranges (address, offset, length) that fill the memory of a block.

        Raises StateMismatchError if the ranks have not saved all of it.
        """
        found: list[bytes] = []
        elements = 0
        for block in self._found[path].values():
            if list(block.whole) != list(wanted.whole) or block.dtype != wanted.dtype:
                continue  # another tensor
            count, ranges = common(block, wanted)
            elements += count
            found.append(ranges)
        if elements != math.prod(wanted.shape):
            raise StateMismatchError(
                f"{path}: the ranks saved {elements} of the {math.prod(wanted.shape)} elements "
                "that are needed here",
                hint="attach the model as it was; see: pccheckctl show",
            )
        return b"".join(found)


def common(block: Block, wanted: Block) -> tuple[int, bytes]:
    """How many elements two blocks of one tensor have in common, and the packed ranges that fill
    these in the memory of `wanted` from the payload of `block`."""
    first = list(map(max, wanted.offsets, block.offsets))
    sizes = [
        min(end, block_end) - at
        for at, end, block_end in zip(first, _ends(wanted), _ends(block), strict=True)
    ]
    if min(sizes, default=1) <= 0:
        return 0, b""
    return math.prod(sizes), _runs(first, sizes, wanted, block)


def _ends(block: Block) -> list[int]:
    return [offset + size for offset, size in zip(block.offsets, block.shape, strict=True)]


def _runs(first: list[int], sizes: list[int], wanted: Block, block: Block) -> bytes:
    """Ranges for the box of `sizes` elements from `first` on, which both blocks have. Dimensions
    that are contiguous on both sides become one run."""
    nbytes = ITEM_BYTES[block.dtype]
    to, source = ([stride * nbytes for stride in one.strides] for one in (wanted, block))
    places = [(_place(wanted, first, to), _place(block, first, source))]
    dims: list[_Dimension] = [dim for dim in zip(sizes, to, source, strict=True) if dim[0] > 1]
    dims.sort(key=lambda dim: (-dim[2], -dim[1]))
    while dims and dims[-1][1] == dims[-1][2] == nbytes:
        nbytes *= dims.pop()[0]
    for size, stride, other in dims:
        places = [(a + i * stride, b + i * other) for a, b in places for i in range(size)]
    return b"".join(_RANGE.pack(address, offset, nbytes) for address, offset in places)


def _place(block: Block, at: list[int], strides: list[int]) -> int:
    steps = zip(at, block.offsets, strides, strict=True)
    return block.start + sum((a - offset) * stride for a, offset, stride in steps)
