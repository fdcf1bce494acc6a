"""msgpack bytes <-> the dataclasses of messages.py. Input is hostile: the limits of packing.py,
then strict conversion by each field's annotation."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]

from . import messages
from .errors import ProtocolError
from .messages import Message
from .packing import REQUEST_BYTES_MAX, STRING_BYTES_MAX, unpack

#: Limits of `Expose.data`: the bytes of a piece, and the pieces of a message. A message of that
#: size is well below REQUEST_BYTES_MAX.
PIECE_BYTES = STRING_BYTES_MAX
PIECES_MAX = 15
#: The initial buffer of a message. msgpack's default is a large allocation for every message; when
#: memory is short, it would fail, and a peer would not even get its refusal.
BUFFER_BYTES = 4096

_I64 = range(-(2**63), 2**63)
_NATURAL = range(2**63)
#: The ranges of some fields; every other int must not be negative.
_RANGES: Mapping[str, range] = {
    "step": _I64,
    "newer_step": _I64,
    "newest_step": _I64,
    "uid": range(-1, 2**32 - 1),
    "rank": range(messages.RANKS_MAX),
    "world_size": range(1, messages.RANKS_MAX + 1),
    "local_world_size": range(1, messages.RANKS_MAX + 1),
}

_M = TypeVar("_M")


def encode(message: Message) -> bytes:
    """The msgpack map of a message; enums by value, nested messages with their tags."""
    packer = msgpack.Packer(default=_plain, buf_size=BUFFER_BYTES)
    if isinstance(message, messages.Reply) and isinstance(message.body, messages.Report):
        return b"".join(_pieces(message, packer))
    return typing.cast(bytes, packer.pack(message))


def _plain(value: object) -> dict[str, object]:
    """The map of a message, whose values may be messages again."""
    kind: type = type(value)
    keys, attributes = _keys(kind)
    return dict(zip(keys, map(functools.partial(getattr, value), attributes), strict=True))


def _pieces(value: object, packer: msgpack.Packer) -> Iterator[bytes]:
    """Packs a document row by row: packed at once, it would block all other threads."""
    if isinstance(value, Message):
        value = _plain(value)
    if isinstance(value, dict):
        yield packer.pack_map_header(len(value))
        for key, item in value.items():
            yield packer.pack(key)
            yield from _pieces(item, packer)
    elif isinstance(value, list):
        yield packer.pack_array_header(len(value))
        for row in value:
            yield packer.pack(row)
    else:
        yield packer.pack(value)


def decode(data: bytes | memoryview, kind: type[_M], *, bytes_max: int = REQUEST_BYTES_MAX) -> _M:
    """The message in `data`, which must be of class `kind`. Raises ProtocolError with the path."""
    return from_plain(unpack(data, bytes_max=bytes_max), kind)


def from_plain(plain: object, kind: type[_M]) -> _M:
    """Converts what `unpack` or a `Reassembler` returned to a message of class `kind`."""
    return typing.cast(_M, _message(plain, (kind,), "$"))


# -- typed conversion --------------------------------------------------------------------------

_WORDS = {dict: "a map", list: "a list", int: "an integer"}


@functools.cache
def _fields(kind: type) -> Mapping[str, tuple[object, bool]]:
    """The fields of a message by name: the annotation, and whether it has no default."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        item.name: (hints[item.name], item.default is missing and item.default_factory is missing)
        for item in dataclasses.fields(kind)
    }


@functools.cache
def _keys(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys of a message's map, and the attributes that have their values."""
    return ("t", *_fields(kind)), ("TAG", *_fields(kind))


@functools.cache
def _by_tag(kinds: tuple[type, ...]) -> Mapping[str, type]:
    return {typing.cast(Message, kind).TAG: kind for kind in kinds}


def _message(value: object, kinds: tuple[type, ...], path: str) -> object:
    plain, tags = _exactly(dict, value, path), _by_tag(kinds)
    tag = plain.get("t")
    if not isinstance(tag, str) or tag not in tags:
        raise ProtocolError(f"{path}.t: one of {', '.join(sorted(tags))} is expected")
    fields = _fields(tags[tag])
    unknown = plain.keys() - fields.keys() - {"t"}
    if unknown:
        raise ProtocolError(f"{path}.{min(unknown)[:40]}: no such field")
    values: dict[str, object] = {}
    for name, (hint, required) in fields.items():
        if name in plain:
            values[name] = _convert(plain[name], hint, name, f"{path}.{name}")
        elif required:
            raise ProtocolError(f"{path}.{name}: missing")
    return tags[tag](**values)


def _convert(value: object, hint: Any, name: str, path: str) -> object:
    """The value of the field `name`, as its annotation requires."""
    if hint is float and type(value) is int:
        return float(value)
    if hint in (bool, int, float, str, bytes):
        _exactly(hint, value, path)
        allowed = _RANGES.get(name, _NATURAL)
        if hint is int and value not in allowed:
            raise ProtocolError(f"{path}: {value} is outside {allowed.start} to {allowed.stop - 1}")
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        items = enumerate(_exactly(list, value, path))
        return [_convert(item, arguments[0], name, f"{path}[{index}]") for index, item in items]
    if origin is dict:
        return _exactly(dict, value, path)  # of a report: the daemon's, as it is
    if types.NoneType in arguments:
        return None if value is None else _convert(value, arguments[0], name, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(value, hint, path)
    return _message(value, arguments or (hint,), path)


def _exactly(kind: type[_M], value: object, path: str) -> _M:
    if type(value) is not kind:
        wanted = _WORDS.get(kind, kind.__name__)
        raise ProtocolError(f"{path}: {wanted} is expected, not {type(value).__name__}")
    return value


def _member(value: object, kind: type[enum.Enum], path: str) -> object:
    if type(value) in (int, str):  # bool would compare equal to 0 and 1
        for member in kind:
            if member.value == value:
                return member
    raise ProtocolError(f"{path}: not a {kind.__name__}")
