"""Safetensors, without torch: where each tensor of a checkpoint lies in the payload and the file.

The format: u64 length of the header, little-endian; the header, JSON; the tensors without holes, in
C order. Tensors that share memory or have strides are each written out on their own.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pccheck_native import catalog
from pccheck_wire import parts, tree
from pccheck_wire.errors import PccheckError

from .documents import as_json
from .reading.state_reader import StateReader
from .selection import as_tensor, contiguous_strides

INDEX = ".safetensors.index.json"  #: the ending of an index of several files
HEADER_BYTES_MAX = 100_000_000
_ALIGN = 8

#: torch's names of the dtypes that the format has.
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
}  # fmt: skip
PAIRS = "F4"  #: the format counts the numbers, and torch the bytes, which hold two of them
#: memoryview formats by item size: slicing with a step works on items.
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(slots=True)
class Piece:
    """One tensor: where it lies in the payload, and in the file after the header."""

    name: str
    tensor: tree.Tensor
    source: int
    target: int = 0

    @property
    def item_bytes(self) -> int:
        return tree.ITEM_BYTES[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * self.item_bytes

    @property
    def contiguous(self) -> bool:
        """Strides of dimensions of length 1 do not matter."""
        wanted = contiguous_strides(self.tensor.shape)
        return all(
            dim == 1 or have == want
            for dim, have, want in zip(self.tensor.shape, self.tensor.strides, wanted, strict=True)
        )

    @property
    def divisible(self) -> bool:
        """Whether any part of it is one run of bytes in a payload. A tensor that is put together
        from blocks of several ranks is not."""
        return self.contiguous and parts.placed(self.source)[0] < parts.RANKS_MAX

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for two names of one tensor."""
        wanted = contiguous_strides(self.tensor.shape) if self.contiguous else self.tensor.strides
        return self.source, self.tensor.dtype, *self.tensor.shape, *wanted

    @property
    def span_bytes(self) -> int:
        """From its first to its last byte in the payload."""
        return tree.span_bytes(self.tensor.shape, self.tensor.strides, self.item_bytes)

    @property
    def entry(self) -> dict[str, object]:
        """Its line of the header."""
        kind, shape = DTYPES[self.tensor.dtype], list(self.tensor.shape)
        if kind == PAIRS and shape:
            shape[-1] *= 2
        offsets = [self.target, self.target + self.nbytes]
        return {"dtype": kind, "shape": shape, "data_offsets": offsets}


def pieces_of(content: tree.Tree) -> tuple[list[Piece], list[str]]:
    """Tensors and arrays that the format can hold, and the paths of the others."""
    pieces: list[Piece] = []
    left_out: list[str] = []
    taken: set[str] = {"__metadata__"}
    for path, node in tree.walk(content.root):
        if not isinstance(node, (tree.Tensor, tree.Array)):
            continue
        tensor = as_tensor(node) if isinstance(node, tree.Array) else node
        scalar_pair = tensor is not None and DTYPES.get(tensor.dtype) == PAIRS and not tensor.shape
        if tensor is None or tensor.dtype not in DTYPES or scalar_pair:
            left_out.append(f"{path or '.'} ({(tensor or node).dtype})")
            continue
        source = content.extents[node.extent].offset + node.offset if node.extent >= 0 else 0
        pieces.append(Piece(_unique(path or "state", taken), tensor, source))
    return pieces, left_out


def metadata_of(
    one: catalog.StoredCheckpoint, content: tree.Tree, only: str
) -> tuple[dict[str, str], list[str]]:
    """The metadata of the file: of which checkpoint it is, and the values of the state as JSON. And
    the paths of the values that JSON cannot hold."""
    values, left_out = _values(content)
    names = ("job", "rank", "world_size", "step", "sequence")
    made = {"format": "pt"} | {f"pccheck.{name}": str(getattr(one.id, name)) for name in names}
    if only:
        made["pccheck.only"] = only
    made["pccheck.values"] = json.dumps(values)
    if content.metadata is not None:
        made["pccheck.metadata"] = json.dumps(as_json(tree.plain(content.metadata)))
    return made, left_out


def header_of(metadata: dict[str, str], pieces: Iterable[Piece]) -> bytes:
    """The beginning of the file. Gives every piece its place: larger items come first, so that
    every tensor starts on a multiple of its item size. Raises PccheckError when it is too long."""
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for piece in sorted(pieces, key=lambda piece: (-piece.item_bytes, piece.name)):
        piece.target, at = at, at + piece.nbytes
        header[piece.name] = piece.entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > HEADER_BYTES_MAX:
        raise PccheckError(
            f"the header would have {len(text)} bytes, but safetensors allows {HEADER_BYTES_MAX}",
            hint="use --format torch",
        )
    return struct.pack("<Q", len(text)) + text


def read_strided(reader: StateReader, piece: Piece, into: memoryview) -> None:
    """Fills `into` with a tensor that is not contiguous in the payload. Takes memory for what lies
    between its first and its last byte."""
    data = bytearray(piece.span_bytes)
    place = ctypes.addressof(ctypes.c_char.from_buffer(data))
    reader.read_into(struct.pack("<QQQ", place, piece.source, len(data)))
    gather(data, piece.item_bytes, piece.tensor.shape, piece.tensor.strides, into)


def gather(
    data: bytes | bytearray,
    item: int,
    shape: Sequence[int],
    strides: Sequence[int],
    into: memoryview,
) -> None:
    """The elements of a strided view in C order; `data` begins with its first element."""
    if 0 in shape:
        return
    items, made = (memoryview(one).cast(_FORMATS[item]) for one in (data, into))
    *outer, length = shape or (1,)
    *steps, step = strides or (1,)
    rows = [0]  # where each innermost row begins
    for dim, stride in zip(outer, steps, strict=True):
        rows = [row + index * stride for row in rows for index in range(dim)]
    for number, row in enumerate(rows):
        if step:
            elements = items[row : row + (length - 1) * step + 1 : step]
        else:
            one = items[row : row + 1].tobytes()
            elements = memoryview(one * length).cast(_FORMATS[item])
        made[number * length : (number + 1) * length] = elements


def _unique(name: str, taken: set[str]) -> str:
    """Dotted paths may coincide: {"a.b": x, "a": {"b": y}}."""
    made, count = name, 1
    while made in taken:
        count += 1
        made = f"{name}~{count}"
    taken.add(made)
    return made


def _values(content: tree.Tree) -> tuple[dict[str, object], list[str]]:
    """Python values by path, where JSON keeps them exactly; the paths of the others."""
    values: dict[str, object] = {}
    left_out: list[str] = []
    for path, node in tree.walk(content.root):
        leaf = tree.leaf(node)
        if leaf is None:
            continue
        if path not in values and as_json(node) is node:
            values[path] = node
        else:
            left_out.append(f"{path or '.'} ({leaf.kind})")
    return values, left_out
