"""Sharded tensors in another cut: which bytes of which ranks' payloads fill a block.

A checkpoint holds every sharded tensor as blocks, one per rank. A rank of another world, mesh or
placement needs parts of several of them. Only those parts are read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pccheck_wire import parts, tree
from pccheck_wire.errors import StateMismatchError
from pccheck_wire.tree import ITEM_BYTES

#: A range as the native link takes it: address, offset in the payload, bytes.
_RANGE = np.dtype([("address", "<u8"), ("offset", "<u8"), ("nbytes", "<u8")])


class Block(NamedTuple):
    """Part of a tensor: `node.shape` elements from `offsets` on."""

    node: tree.Tensor
    offsets: Sequence[int]
    start: int  # of the first byte, in the merged payloads of all ranks


def block_of(node: object) -> tuple[tree.Tensor, list[int]] | None:
    """The memory of a tensor's node, and its offsets in the whole tensor; None for other nodes."""
    if isinstance(node, tree.Shard):
        return node.local, node.offsets
    return (node, [0] * len(node.shape)) if isinstance(node, tree.Tensor) else None


class Blocks:
    """The blocks that all ranks have saved, by the path in the state."""

    def __init__(self, trees: Mapping[int, tree.Tree]) -> None:
        self._found: dict[str, dict[tuple[int, ...], Block]] = defaultdict(dict)
        for rank, described in trees.items():
            within: tree.Tensor | None = None  # of the shard before, which the walk shows, too
            for path, node in tree.walk(described.root):
                block = block_of(node)
                if block is None or node is within or block[0].extent < 0:
                    continue
                part, offsets = block
                within = part
                start = described.extents[part.extent].offset + part.offset
                if start < tree.ELSEWHERE:
                    key = (*offsets, *part.shape)  # of replicas the first one is taken
                    self._found[path].setdefault(
                        key, Block(part, offsets, parts.place(rank, start))
                    )

    def ranges(self, path: str, live: torch.Tensor, offsets: Sequence[int]) -> bytes:
        """Packed ranges that fill the host memory of `live`, the block at `offsets`.

        Raises StateMismatchError if the ranks have not saved all of it.
        """
        found: list[bytes] = []
        elements = 0
        for block in self._found[path].values():
            first = [max(a, b) for a, b in zip(offsets, block.offsets, strict=True)]
            ends = zip(offsets, live.shape, block.offsets, block.node.shape, strict=True)
            sizes = [min(a + n, b + m) - at for at, (a, n, b, m) in zip(first, ends, strict=True)]
            if min(sizes, default=1) <= 0:
                continue
            elements += math.prod(sizes)
            item_bytes = live.element_size()
            to = [stride * item_bytes for stride in live.stride()]
            source = [stride * item_bytes for stride in block.node.strides]
            found.append(
                _runs(
                    live.data_ptr() + _reach(first, offsets, to),
                    block.start + _reach(first, block.offsets, source),
                    [(n, t, s) for n, t, s in zip(sizes, to, source, strict=True) if n > 1],
                    ITEM_BYTES[block.node.dtype],
                )
            )
        if elements != live.numel():
            raise StateMismatchError(
                f"{path}: the ranks saved {elements} of the {live.numel()} elements that this rank "
                "needs",
                hint="attach the model as it was; see: pccheckctl show",
            )
        return b"".join(found)


def _reach(at: Sequence[int], origin: Sequence[int], strides: Sequence[int]) -> int:
    return sum((a - o) * stride for a, o, stride in zip(at, origin, strides, strict=True))


def _runs(address: int, offset: int, dims: list[tuple[int, int, int]], nbytes: int) -> bytes:
    """Ranges for a box of elements of `nbytes`: per dimension its size, and the strides of both
    sides in bytes. Dimensions that are contiguous on both sides become one run."""
    dims.sort(key=lambda dim: (-dim[2], -dim[1]))
    while dims and dims[-1][1] == dims[-1][2] == nbytes:
        nbytes *= dims.pop()[0]
    addresses: npt.NDArray[Any] = np.array([address], dtype="<u8")
    offsets: npt.NDArray[Any] = np.array([offset], dtype="<u8")
    for size, to, source in dims:
        steps = np.arange(size, dtype="<u8")
        addresses = (addresses[:, None] + steps * np.uint64(to)).ravel()
        offsets = (offsets[:, None] + steps * np.uint64(source)).ravel()
    ranges = np.empty(len(addresses), _RANGE)
    ranges["address"], ranges["offset"], ranges["nbytes"] = addresses, offsets, nbytes
    return ranges.tobytes()
