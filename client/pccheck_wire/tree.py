"""The tree: which bytes of a payload are which tensor, and every Python value of the state.

msgpack made by the client and opaque to the daemon; the last bytes of a payload. Needs neither
torch nor NumPy, so that the command line can show a checkpoint on any machine. Equal states give
equal bytes.

    tree    = [MAGIC, version, step, metadata, attached, extents, root, about]
    extents = one packed (offset, bytes, place) of little-endian u64 per extent
    node    = nil | bool | int | float | str | bin           the value itself
            | [tag, ...]                                      everything else, see `Tag`

An extent is the union of all views on one piece of memory. The lowest byte of `place` is its `lead`
(below 16): how far the first byte lies behind a 16-byte boundary of its storage, so that views keep
an address that suits their dtype. The rest of `place` is 0, or in version 2, for replicated state,
one more than the rank that stores this extent for all: on the other ranks its offset is ELSEWHERE,
and what is shared appears in the state in the same order on every rank. Maps, extension types,
unknown tags, views outside of their extent, blocks outside of their tensor and too deep nesting
are refused.

`about` is what the client records beside the state: the process and the client that made it, and
the classes of attached optimizers and schedulers, and which parameters of attached modules require
gradients. Readers ignore what they do not know there.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgpack  # type: ignore[import-untyped]

from .errors import DamagedError, ProtocolError, StateMismatchError, UnsupportedStateError
from .messages import RANKS_MAX

MAGIC = "pccheck-tree"
#: Of the index of a process image (`pccheck_process/index.py`), which is no tree of tensors.
IMAGE_MAGIC = "pccheck-image"
VERSION = 1
VERSION_SHARED = 2  # some extents are stored by one rank for all
VERSION_SHARDED = 3  # some tensors are blocks of larger ones; the rest as in version 2
ELSEWHERE = 2**64 - 1  # the offset of an extent that another rank stores
DEPTH_MAX = 100
DIMENSIONS_MAX = 64
TREE_BYTES_MAX = 512 << 20
LEAD_ALIGN = 16
LONG_BITS = 2000  # an int of 2000 bits has 603 digits; Python's limit may be set to 640

#: Bytes per element of every torch dtype that can be stored, by its name.
ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}  # fmt: skip

#: What a defaultdict may make; "" stands for no factory.
FACTORIES: dict[str, Any] = {
    "": None, "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str,
    "tuple": tuple, "bool": bool, "bytes": bytes, "complex": complex, "frozenset": frozenset,
    "Counter": collections.Counter, "OrderedDict": collections.OrderedDict,
}  # fmt: skip

#: Flags of a tensor. ON_DEVICE: it was in GPU memory; its bytes in the payload are the same.
REQUIRES_GRAD, PARAMETER, BUFFER, ON_DEVICE = 1, 2, 4, 8
FLAGS_MAX = REQUIRES_GRAD | PARAMETER | BUFFER | ON_DEVICE


class Tag(IntEnum):
    """The first item of every node that is an array. Numbers are never used again."""

    LIST = 1  # items
    TUPLE = 2  # items
    SET = 3  # items, ordered by their bytes
    FROZENSET = 4
    SIZE = 5  # items: torch.Size
    DICT = 6  # [key, value, key, value, ...]
    ORDERED = 7  # the same, and perhaps its attribute `_metadata` (a module's state dict)
    COUNTER = 8
    DEFAULT = 9  # the same, and the factory's name
    INT = 10  # bin: two's complement, little-endian
    COMPLEX = 11  # bin: two doubles
    TEXT = 12  # bin: a str that is not valid Unicode (surrogates)
    DTYPE = 13  # name
    DEVICE = 14  # name
    TENSOR = 15  # extent, byte offset in it, shape, strides, dtype, flags
    ARRAY = 16  # extent, byte offset in it, bytes, NumPy's dtype string, shape, "C" or "F"
    SCALAR = 17  # NumPy's dtype string, bin
    SHARD = 18  # a TENSOR, global shape, offsets in it, mesh, names of its dimensions, placements


#: Which Python makes of them without torch.
SEQUENCES: dict[Tag, Callable[[Iterable[Any]], object]] = {
    Tag.LIST: list, Tag.TUPLE: tuple, Tag.SET: set, Tag.FROZENSET: frozenset, Tag.SIZE: tuple,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sequence:
    """A container of `tag` in SEQUENCES."""

    tag: Tag
    items: list[Node]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dict, or one of its kinds by `tag`; keys are scalars and tuples of them."""

    tag: Tag
    items: list[tuple[Node, Node]]
    factory: str = ""
    attributes: Node = None


