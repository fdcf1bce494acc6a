"""Merges the trees of ranks that each stored a part of a replicated state.

In the merged tree an extent that another rank stores has that rank in the upper bits of its offset;
`split` divides packed ranges by the rank whose payload they are read from.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from . import tree
from .errors import DamagedError, StateMismatchError

RANK_SHIFT = 52  # 2**52 bytes are more than any payload (PAYLOAD_BYTES_MAX)
RANKS_MAX = 2 ** (64 - RANK_SHIFT) - 2
_OFFSET = (1 << RANK_SHIFT) - 1
GAP_MAX = 8 << 20  # what lies between two ranges is read with them up to this length


def merge(own: tree.Tree, rank: int, read_tree: Callable[[int], tree.Tree]) -> tree.Tree:
    """The tree of `rank`, with place and strides of what other ranks store. `read_tree` gives the
    tree of a rank.

    Raises StateMismatchError when the ranks did not save the same shared tensors.
    """
    shared = own.shared()
    if not shared:
        return own
    extents = list(own.extents)
    trees = {rank: (own, shared)}
    views = {rank: _views(own)}
    for number, index in enumerate(shared):
        extent = extents[index]
        if extent.owner == rank:
            continue
        if extent.owner not in trees:
            if extent.owner >= RANKS_MAX:
                raise DamagedError(f"an extent is stored by rank {extent.owner}")
            other = read_tree(extent.owner)
            trees[extent.owner], views[extent.owner] = (other, other.shared()), _views(other)
        there, order = trees[extent.owner]
        found = there.extents[order[number]] if len(order) == len(shared) else None
        if (
            found is None or found.nbytes != extent.nbytes or found.owner != extent.owner
            or not _lay_out(views[rank][index], views[extent.owner][order[number]])
        ):  # fmt: skip
            raise StateMismatchError(
                f"ranks {rank} and {extent.owner} saved different tensors with replicated=True",
                hint="use replicated=True only for state that is equal on all ranks (plain DDP)",
            )
        if found.offset == tree.ELSEWHERE:
            raise DamagedError(f"rank {extent.owner} does not store the extent that it should")
        extents[index] = extent._replace(offset=place(extent.owner, found.offset))
    return tree.Tree(own.step, own.metadata, own.attached, extents, own.root, own.about)


def _views(described: tree.Tree) -> dict[int, list[tree.Tensor]]:
    found: dict[int, list[tree.Tensor]] = defaultdict(list)
    for _, node in tree.walk(described.root):
        if isinstance(node, tree.Tensor):
            found[node.extent].append(node)
    return found


def _lay_out(mine: list[tree.Tensor], stored: list[tree.Tensor]) -> bool:
    """Gives tensors the strides of the rank that stores them; False if they are not the same."""
    if [(one.shape, one.dtype) for one in mine] != [(one.shape, one.dtype) for one in stored]:
        return False
    for one, other in zip(mine, stored, strict=True):
        one.strides, one.offset = other.strides, other.offset
    return True


def place(rank: int, offset: int) -> int:
    """The offset in a merged tree of a place in the payload of a rank, -1 for the one whose tree it
    was."""
    return rank + 1 << RANK_SHIFT | offset


def placed(offset: int) -> tuple[int, int]:
    """The rank whose payload an offset of a merged tree refers to (-1: the rank whose tree was
    merged into), and the offset in that payload."""
    return (offset >> RANK_SHIFT) - 1, offset & _OFFSET


def split(ranges: bytes, device_ranges: bytes = b"") -> dict[int, tuple[bytes, bytes]]:
    """Packed ranges by rank, as `place` gives it, ascending by their offset in its payload."""
    found: dict[int, tuple[list[bytes], list[bytes]]] = {}
    for side, (form, given) in enumerate((("<QQQ", ranges), ("<QQQII", device_ranges))):
        items = sorted(struct.iter_unpack(form, given), key=lambda item: item[1])
        for address, offset, *rest in items:
            rank, offset = placed(offset)
            packed = struct.pack(form, address, offset, *rest)
            found.setdefault(rank, ([], []))[side].append(packed)
    return {rank: (b"".join(host), b"".join(gpus)) for rank, (host, gpus) in found.items()}


def spans(host: bytes, gpus: bytes = b"") -> Iterator[tuple[int, int, bytes, bytes]]:
    """The ranges in pieces without long gaps: where each begins, its length, and its ranges, which
    do not overlap. What two tensors need (a tied weight that is tied no longer) is read twice."""
    items = {(struct.unpack_from("<QQ", h, 8), 0, h) for h in _cut(host, 24)}
    items |= {(struct.unpack_from("<QQ", g, 8), 1, g) for g in _cut(gpus, 32)}
    left = sorted(items)
    while left:
        again: list[tuple[Any, int, bytes]] = []
        taken: tuple[list[bytes], list[bytes]] = ([], [])
        first = end = left[0][0][0]
        for item in left:
            (offset, nbytes), side, packed = item
            if offset < end:
                again.append(item)
                continue
            if offset > end + GAP_MAX:
                yield first, end - first, b"".join(taken[0]), b"".join(taken[1])
                taken, first = ([], []), offset
            taken[side].append(packed)
            end = offset + nbytes
        yield first, end - first, b"".join(taken[0]), b"".join(taken[1])
        left = again


def _cut(packed: bytes, size: int) -> Iterator[bytes]:
    return (packed[at : at + size] for at in range(0, len(packed), size))
