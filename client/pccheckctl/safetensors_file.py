"""A checkpoint as a safetensors file, without torch: the header is laid out from the tree, then the
payload streams from the volume into a mapping of the file.

The format: u64 length of the header, little-endian; the header, JSON; the tensors without holes, in
C order. Tied and strided tensors are written out each on its own.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pccheck_wire import tree
from pccheck_wire.errors import PccheckError

from .output import as_json
from .output_file import OutputFile
from .reading import Reader
from .strides import contiguous_strides, gather, same_layout
from .torch_names import NUMPY_TO_TORCH

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


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor: where it lies in the payload, and in the file behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: int
    span: int  # bytes from its first to its last one in the payload
    target: int
    nbytes: int

    @property
    def contiguous(self) -> bool:
        return same_layout(self.shape, self.strides)


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
    views, left_out = _views(content)
    # Larger items first, so that every tensor starts on a multiple of its item size.
    views.sort(key=lambda view: (-tree.ITEM_BYTES[view.dtype], view.name))
    pieces, at = [], 0
    for view in views:
        nbytes = math.prod(view.shape) * tree.ITEM_BYTES[view.dtype]
        pieces.append(
            Piece(
                view.name, view.dtype, view.shape, view.strides, view.source, view.span, at, nbytes
            )
        )
        at += nbytes
    values, others = _values(content)
    metadata = {"format": "pt", **about, "pccheck.values": json.dumps(values)}
    if content.metadata is not None:
        metadata["pccheck.metadata"] = json.dumps(as_json(tree.plain(content.metadata)))
    header: dict[str, object] = {"__metadata__": metadata}
    for piece in pieces:
        header[piece.name] = {
            "dtype": DTYPES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [piece.target, piece.target + piece.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > HEADER_BYTES_MAX:
        raise PccheckError(
            f"the header takes {len(text)} bytes, safetensors allows {HEADER_BYTES_MAX}",
            hint="use --format torch",
        )
    return Plan(struct.pack("<Q", len(text)) + text, pieces, left_out + others)


def write(reader: Reader, chosen: Plan, output: OutputFile) -> None:
    """Fills `output`; every byte is checked on the way. Raises DamagedError."""
    output.reserve(chosen.file_bytes)
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
                item = tree.ITEM_BYTES[piece.dtype]
                at = base + piece.target
                mapping[at : at + piece.nbytes] = gather(data, item, piece.shape, piece.strides)
        mapping.flush()


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


@dataclass(slots=True)
class _View:
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: int
    span: int


def _views(content: tree.Tree) -> tuple[list[_View], list[str]]:
    """Tensors and arrays that the format can hold, and the paths of the others."""
    views: list[_View] = []
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
        name = _unique(path or "state", taken)
        views.append(_View(name, dtype, shape, strides, source, span))
    return views, left_out


def _unique(name: str, taken: set[str]) -> str:
    """Dotted paths may coincide: {"a.b": x, "a": {"b": y}}."""
    made, count = name, 1
    while made in taken:
        count += 1
        made = f"{name}~{count}"
    taken.add(made)
    return made


def _values(content: tree.Tree) -> tuple[dict[str, object], list[str]]:
    """Python values by path as far as JSON keeps them as they are; the paths of the others."""
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