@dataclass(frozen=True, slots=True)
class Named:
    """A torch.dtype or torch.device."""

    tag: Tag
    name: str


@dataclass(slots=True)
class Tensor:
    """A view on an extent (-1: no elements). Extent and offset are set when extents are known."""

    shape: list[int]
    strides: list[int]
    dtype: str
    flags: int = 0
    extent: int = -1
    offset: int = 0


@dataclass(slots=True)
class Shard:
    """A rank's block of a tensor of `shape`, from `offsets` on: the local part of a DTensor, with
    the sizes and names of its mesh and one placement for each dimension of the mesh, as torch
    writes them: "R", "S(0)". A block that was given as a `pccheck.Shard` has no mesh."""

    local: Tensor
    shape: list[int]
    offsets: list[int]
    mesh: list[int]
    names: list[str]
    placements: list[str]

    @property
    def dtype(self) -> str:
        return self.local.dtype


@dataclass(slots=True)
class Array:
    """A NumPy array, contiguous in `order`, that is a whole extent or a part of it."""

    dtype: str
    shape: list[int]
    order: str
    nbytes: int
    extent: int = -1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Scalar:
    """A NumPy scalar."""

    dtype: str
    data: bytes


Node: TypeAlias = (
    bool | int | float | complex | str | bytes
    | Sequence | Mapping | Named | Tensor | Shard | Array | Scalar | None
)  # fmt: skip


class Extent(NamedTuple):
    """`nbytes` of the payload at `offset`; with an `owner`, of that rank's payload."""

    offset: int
    nbytes: int
    lead: int = 0
    owner: int = -1  # the rank that stores it for all; -1: every rank stores its own

    def packed(self) -> bytes:
        return struct.pack("<QQQ", self.offset, self.nbytes, self.lead | self.owner + 1 << 8)


@dataclass(frozen=True, slots=True)
class Tree:
    """`attached`: root is a dict of what was attached, by name; else whatever was given."""

    step: int
    metadata: Node
    attached: bool
    extents: list[Extent]
    root: Node
    about: Node = None

    def names(self) -> set[object]:
        """What was attached is under these."""
        if not self.attached or not isinstance(self.root, Mapping):
            return set()
        return {plain(key) for key, _ in self.root.items}

    def sharded(self) -> bool:
        """Whether some tensors are blocks of larger ones, of which other ranks have the rest."""
        return any(isinstance(node, Shard) for _, node in walk(self.root))

    def shared(self) -> list[int]:
        """The extents that one rank stores for all, by their first appearance in the state: in the
        same order on every rank."""
        found: dict[int, None] = {}
        if all(extent.owner < 0 for extent in self.extents):
            return []
        for _, node in walk(self.root):
            index = node.extent if isinstance(node, (Tensor, Array)) else -1
            if index >= 0 and self.extents[index].owner >= 0:
                found[index] = None
        return list(found)


# -- encoding ----------------------------------------------------------------------------------

_HEAD: Callable[[int], bytes] = msgpack.Packer().pack_array_header
#: What the bytes of a node are packed into at first; most are short.
_BUFFER_BYTES = 4096


def encode(tree: Tree) -> bytes:
    """The bytes of a tree. Raises UnsupportedStateError when it is too deep or too large."""
    packed = b"".join(extent.packed() for extent in tree.extents)
    version = version_for(
        shared=any(extent.owner >= 0 for extent in tree.extents), sharded=tree.sharded()
    )
    return assemble(
        tree.step, tree.metadata, tree.attached, packed, encode_node(tree.root),
        version=version, about=encode_node(tree.about),
    )  # fmt: skip


def version_for(*, shared: bool, sharded: bool) -> int:
    """The oldest version that can hold what there is, so that older readers read most trees."""
    if sharded:
        return VERSION_SHARDED
    return VERSION_SHARED if shared else VERSION


def assemble(
    step: int,
    metadata: Node,
    attached: bool,
    extents: bytes,
    root: bytes,
    *,
    version: int,
    about: bytes,
) -> bytes:
    """A tree whose extents are packed and whose root is encoded already: the fast path keeps what
    did not change."""
    head = map(encode_node, (MAGIC, version, step, metadata, attached, extents))
    data = b"".join((_HEAD(8), *head, root, about))
    if len(data) > TREE_BYTES_MAX:
        raise UnsupportedStateError(
            f"the Python values of the state take {len(data)} bytes, more than {TREE_BYTES_MAX}",
            hint="put large data into tensors or NumPy arrays",
        )
    return data


