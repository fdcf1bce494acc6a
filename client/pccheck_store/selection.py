"""A part of a state by its name, as `show` prints it: `model`, `optimizer.state`, or what is below
a submodule (`model.layers.0`), whose names are keys with dots in one flat dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Numbers

from pccheck_wire import tree
from pccheck_wire.basics import some
from pccheck_wire.errors import UsageError
from pccheck_wire.tree import Mapping, Node, Sequence, Tag

#: NumPy's dtypes that torch has, little-endian or of one byte.
NUMPY_TO_TORCH = {
    "|b1": "bool", "|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16",
    "<u4": "uint32", "<i4": "int32", "<u8": "uint64", "<i8": "int64",
    "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64",
    "<c16": "complex128",
}  # fmt: skip


def as_tensor(node: tree.Array) -> tree.Tensor | None:
    """An array as a tensor on the same bytes; None when torch lacks its dtype."""
    if node.dtype not in NUMPY_TO_TORCH:
        return None
    strides = list(contiguous_strides(node.shape, order=node.order))
    dtype = NUMPY_TO_TORCH[node.dtype]
    return tree.Tensor(node.shape, strides, dtype, 0, node.extent, node.offset)


def only(content: tree.Tree, name: str, job: str) -> tree.Tree:
    """The tree with that part as its root, under the names that the part itself has: what `model`
    was saved from can load it. A tensor or a value keeps its last name. Raises UsageError."""
    found = _below(content.root, name)
    if found is None:
        top = [key for key, _ in _children(content.root)]
        raise UsageError(
            f"there is no {name!r} in this checkpoint" + (f"; it has {some(top)}" if top else ""),
            hint=f"see: pccheckctl show {job}",
        )
    return dataclasses.replace(content, root=found)


def spared_bytes(content: tree.Tree) -> int:
    """Bytes of the payload that need not be read."""
    wanted = tree.extents_of(content.root)
    return sum(one.nbytes for index, one in enumerate(content.extents) if index not in wanted)


def contiguous_strides(shape: Numbers[int], *, order: str = "C") -> tuple[int, ...]:
    """The strides of an array without holes, in elements: the last ("C") or the first ("F")
    dimension varies fastest."""
    strides, step = [], 1
    for dim in reversed(shape) if order == "C" else shape:
        strides.append(step)
        step *= max(1, dim)
    return tuple(reversed(strides)) if order == "C" else tuple(strides)


def _below(node: Node, name: str) -> Node:
    for key, value in _children(node):
        if key == name:
            container = isinstance(value, (Mapping, Sequence))
            return value if container else Mapping(Tag.DICT, [(name, value)])
        if name.startswith(f"{key}."):
            found = _below(value, name[len(key) + 1 :])
            if found is not None:
                return found
    if not isinstance(node, Mapping):
        return None
    prefix = f"{name}."
    items: list[tuple[Node, Node]] = [
        (key.removeprefix(prefix), value)
        for key, value in node.items
        if isinstance(key, str) and key.startswith(prefix)
    ]
    return Mapping(Tag.DICT, items) if items else None


def _children(node: Node) -> Iterator[tuple[str, Node]]:
    if isinstance(node, Sequence):
        for index, item in enumerate(node.items):
            yield tree.join("", index), item
    elif isinstance(node, Mapping):
        for key, value in node.items:
            yield tree.join("", tree.plain(key)), value
