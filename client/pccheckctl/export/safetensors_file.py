"""A checkpoint as a safetensors file, or as a directory of such files as Hugging Face's libraries
read it. The payload streams from the volume into mappings of the files, however large it is."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from pathlib import Path

from pccheck_native import catalog
from pccheck_store.reading.state_reader import StateReader
from pccheck_store.safetensors_layout import (
    INDEX,
    Piece,
    header_of,
    metadata_of,
    pieces_of,
    read_strided,
)
from pccheck_wire import tree
from pccheckctl.output.files import Output, reserve

#: As in Hugging Face's libraries: 5 GB.
SHARD_BYTES = 5 * 10**9


def write(
    reader: StateReader,
    one: catalog.StoredCheckpoint,
    content: tree.Tree,
    output: Output,
    only: str,
) -> list[str]:
    """Fills the file `output`; every byte is checked on the way. Returns what the format cannot
    hold. Raises DamagedError."""
    pieces, left_out = pieces_of(content)
    metadata, others = metadata_of(one, content, only)
    _fill(reader, output.descriptor, output.target.parent, metadata, pieces)
    return [f"{path} is left out" for path in left_out + others]


def write_directory(
    reader: StateReader,
    one: catalog.StoredCheckpoint,
    content: tree.Tree,
    output: Output,
    only: str,
    *,
    shard_bytes: int,
) -> list[str]:
    """The same as a directory: one file, or when the tensors have more than `shard_bytes` several,
    each with at most as many (but with one tensor at least), and an index of them. A tensor with
    several names is stored once, under the first; the metadata has the others."""
    pieces, left_out = pieces_of(content)
    metadata, others = metadata_of(one, content, only)
    pieces, tied = _once(pieces)
    metadata = tied | metadata
    shards = _shards(pieces, shard_bytes)
    if len(shards) == 1:
        _create(reader, output, "model.safetensors", metadata, pieces)
    else:
        files = {
            f"model-{number:05}-of-{len(shards):05}.safetensors": shard
            for number, shard in enumerate(shards, 1)
        }
        for name, shard in files.items():
            _create(reader, output, name, {"format": metadata["format"]}, shard)
        total = sum(piece.nbytes for piece in pieces)
        names = {piece.name: name for name, shard in files.items() for piece in shard}
        index = {"metadata": {"total_size": total, **metadata}, "weight_map": names}
        (output.temporary / f"model{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
    notes = [f"{name} is stored once, as {kept}" for name, kept in tied.items()]
    return [f"{path} is left out" for path in left_out + others] + notes


def _create(
    reader: StateReader, output: Output, name: str, metadata: dict[str, str], pieces: list[Piece]
) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(output.temporary / name, flags, 0o666)
    try:
        _fill(reader, descriptor, output.target.parent, metadata, pieces)
    finally:
        os.close(descriptor)


def _fill(
    reader: StateReader, descriptor: int, place: Path, metadata: dict[str, str], pieces: list[Piece]
) -> None:
    header = header_of(metadata, pieces)
    base = len(header)
    file_bytes = base + sum(piece.nbytes for piece in pieces)
    reserve(descriptor, file_bytes, place)
    with mmap.mmap(descriptor, file_bytes) as mapping:
        mapping[:base] = header
        anchor = ctypes.c_char.from_buffer(mapping)
        try:
            start = ctypes.addressof(anchor) + base
            contiguous = (piece for piece in pieces if piece.nbytes and piece.contiguous)
            reader.read_into(
                b"".join(
                    struct.pack("<QQQ", start + piece.target, piece.source, piece.nbytes)
                    for piece in sorted(contiguous, key=lambda piece: piece.source)
                )
            )
        finally:
            del anchor  # or the mapping could not be closed
        for piece in pieces:
            if piece.nbytes and not piece.contiguous:
                at = base + piece.target
                with memoryview(mapping) as whole, whole[at : at + piece.nbytes] as into:
                    read_strided(reader, piece, into)
        mapping.flush()


def _once(pieces: list[Piece]) -> tuple[list[Piece], dict[str, str]]:
    """The tensors, each under its first name; and that name by the other ones."""
    first: dict[tuple[object, ...], Piece] = {}
    kept: list[Piece] = []
    tied: dict[str, str] = {}
    for piece in pieces:
        found = first.setdefault(piece.place, piece) if piece.nbytes else piece
        if found is piece:
            kept.append(piece)
        else:
            tied[piece.name] = found.name
    return kept, tied


def _shards(pieces: list[Piece], at_most: int) -> list[list[Piece]]:
    """The pieces in files of limited size, in the order of the state."""
    shards: list[list[Piece]] = [[]]
    room = at_most
    for piece in pieces:
        if piece.nbytes > room and shards[-1]:
            shards.append([])
            room = at_most
        shards[-1].append(piece)
        room -= piece.nbytes
    return shards