def encode_node(node: Node) -> bytes:
    # A packer of its own: it calls `_parts`, and another thread may encode meanwhile.
    packer = msgpack.Packer(default=_parts, buf_size=_BUFFER_BYTES)
    try:
        data: bytes = packer.pack(node)
    except UnicodeEncodeError:
        data = packer.pack(_spelled(node))
    return data


def encode_dict(items: list[tuple[str, bytes]]) -> bytes:
    """The node of a dict whose values are encoded already."""
    parts = (part for key, value in items for part in (encode_node(key), value))
    return b"".join((_HEAD(2), encode_node(Tag.DICT), _HEAD(2 * len(items)), *parts))


def _parts(node: object) -> list[object]:
    """The array of a node that msgpack has no form for."""
    if isinstance(node, Tensor):
        return [Tag.TENSOR, node.extent, node.offset, node.shape, node.strides, node.dtype,
                node.flags]  # fmt: skip
    if isinstance(node, Sequence):
        unordered = node.tag in (Tag.SET, Tag.FROZENSET)
        return [node.tag, sorted(node.items, key=encode_node) if unordered else node.items]
    if isinstance(node, Mapping):
        flat = list(itertools.chain.from_iterable(node.items))
        if node.tag in (Tag.ORDERED, Tag.DEFAULT):
            return [node.tag, flat, node.factory if node.tag is Tag.DEFAULT else node.attributes]
        return [node.tag, flat]
    if isinstance(node, int):  # msgpack's end at 64 bits
        return [Tag.INT, node.to_bytes(node.bit_length() // 8 + 1, "little", signed=True)]
    if isinstance(node, complex):
        return [Tag.COMPLEX, struct.pack("<dd", node.real, node.imag)]
    if isinstance(node, Named):
        return [node.tag, node.name]
    if isinstance(node, Shard):
        return [Tag.SHARD, node.local, node.shape, node.offsets, node.mesh, node.names,
                node.placements]  # fmt: skip
    if isinstance(node, Array):
        return [Tag.ARRAY, node.extent, node.offset, node.nbytes, node.dtype, node.shape,
                node.order]  # fmt: skip
    if isinstance(node, Scalar):
        return [Tag.SCALAR, node.dtype, node.data]
    raise TypeError(f"not a node: {type(node)}")


def _spelled(node: Any) -> Any:
    """The same with bytes for text that is not valid Unicode (surrogates)."""
    if isinstance(node, str):
        valid = not any("\ud800" <= letter <= "\udfff" for letter in node)
        return node if valid else [Tag.TEXT, node.encode("utf-8", "surrogatepass")]
    if isinstance(node, Sequence):
        return replace(node, items=list(map(_spelled, node.items)))
    if isinstance(node, Mapping):
        items = [(_spelled(key), _spelled(value)) for key, value in node.items]
        return replace(node, items=items, attributes=_spelled(node.attributes))
    return node


# -- decoding ----------------------------------------------------------------------------------


_ELEMENTS_MAX = 2**62
_SHARED_BYTES_MAX = 2**50
_T = TypeVar("_T")
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def decode(data: bytes | memoryview, payload_bytes: int | None = None) -> Tree:
    """The tree in `data`. Input is hostile: sizes, depth, types and every reference are checked.

    With `payload_bytes` extents must lie inside it. Raises ProtocolError for what a newer PCcheck
    wrote, DamagedError for all else that is wrong: block checksums have vouched for these bytes, so
    only a foreign or a faulty writer made them.
    """
    if len(data) > TREE_BYTES_MAX:
        raise _bad(f"{len(data)} bytes, the limit is {TREE_BYTES_MAX}")
    try:
        top = msgpack.unpackb(
            data, raw=False, strict_map_key=True, object_pairs_hook=_foreign,
            ext_hook=_foreign, timestamp=0,
        )  # fmt: skip
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _bad(f"not msgpack: {str(error)[:120] or type(error).__name__}") from error
    if type(top) is list and top[:1] == [IMAGE_MAGIC]:
        raise StateMismatchError(
            "the checkpoint is the image of a process, and has no tensors of its own",
            hint="restore the process: pccheckctl restore-process JOB",
        )
    if type(top) is not list or len(top) < 2 or top[0] != MAGIC:
        raise _bad("it does not start like one")
    version = top[1]
    if type(version) is not int or not VERSION <= version <= VERSION_SHARDED:
        raise ProtocolError(
            f"the checkpoint's tree has version {version!r}, this PCcheck reads {VERSION_SHARDED}",
            hint="install a newer PCcheck",
        )
    if len(top) == 7:
        top.append(None)  # an older tree, without `about`
    if len(top) != 8:
        raise _bad(f"{len(top)} parts instead of 8")
    step, metadata, attached, packed, root, about = top[2:]
    if type(step) is not int or type(attached) is not bool or type(packed) is not bytes:
        raise _bad("step, attached or extents have a wrong type")
    extents = _extents(packed, payload_bytes, shared=version >= VERSION_SHARED)
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
        #: By tag: how many parts its nodes have, and what reads them.
        self.readers: dict[int, tuple[int, Callable[[list[object], int], Node]]] = {
            **dict.fromkeys(SEQUENCES, (2, self._sequence)),
            **dict.fromkeys((Tag.DICT, Tag.COUNTER), (2, self._mapping)),
            **dict.fromkeys((Tag.ORDERED, Tag.DEFAULT), (3, self._mapping)),
            Tag.INT: (
                2,
                lambda raw, _: int.from_bytes(_part(raw, 1, bytes), "little", signed=True),
            ),
            Tag.COMPLEX: (2, _complex),
            Tag.TEXT: (2, _surrogates),
            Tag.DTYPE: (2, lambda raw, _: Named(Tag.DTYPE, _choice(raw, 1, ITEM_BYTES))),
            Tag.DEVICE: (2, lambda raw, _: Named(Tag.DEVICE, _part(raw, 1, str))),
            Tag.TENSOR: (7, self._tensor),
            Tag.ARRAY: (7, self._array),
            Tag.SCALAR: (3, lambda raw, _: Scalar(_part(raw, 1, str), _part(raw, 2, bytes))),
            Tag.SHARD: (7, self._shard),
        }

    def node(self, raw: object, depth: int) -> Node:
        if type(raw) in _SCALARS:
            return raw  # type: ignore[return-value]
        if type(raw) is not list or not raw or type(raw[0]) is not int:
            raise _bad(f"a node is a {type(raw).__name__}")
        if depth >= DEPTH_MAX:
            raise _bad(f"nested more than {DEPTH_MAX} deep")
        if raw[0] not in self.readers:
            raise _bad(f"unknown tag {raw[0]}")
        length, read = self.readers[raw[0]]
        if len(raw) != length:
            raise _bad(f"a {Tag(raw[0]).name} of {len(raw)} parts")
        return read(raw, depth)

    def _sequence(self, raw: list[object], depth: int) -> Sequence:
        tag = Tag(_part(raw, 0, int))
        items = [self.node(item, depth + 1) for item in _part(raw, 1, list)]
        if tag is Tag.SIZE and not all(type(item) is int and 0 <= item < 2**63 for item in items):
            raise _bad("a torch.Size of something else than sizes")
        if tag in (Tag.SET, Tag.FROZENSET) and len({_key(item) for item in items}) != len(items):
            raise _bad("a set with an item twice")
        return Sequence(tag, items)

    def _mapping(self, raw: list[object], depth: int) -> Mapping:
        tag, flat = Tag(_part(raw, 0, int)), _part(raw, 1, list)
        if len(flat) % 2:
            raise _bad("a mapping with a key and no value")
        nodes = [self.node(item, depth + 1) for item in flat]
        items = list(zip(nodes[::2], nodes[1::2], strict=True))
        if len({_key(key) for key, _ in items}) != len(items):
            raise _bad("a mapping with a key twice")
        if tag is Tag.DEFAULT:
            return Mapping(tag, items, factory=_choice(raw, 2, FACTORIES))
        return Mapping(
            tag, items, attributes=self.node(raw[2], depth + 1) if len(raw) > 2 else None
        )

    def _tensor(self, raw: list[object], _depth: int) -> Tensor:
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

    def _shard(self, raw: list[object], depth: int) -> Shard:
        local = self.node(raw[1], depth + 1)
        shape, offsets, mesh = _shape(raw, 2), _naturals(raw, 3), _naturals(raw, 4)
        names, placements = _texts(raw, 5), _texts(raw, 6)
        if not isinstance(local, Tensor) or not len(local.shape) == len(shape) == len(offsets):
            raise _bad("a block of a tensor whose parts do not fit each other")
        if any(o + n > whole for o, n, whole in zip(offsets, local.shape, shape, strict=True)):
            raise _bad("a block that is not inside of its tensor")
        if len(placements) != len(mesh) or len(names) not in (0, len(mesh)):
            raise _bad("a block whose placements do not fit its mesh")
        return Shard(local, shape, offsets, mesh, names, placements)

    def _array(self, raw: list[object], _depth: int) -> Array:
        extent, offset, nbytes = (_natural(raw, 1, least=-1), _natural(raw, 2), _natural(raw, 3))
        self._inside(extent, offset, nbytes, 1)
        return Array(
            _part(raw, 4, str), _shape(raw, 5), _choice(raw, 6, ("C", "F")), nbytes, extent, offset
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


def _foreign(*_value: object) -> object:
    raise _bad("it holds a map or an extension type")


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


def _part(raw: list[object], index: int, kind: type[_T]) -> _T:
    value = raw[index]
    if type(value) is not kind:
        raise _bad(f"a {kind.__name__} is expected, not a {type(value).__name__}")
    return value


def _choice(raw: list[object], index: int, allowed: object) -> str:
    value = _part(raw, index, str)
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
    values = _part(raw, index, list)
    if len(values) > DIMENSIONS_MAX:
        raise _bad(f"{len(values)} dimensions")
    return [_natural(values, position) for position in range(len(values))]


def _texts(raw: list[object], index: int) -> list[str]:
    values = _part(raw, index, list)
    if len(values) > DIMENSIONS_MAX:
        raise _bad(f"{len(values)} dimensions of a mesh")
    return [_part(values, position, str) for position in range(len(values))]


def _shape(raw: list[object], index: int) -> list[int]:
    sizes = _naturals(raw, index)
    if math.prod(filter(None, sizes)) > _ELEMENTS_MAX:
        raise _bad("a view of too many elements")
    return sizes


def _complex(raw: list[object], _depth: int) -> complex:
    data = _part(raw, 1, bytes)
    if len(data) != 16:
        raise _bad("a complex number of another size")
    return complex(*struct.unpack("<dd", data))


def _surrogates(raw: list[object], _depth: int) -> str:
    try:
        return _part(raw, 1, bytes).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _bad("text is not Unicode") from None


# -- nodes and their paths ---------------------------------------------------------------------


def span_bytes(shape: list[int], strides: list[int], item_bytes: int) -> int:
    """From the first byte of a view to its last one."""
    if 0 in shape:
        return 0
    reach: int = sum(map(operator.mul, shape, strides)) - sum(strides)
    return (reach + 1) * item_bytes


class Leaf(NamedTuple):
    kind: str
    text: str


def leaf(node: Node) -> Leaf | None:
    """A value that is neither a container nor a tensor; None for those."""
    if isinstance(node, Named):
        return Leaf(f"torch.{node.tag.name.lower()}", node.name)
    if isinstance(node, Scalar):
        return Leaf(f"numpy {node.dtype}", node.data.hex())
    if isinstance(node, (Sequence, Mapping, Tensor, Shard, Array)):
        return None
    return Leaf(type(node).__name__, shown(node))


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """The node and all below it, with dotted paths."""
    yield path, node
    if isinstance(node, Sequence):
        for index, item in enumerate(node.items):
            yield from walk(item, join(path, index))
    elif isinstance(node, Mapping):
        for key, value in node.items:
            yield from walk(value, join(path, plain(key)))
    elif isinstance(node, Shard):
        yield path, node.local


def extents_of(root: Node, *, without: Collection[int] = ()) -> set[int]:
    """The extents on which a part lies; `without`: ids of nodes that do not count."""
    return {
        node.extent
        for _, node in walk(root)
        if isinstance(node, (Tensor, Array)) and node.extent >= 0 and id(node) not in without
    }


def join(path: str, key: object) -> str:
    """`path` extended by a key of a mapping or an index."""
    text = key if isinstance(key, str) else shown(key)
    return f"{path}.{text}" if path else text


def is_long(value: int) -> bool:
    """More digits than Python turns into text (sys.set_int_max_str_digits)."""
    return value.bit_length() > LONG_BITS


def shown(value: object) -> str:
    """repr() of a value or key, with ints that are too long for it in hexadecimal."""
    if isinstance(value, int) and is_long(value):
        return hex(value)
    if isinstance(value, (tuple, list, set, frozenset)) and _has_long(value):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    return repr(value)


def _has_long(value: object) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(_has_long, value))
    return isinstance(value, int) and is_long(value)


def plain(node: Node) -> object:
    """Metadata and keys as Python values: for nodes without tensors and torch's own types."""
    if isinstance(node, Sequence):
        return SEQUENCES[node.tag](map(plain, node.items))
    if isinstance(node, Mapping):
        return {plain(key): plain(value) for key, value in node.items}
    if isinstance(node, Named):
        return node.name
    return node
