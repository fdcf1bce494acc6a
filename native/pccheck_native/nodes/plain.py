"""Values from a store, which anybody may have written: each function returns the value, or raises
ValueError with what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack  # type: ignore[import-untyped]

INT_MAX = (1 << 63) - 1
ID = 16  # bytes of an id: of a start, a node, a process, a digest
TEXT_MAX = 255
RANKS_MAX = 1 << 16
NODES_MAX = 1 << 13
NAMES_MAX = 1 << 14  # names and parts in one value


def packed(value: object) -> bytes:
    body = msgpack.packb(value)
    assert isinstance(body, bytes)
    return body


def unpacked(body: bytes) -> object:
    try:
        value: object = msgpack.unpackb(body, use_list=True, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError("it is not MessagePack") from error
    return value


def number(value: object, what: str, least: int = 0, most: int = INT_MAX) -> int:
    if type(value) is not int or not least <= value <= most:
        upto = f"to {most}" if most < INT_MAX else "on"
        raise ValueError(f"{what} is {value!r:.60}, and must be a whole number from {least} {upto}")
    return value


def flag(value: object, what: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{what} is {value!r:.60}, and must be true or false")
    return value


def text(value: object, what: str, most: int = TEXT_MAX) -> str:
    if type(value) is not str or len(value) > most or not value.isprintable():
        raise ValueError(f"{what} is {value!r:.60}, and must be printable text of up to {most}")
    return value


def raw(value: object, what: str, *, may_lack: bool = False) -> bytes:
    """An id; `may_lack`: or b""."""
    if type(value) is not bytes or not (len(value) == ID or (may_lack and not value)):
        raise ValueError(f"{what} is {value!r:.60}, and must be {ID} bytes")
    return value


def items(value: object, what: str, most: int = NAMES_MAX, *, count: int = -1) -> Sequence[object]:
    """A list or tuple; `count`: of exactly so many."""
    if type(value) not in (list, tuple) or count not in (-1, len(value)) or len(value) > most:  # type: ignore[arg-type]
        many = f"{count}" if count >= 0 else f"up to {most}"
        raise ValueError(f"{what} is {value!r:.60}, and must be a list of {many}")
    return value  # type: ignore[return-value]
