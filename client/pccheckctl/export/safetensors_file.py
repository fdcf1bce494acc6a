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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pccheck_store.readers import Reader
from pccheck_wire import tree
from pccheck_wire.errors import PccheckError
from pccheckctl.output.documents import as_json
from pccheckctl.output.files import Output, reserve

from .parts import as_tensor, contiguous_strides

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


def write(reader: Reader, content: tree.Tree, output: Output, about: dict[str, str]) -> list[str]:
    """Fills `output`; every byte is checked on the way. `about` becomes metadata. Returns what the
    format cannot hold. Raises DamagedError."""
    pieces, left_out = _pieces(content)
    values, others = _values(content)
    metadata = {"format": "pt", **about, "pccheck.values": json.dumps(values)}
    if content.metadata is not None:
        metadata["pccheck.metadata"] = json.dumps(as_json(tree.plain(content.metadata)))
    header = _header(metadata, pieces)
    base = len(header)
    file_bytes = base + sum(piece.nbytes for piece in pieces)
    reserve(output.descriptor, file_bytes, output.target.parent)
    with mmap.mmap(output.descriptor, file_bytes) as mapping:
        mapping[:base] = header
        anchor = ctypes.c_char.from_buffer(mapping)
        try:
            start = ctypes.addressof(anchor) + base
            for batch in _disjoint(piece for piece in pieces if piece.nbytes and piece.contiguous):
                reader.read_into(
                    b"".join(
                        struct.pack("<QQQ", start + piece.target, piece.source, piece.nbytes)
                        for piece in batch
                    )
                )
        finally:
            del anchor  # or the mapping could not be closed
        for piece in pieces:
            if piece.nbytes and not piece.contiguous:
                shape, strides = piece.tensor.shape, piece.tensor.strides
                span = tree.span_bytes(shape, strides, piece.item_bytes)
                data = reader.read(piece.source, span)
                at = base + piece.target
                mapping[at : at + piece.nbytes] = gather(data, piece.item_bytes, shape, strides)
        mapping.flush()
    return [f"{path} is left out" for path in left_out + others]


def _header(metadata: dict[str, str], pieces: list[Piece]) -> bytes:
    """Gives every piece its place. Larger items come first, so that every tensor starts on a
    multiple of its item size."""
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for piece in sorted(pieces, key=lambda piece: (-piece.item_bytes, piece.name)):
        piece.target, at = at, at + piece.nbytes
        header[piece.name] = {
            "dtype": DTYPES[piece.tensor.dtype],
            "shape": piece.tensor.shape,
            "data_offsets": [piece.target, at],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > HEADER_BYTES_MAX:
        raise PccheckError(
            f"the header would have {len(text)} bytes, but safetensors allows {HEADER_BYTES_MAX}",
            hint="use --format torch",
        )
    return struct.pack("<Q", len(text)) + text


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


def _disjoint(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """What ascends in the payload without overlap is read at once; tied tensors come after it."""
    batch: list[Piece] = []
    tied: list[list[Piece]] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.source, piece.nbytes)):
        if piece.source >= end:
            batch.append(piece)
            end = piece.source + piece.nbytes
        else:
            tied.append([piece])
    return [batch, *tied] if batch else []


def _pieces(content: tree.Tree) -> tuple[list[Piece], list[str]]:
    """Tensors and arrays that the format can hold, and the paths of the others."""
    pieces: list[Piece] = []
    left_out: list[str] = []
    taken: set[str] = {"__metadata__"}
    for path, node in tree.walk(content.root):
        if not isinstance(node, (tree.Tensor, tree.Array)):
            continue
        tensor = as_tensor(node) if isinstance(node, tree.Array) else node
        if tensor is None or tensor.dtype not in DTYPES:
            left_out.append(f"{path or '.'} ({(tensor or node).dtype})")
            continue
        source = content.extents[node.extent].offset + node.offset if node.extent >= 0 else 0
        pieces.append(Piece(_unique(path or "state", taken), tensor, source))
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
    containers = tree.Tensor, tree.Shard, tree.Array, tree.Sequence, tree.Mapping
    nodes = (node for _, node in tree.walk(content.root) if not isinstance(node, containers))
    for node, leaf in zip(nodes, tree.leaf_entries(content), strict=True):
        if leaf.path not in values and as_json(node) is node:
            values[leaf.path] = node
        else:
            left_out.append(f"{leaf.path or '.'} ({leaf.kind})")
    return values, left_out
