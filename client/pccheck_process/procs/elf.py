"""The build id of a program or library, which its linker writes into an ELF note."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

_MAGIC = b"\x7fELF"
_NOTE_SEGMENT, _BUILD_ID = 4, 3  # PT_NOTE, NT_GNU_BUILD_ID
_MOST_HEADERS, _MOST_NOTE_BYTES, _MOST_ID_BYTES = 128, 1 << 16, 64

Read = Callable[[int, int], bytes]  # offset and size; fewer bytes at the end of the file


def build_id(read: Read) -> str:
    """In hexadecimal; "" for a file without build id, or of another format."""
    head = read(0, 64)
    if len(head) < 64 or head[:4] != _MAGIC or head[4] not in (1, 2) or head[5] not in (1, 2):
        return ""
    order = "<" if head[5] == 1 else ">"
    for offset, size in _note_segments(read, head, order):
        for owner, kind, content in _notes(read(offset, min(size, _MOST_NOTE_BYTES)), order):
            if owner == b"GNU\0" and kind == _BUILD_ID and 0 < len(content) <= _MOST_ID_BYTES:
                return content.hex()
    return ""


def _note_segments(read: Read, head: bytes, order: str) -> Iterator[tuple[int, int]]:
    """Offset and size of each."""
    if head[4] == 2:  # 64 bits
        (at,) = struct.unpack_from(order + "Q", head, 32)
        size, count = struct.unpack_from(order + "HH", head, 54)
        entry, fields = struct.Struct(order + "IIQQQQ"), (2, 5)
    else:
        (at,) = struct.unpack_from(order + "I", head, 28)
        size, count = struct.unpack_from(order + "HH", head, 42)
        entry, fields = struct.Struct(order + "IIIIII"), (1, 4)
    if size < entry.size or at >= 1 << 62:
        return
    table = read(at, size * min(count, _MOST_HEADERS))
    for begin in range(0, len(table) - entry.size + 1, size):
        header = entry.unpack_from(table, begin)
        if header[0] == _NOTE_SEGMENT and header[fields[0]] < 1 << 62:
            yield header[fields[0]], header[fields[1]]


def _notes(segment: bytes, order: str) -> Iterator[tuple[bytes, int, bytes]]:
    """Owner, kind and content of each note."""
    header = struct.Struct(order + "III")
    at = 0
    while at + header.size <= len(segment):
        owner_size, content_size, kind = header.unpack_from(segment, at)
        owner_at = at + header.size
        content_at = owner_at + (owner_size + 3 & ~3)
        yield (
            segment[owner_at : owner_at + owner_size],
            kind,
            segment[content_at : content_at + content_size],
        )
        at = content_at + (content_size + 3 & ~3)
