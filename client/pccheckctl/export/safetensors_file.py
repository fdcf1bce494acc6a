"""A checkpoint as a safetensors file, without torch: the header is made from the tree, then the
payload streams from the volume into a mapping of the file, however large it is.

The format: u64 length of the header, little-endian; the header, JSON; the tensors without holes, in
C order. Every tied or strided tensor is written out on its own.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pccheck_wire import tree
from pccheck_wire.errors import PccheckError
from pccheckctl.output.documents import as_json
from pccheckctl.source.readers import Reader

from .files import Output, reserve
from .parts import NUMPY_TO_TORCH, contiguous_strides

HEADER_BYTES_MAX = 100_000_000
_ALIGN = 8

#: torch's names of the dtypes that the format has.
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}  # fmt: skip
#: memoryview formats by item size: slicing with a step works on items.
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(slots=True)
class Piece:
    """One tensor: where it lies in the payload, and in the file after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, never negative
    source: int
    span: int  # bytes from the first to the last one in the payload
    target: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * tree.ITEM_BYTES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Strides of dimensions of length 1 do not matter."""
        wanted = contiguous_strides(self.shape)
        return all(
            dim == 1 or have == want
            for dim, have, want in zip(self.shape, self.strides, wanted, strict=True)
        )


@dataclass(slots=True)
class Plan:
    header: bytes
    pieces: list[Piece]
    left_out: list[str] = field(default_factory=list)

    @property
    def file_bytes(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


def plan(content: tree.Tree, about: dict[str, str]) -> Plan:
    """Where everything goes. `about` becomes metadata; what the format cannot hold is listed."""
    pieces, left_out = _pieces(content)
    # Larger items first, so that every tensor starts on a multiple of its item size.
    pieces.sort(key=lambda piece: (-tree.ITEM_BYTES[piece.dtype], piece.name))
    values, others = _values(content)
    metadata = {"format": "pt", **about, "pccheck.values": json.dumps(values)}
    if content.metadata is not None:
        metadata["pccheck.metadata"] = json.dumps(as_json(tree.plain(content.metadata)))
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for piece in pieces:
        piece.target, at = at, at + piece.nbytes
        header[piece.name] = {
            "dtype": DTYPES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [piece.target, at],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > HEADER_BYTES_MAX:
        raise PccheckError(
            f"the header would have {len(text)} bytes, but safetensors allows {HEADER_BYTES_MAX}",
            hint="use --format torch",
        )
    return Plan(struct.pack("<Q", len(text)) + text, pieces, left_out + others)


def write(reader: Reader, chosen: Plan, output: Output) -> None:
    """Fills `output`; every byte is checked on the way. Raises DamagedError."""
    reserve(output.descriptor, chosen.file_bytes, output.target.parent)
    with mmap.mmap(output.descriptor, chosen.file_bytes) as mapping:
        base = len(chosen.header)
        mapping[:base] = chosen.header
        whole = [piece for piece in chosen.pieces if piece.nbytes and piece.contiguous]
        anchor = ctypes.c_char.from_buffer(mapping)
        try:
            start = ctypes.addressof(anchor) + base
            for batch in _disjoint(whole):
                reader.read_into(
                    b"".join(
                        struct.pack("<QQQ", start + piece.target, piece.source, piece.nbytes)
                        for piece in batch
                    )
                )
        finally:
            del anchor  # or the mapping could not be closed
        for piece in chosen.pieces:
            if piece.nbytes and not piece.contiguous:
                data = reader.read(piece.source, piece.span)
                at = base + piece.target
                item = tree.ITEM_BYTES[piece.dtype]
                mapping[at : at + piece.nbytes] = gather(data, item, piece.shape, piece.strides)
        mapping.flush()


def gather(data: bytes, item: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """The elements of a strided view in C order; `data` begins with its first element."""
    if 0 in shape:
        return b""
    items = memoryview(data).cast(_FORMATS[item])
    *outer, length = shape or (1,)
    *steps, step = strides or (1,)
    rows = [0]  # where each innermost row begins
    for dim, stride in zip(outer, steps, strict=True):
        rows = [row + index * stride for row in rows for index in range(dim)]
    if step == 0:
        return b"".join(items[row : row + 1].tobytes() * length for row in rows)
    return b"".join(items[row : row + (length - 1) * step + 1 : step].tobytes() for row in rows)


def _disjoint(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Batches that ascend in the payload without overlap; tied tensors come in a later one."""
    rest = sorted(pieces, key=lambda piece: (piece.source, piece.nbytes))
    while rest:
        batch: list[Piece] = []
        overlapping: list[Piece] = []
        end = 0
        for piece in rest:
            if piece.source >= end:
                batch.append(piece)
                end = piece.source + piece.nbytes
            else:
                overlapping.append(piece)
        yield batch
        rest = overlapping


def _pieces(content: tree.Tree) -> tuple[list[Piece], list[str]]:
    """Tensors and arrays that the format can hold, and the paths of the others."""
    pieces: list[Piece] = []
    left_out: list[str] = []
    taken: set[str] = {"__metadata__"}
    for path, node in tree.walk(content.root):
        if not isinstance(node, (tree.Tensor, tree.Array)):
            continue
        shape = tuple(node.shape)
        if isinstance(node, tree.Tensor):
            dtype, strides = node.dtype, tuple(node.strides)
            span = tree.span_bytes(node.shape, node.strides, tree.ITEM_BYTES[dtype])
        else:
            dtype = NUMPY_TO_TORCH.get(node.dtype, node.dtype)
            strides, span = contiguous_strides(shape, order=node.order), node.nbytes
        if dtype not in DTYPES:
            left_out.append(f"{path or '.'} ({dtype})")
            continue
        source = content.extents[node.extent].offset + node.offset if node.extent >= 0 else 0
        pieces.append(Piece(_unique(path or "state", taken), dtype, shape, strides, source, span))
    return pieces, left_out


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
        if isinstance(node, (tree.Tensor, tree.Array, tree.Sequence, tree.Mapping)):
            continue
        exact = node is None or type(node) in (bool, str)
        exact = exact or (type(node) is int and not tree.is_long(node))
        if (exact or (isinstance(node, float) and math.isfinite(node))) and path not in values:
            values[path] = node
        else:
            kind = f"torch.{node.tag.name.lower()}" if isinstance(node, tree.Named) else (
                f"numpy {node.dtype}" if isinstance(node, tree.Scalar) else type(node).__name__
            )  # fmt: skip
            left_out.append(f"{path or '.'} ({kind})")
    return values, left_out
