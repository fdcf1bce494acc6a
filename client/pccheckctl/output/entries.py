"""What a tree holds, as rows: every tensor, and every other value."""

from __future__ import annotations

from typing import NamedTuple

from pccheck_wire import tree


class TensorEntry(NamedTuple):
    """`offset`: of its first byte in the payload, 0 when another rank stores it; `nbytes`: from its
    first to its last byte. A shard has the shape of the whole tensor, and its offsets in that."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    whole: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None


class LeafEntry(NamedTuple):
    path: str
    kind: str
    text: str


def tensor_entries(content: tree.Tree) -> list[TensorEntry]:
    """Every tensor and NumPy array with elements or without, in the order of the state."""
    entries = []
    shard: tree.Shard | None = None
    for path, node in tree.walk(content.root):
        if isinstance(node, tree.Shard):
            shard = node  # its local part is next
            continue
        if isinstance(node, tree.Tensor):
            nbytes = tree.span_bytes(node.shape, node.strides, tree.ITEM_BYTES[node.dtype])
            dtype, strides = node.dtype, tuple(node.strides)
        elif isinstance(node, tree.Array):
            nbytes, dtype, strides = node.nbytes, f"numpy {node.dtype}", ()
        else:
            continue
        start = content.extents[node.extent].offset if node.extent >= 0 else tree.ELSEWHERE
        offset = 0 if start == tree.ELSEWHERE else start + node.offset
        entry = TensorEntry(path, dtype, tuple(node.shape), strides, offset, nbytes)
        if shard is not None and node is shard.local:
            entry = entry._replace(whole=tuple(shard.shape), offsets=tuple(shard.offsets))
        entries.append(entry)
    return entries


def leaf_entries(content: tree.Tree) -> list[LeafEntry]:
    """Every value that is neither a container nor a tensor."""
    leaves = ((path, tree.leaf(node)) for path, node in tree.walk(content.root))
    return [LeafEntry(path, *leaf) for path, leaf in leaves if leaf is not None]
