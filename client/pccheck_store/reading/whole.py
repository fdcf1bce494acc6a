"""Sharded tensors as whole ones, where a reader has no use for blocks: exports, files of fsspec."""

from __future__ import annotations

import dataclasses
import math
import struct

from pccheck_store.selection import contiguous_strides
from pccheck_wire import parts, tree
from pccheck_wire.blocks import Block, Blocks
from pccheck_wire.errors import StateMismatchError


class WholeTensors:
    """Gives every sharded tensor of a tree an extent of its own. No payload has this extent: reads
    of it become reads of the ranks' blocks."""

    def __init__(self, own: tree.Tree, others: dict[int, tree.Tree]) -> None:
        self._own = own
        self._blocks = Blocks({-1: own, **others})
        self._extents = list(own.extents)
        self._made: dict[int, tuple[str, Block]] = {}  # by their offset
        self._tied: dict[object, int] = {}
        self._end = 0

    def content(self) -> tree.Tree:
        root = self._node(self._own.root, "")
        kept = tree.extents_of(root)
        for index, extent in enumerate(self._extents):
            if index not in kept:
                self._extents[index] = extent._replace(nbytes=0)
        return dataclasses.replace(self._own, root=root, extents=self._extents)

    def is_complete(self) -> bool:
        """Whether the blocks that could be read cover every sharded tensor."""
        try:
            for path, wanted in self._made.values():
                self._blocks.ranges(path, wanted)
        except StateMismatchError:
            return False
        return True

    def divided(self, ranges: bytes) -> list[bytes]:
        """The ranges that are in a payload, then for each whole tensor those of its blocks."""
        plain: list[bytes] = []
        whole: list[bytes] = []
        for address, offset, nbytes in struct.iter_unpack("<QQQ", ranges):
            if offset in self._made:
                path, wanted = self._made[offset]
                whole.append(self._blocks.ranges(path, wanted._replace(start=address)))
            else:
                plain.append(struct.pack("<QQQ", address, offset, nbytes))
        return [b"".join(plain), *whole]

    def _node(self, node: tree.Node, path: str) -> tree.Node:
        if isinstance(node, tree.Shard):
            return self._tensor(node, path)
        if isinstance(node, tree.Sequence):
            items = enumerate(node.items)
            return tree.Sequence(
                node.tag, [self._node(item, tree.join(path, index)) for index, item in items]
            )
        if isinstance(node, tree.Mapping):
            pairs = [
                (key, self._node(value, tree.join(path, tree.plain(key))))
                for key, value in node.items
            ]
            return dataclasses.replace(node, items=pairs)
        return node

    def _tensor(self, node: tree.Shard, path: str) -> tree.Tensor:
        local = node.local
        strides = list(contiguous_strides(node.shape))
        made = tree.Tensor(node.shape, strides, local.dtype, local.flags)
        nbytes = math.prod(node.shape) * tree.ITEM_BYTES[local.dtype]
        if not nbytes:
            return made
        place = local.extent, local.offset, *local.strides, *node.shape
        tied = self._tied.get(place) if local.extent >= 0 else None
        if tied is None:
            tied = len(self._extents)
            self._tied[place] = tied
            offset = parts.place(parts.RANKS_MAX, self._end)
            self._end += nbytes
            wanted = Block(0, node.shape, node.shape, [0] * len(strides), strides, local.dtype)
            self._made[offset] = path, wanted
            self._extents.append(tree.Extent(offset, nbytes))
        made.extent = tied
        return made
