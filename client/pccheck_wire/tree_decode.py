"""Bytes -> `tree.Tree`. Input is hostile: sizes, depth, types and every reference are checked."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import msgpack  # type: ignore[import-untyped]

from .errors import DamagedError, ProtocolError
from .messages import RANKS_MAX
from .tree import (
    DEPTH_MAX,
    DIMENSIONS_MAX,
    ELSEWHERE,
    FACTORIES,
    FLAGS_MAX,
    ITEM_BYTES,
    LEAD_ALIGN,
    MAGIC,
    MAPPINGS,
    REQUIRES_GRAD,
    SEQUENCES,
    TREE_BYTES_MAX,
    VERSION,
    VERSION_SHARED,
    Array,
    Extent,
    Mapping,
    Named,
    Node,
    Scalar,
    Sequence,
    Tag,
    Tensor,
    Tree,
    plain,
    span_bytes,
)

_ELEMENTS_MAX = 2**62
_SHARED_BYTES_MAX = 2**50
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def decode_tree(data: bytes | memoryview, payload_bytes: int | None) -> Tree:
    if len(data) > TREE_BYTES_MAX:
        raise _bad(f"{len(data)} bytes, the limit is {TREE_BYTES_MAX}")
    try:
        top = msgpack.unpackb(
            data, raw=False, strict_map_key=True, object_pairs_hook=_no_map,
            ext_hook=_no_extension, timestamp=0,
        )  # fmt: skip
    except DamagedError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _bad(f"not msgpack: {str(error)[:120] or type(error).__name__}") from error
    if type(top) is not list or len(top) < 2 or top[0] != MAGIC:
        raise _bad("it does not start like one")
    version = top[1]
    if type(version) is not int or version not in (VERSION, VERSION_SHARED):
        raise ProtocolError(
            f"the checkpoint's tree has version {version!r}, this PCcheck reads {VERSION_SHARED}",
            hint="install a newer PCcheck",
        )
    if len(top) == 7:
        top.append(None)  # written before a tree said who saved it
    if len(top) != 8:
        raise _bad(f"{len(top)} parts instead of 8")
    step, metadata, attached, packed, root, about = top[2:]
    if type(step) is not int or type(attached) is not bool or type(packed) is not bytes:
        raise _bad("step, attached or extents have a wrong type")
    extents = _extents(packed, payload_bytes, shared=version == VERSION_SHARED)
    reader = _Reader(extents)
    return Tree(
        step, reader.node(metadata, 0), attached, extents, reader.node(root, 0),
        reader.node(about, 0),
    )  # fmt: skip


def _extents(packed: bytes, payload_bytes: int | None, *, shared: bool) -> list[Extent]:
    if len(packed) % 24:
        raise _bad("its table of extents is cut off")
    extents = [
        Extent(offset, nbytes, place & 0xFF, (place >> 8) - 1)
        for offset, nbytes, place in struct.iter_unpack("<QQQ", packed)
    ]
    end = 0
    for index, extent in enumerate(extents):
        if extent.owner >= (RANKS_MAX if shared else 0):
            raise _bad(f"extent {index} belongs to rank {extent.owner}")
        if extent.offset == ELSEWHERE and extent.owner >= 0:
            if not 0 < extent.nbytes <= _SHARED_BYTES_MAX or extent.lead >= LEAD_ALIGN:
                raise _bad(f"extent {index} has {extent.nbytes} bytes")
            continue
        if extent.offset < end or extent.nbytes == 0 or extent.lead >= LEAD_ALIGN:
            raise _bad(f"extent {index} overlaps or is empty")
        end = extent.offset + extent.nbytes
        if end > (2**63 if payload_bytes is None else payload_bytes):
            raise _bad(f"extent {index} ends at {end}, outside of the payload")
    return extents


class _Reader:
    """Turns plain lists into nodes; holds the extents that views must lie in."""

    def __init__(self, extents: list[Extent]) -> None:
        self.extents = extents
        self.readers: dict[int, Callable[[list[object]], Node]] = {
            Tag.INT: lambda raw: int.from_bytes(_bytes(raw, 1), "little", signed=True),
            Tag.COMPLEX: _complex,
            Tag.TEXT: _surrogates,
            Tag.DTYPE: lambda raw: Named(Tag.DTYPE, _choice(raw, 1, ITEM_BYTES)),
            Tag.DEVICE: lambda raw: Named(Tag.DEVICE, _str(raw, 1)),
            Tag.TENSOR: self._tensor,
            Tag.ARRAY: self._array,
            Tag.SCALAR: lambda raw: Scalar(_str(raw, 1), _bytes(raw, 2)),
        }
        self.lengths = {
            Tag.INT: 2, Tag.COMPLEX: 2, Tag.TEXT: 2, Tag.DTYPE: 2, Tag.DEVICE: 2,
            Tag.TENSOR: 7, Tag.ARRAY: 7, Tag.SCALAR: 3,
        }  # fmt: skip

    def node(self, raw: object, depth: int) -> Node:
        if type(raw) in _SCALARS:
            return raw  # type: ignore[return-value]
        if type(raw) is not list or not raw or type(raw[0]) is not int:
            raise _bad(f"a node is a {type(raw).__name__}")
        if depth >= DEPTH_MAX:
            raise _bad(f"nested more than {DEPTH_MAX} deep")
        try:
            tag = Tag(raw[0])
        except ValueError:
            raise _bad(f"unknown tag {raw[0]}") from None
        if tag in SEQUENCES:
            return self._sequence(tag, raw, depth)
        if tag in MAPPINGS:
            return self._mapping(tag, raw, depth)
        if len(raw) != self.lengths[tag]:
            raise _bad(f"a {tag.name} of {len(raw)} parts")
        return self.readers[tag](raw)

    def _sequence(self, tag: Tag, raw: list[object], depth: int) -> Sequence:
        if len(raw) != 2:
            raise _bad(f"a {tag.name} of {len(raw)} parts")
        items = [self.node(item, depth + 1) for item in _list(raw, 1)]
        if tag is Tag.SIZE and not all(type(item) is int and 0 <= item < 2**63 for item in items):
            raise _bad("a torch.Size of something else than sizes")
        if tag in (Tag.SET, Tag.FROZENSET) and len({_key(item) for item in items}) != len(items):
            raise _bad("a set with an item twice")
        return Sequence(tag, items)

    def _mapping(self, tag: Tag, raw: list[object], depth: int) -> Mapping:
        extra = tag in (Tag.ORDERED, Tag.DEFAULT)
        if len(raw) != 2 + extra:
            raise _bad(f"a {tag.name} of {len(raw)} parts")
        flat = _list(raw, 1)
        if len(flat) % 2:
            raise _bad("a mapping with a key and no value")
        nodes = [self.node(item, depth + 1) for item in flat]
        items = list(zip(nodes[::2], nodes[1::2], strict=True))
        if len({_key(key) for key, _ in items}) != len(items):
            raise _bad("a mapping with a key twice")
        if tag is Tag.DEFAULT:
            return Mapping(tag, items, factory=_choice(raw, 2, FACTORIES))
        return Mapping(tag, items, attributes=self.node(raw[2], depth + 1) if extra else None)

    def _tensor(self, raw: list[object]) -> Tensor:
        extent, offset = _natural(raw, 1, least=-1), _natural(raw, 2)
        shape, strides = _shape(raw, 3), _naturals(raw, 4)
        dtype, flags = _choice(raw, 5, ITEM_BYTES), _natural(raw, 6)
        if len(shape) != len(strides) or flags > FLAGS_MAX:
            raise _bad("a tensor whose parts do not fit each other")
        if flags & REQUIRES_GRAD and not dtype.startswith(("float", "bfloat", "complex")):
            raise _bad(f"a tensor of {dtype} that requires a gradient")
        item_bytes = ITEM_BYTES[dtype]
        self._inside(extent, offset, span_bytes(shape, strides, item_bytes), item_bytes)
        return Tensor(shape, strides, dtype, flags, extent, offset)

    def _array(self, raw: list[object]) -> Array:
        extent, offset, nbytes = (_natural(raw, 1, least=-1), _natural(raw, 2), _natural(raw, 3))
        self._inside(extent, offset, nbytes, 1)
        return Array(
            _str(raw, 4), _shape(raw, 5), _choice(raw, 6, ("C", "F")), nbytes, extent, offset
        )

    def _inside(self, index: int, offset: int, nbytes: int, item_bytes: int) -> None:
        if nbytes == 0 and index == -1 and offset == 0:
            return
        if not 0 <= index < len(self.extents) or nbytes == 0:
            raise _bad(f"a view on extent {index} of {len(self.extents)}")
        extent = self.extents[index]
        if offset + nbytes > extent.nbytes or (extent.lead + offset) % item_bytes:
            raise _bad(f"a view that is not inside of extent {index}, or not aligned")


def _bad(reason: str) -> DamagedError:
    return DamagedError(f"the checkpoint's tree cannot be read: {reason}")


def _no_map(_pairs: object) -> object:
    raise _bad("it holds a map")


def _no_extension(code: int, _data: bytes) -> object:
    raise _bad(f"it holds extension type {code}")


def _key(node: Node) -> object:
    """A hashable value for a key or an item of a set."""
    if isinstance(node, Sequence):
        if node.tag not in (Tag.TUPLE, Tag.FROZENSET):
            raise _bad(f"a key that is a {node.tag.name}")
        for item in node.items:
            _key(item)
    elif type(node) not in _SCALARS:
        raise _bad(f"a key that is a {type(node).__name__}")
    return plain(node)


def _list(raw: list[object], index: int) -> list[object]:
    value = raw[index]
    if type(value) is not list:
        raise _bad("a container without a list")
    return value


def _str(raw: list[object], index: int) -> str:
    value = raw[index]
    if type(value) is not str:
        raise _bad("text is expected")
    return value


def _bytes(raw: list[object], index: int) -> bytes:
    value = raw[index]
    if type(value) is not bytes:
        raise _bad("bytes are expected")
    return value


def _choice(raw: list[object], index: int, allowed: object) -> str:
    value = _str(raw, index)
    if value not in allowed:  # type: ignore[operator]
        raise ProtocolError(
            f"the checkpoint's tree names {value[:40]!r}, which is not known here",
            hint="it may be from a newer PCcheck",
        )
    return value


def _natural(raw: list[object], index: int, *, least: int = 0) -> int:
    value = raw[index]
    if type(value) is not int or not least <= value < 2**63:
        raise _bad(f"{value!r:.40} is not a size")
    return value


def _naturals(raw: list[object], index: int) -> list[int]:
    values = _list(raw, index)
    if len(values) > DIMENSIONS_MAX:
        raise _bad(f"{len(values)} dimensions")
    return [_natural(values, position) for position in range(len(values))]


def _shape(raw: list[object], index: int) -> list[int]:
    sizes = _naturals(raw, index)
    if math.prod(size for size in sizes if size) > _ELEMENTS_MAX:
        raise _bad("a view of too many elements")
    return sizes


def _complex(raw: list[object]) -> complex:
    data = _bytes(raw, 1)
    if len(data) != 16:
        raise _bad("a complex number of another size")
    return complex(*struct.unpack("<dd", data))


def _surrogates(raw: list[object]) -> str:
    try:
        return _bytes(raw, 1).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _bad("text is not Unicode") from None
