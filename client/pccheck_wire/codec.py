"""msgpack bytes <-> the dataclasses of messages.py. Input is hostile: the limits of packing.py,
then strict conversion by each field's annotation."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgpack  # type: ignore[import-untyped]

from . import messages
from .errors import ProtocolError
from .messages import Message
from .packing import PACKET_BYTES as PACKET_BYTES
from .packing import REPLY_BYTES_MAX as REPLY_BYTES_MAX
from .packing import REQUEST_BYTES_MAX as REQUEST_BYTES_MAX
from .packing import STRING_BYTES_MAX
from .packing import Reassembler as Reassembler
from .packing import packets as packets
from .packing import unpack as unpack

#: Of `Expose.data`: pieces of so many bytes, so many in one message, fit with room to spare.
PIECE_BYTES = STRING_BYTES_MAX
PIECES_MAX = 15
#: What a message is packed into at first. msgpack's own size is that of a large allocation, for
#: every message: where memory is short, that alone would leave a peer without its refusal.
BUFFER_BYTES = 4096
DEPTH_MAX = 24

_I64 = range(-(2**63), 2**63)
_NATURAL = range(2**63)
#: Ranges by field name; every other int is natural.
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
_Convert = Callable[[object, str], object]


def encode(message: Message) -> bytes:
    """The msgpack map of a message; enums by value, nested messages with their tags."""
    plain = _to_plain(message)
    packer = msgpack.Packer(use_bin_type=True, buf_size=BUFFER_BYTES)
    if isinstance(message, messages.Reply) and isinstance(message.body, messages.Report):
        return b"".join(_pieces(plain, packer))
    return typing.cast(bytes, packer.pack(plain))


def _pieces(plain: object, packer: msgpack.Packer) -> Iterator[bytes]:
    """A document, down to the rows of its lists: packed at once it would keep all other threads
    waiting, however long it is."""
    if isinstance(plain, dict):
        yield packer.pack_map_header(len(plain))
        for key, value in plain.items():
            yield packer.pack(key)
            yield from _pieces(value, packer)
    elif isinstance(plain, list):
        yield packer.pack_array_header(len(plain))
        for row in plain:
            yield packer.pack(row)
    else:
        yield packer.pack(plain)


def decode(data: bytes | memoryview, kind: type[_M], *, bytes_max: int = REQUEST_BYTES_MAX) -> _M:
    """The message in `data`, which must be of class `kind`. Raises ProtocolError with the path."""
    return from_plain(unpack(data, bytes_max=bytes_max), kind)


def decode_any(
    data: bytes | memoryview, *kinds: type[Message], bytes_max: int = REPLY_BYTES_MAX
) -> Message:
    """Like decode, for a message that may be of several classes."""
    return typing.cast(Message, _by_tag(kinds)(unpack(data, bytes_max=bytes_max), "$"))


def from_plain(plain: object, kind: type[_M]) -> _M:
    """Typed conversion alone, of what `unpack` or a `Reassembler` returned."""
    return typing.cast(_M, _by_tag((kind,))(plain, "$"))


# -- typed conversion --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    convert: _Convert
    required: bool


_SCALARS = frozenset((bool, int, float, str, bytes, type(None)))


def _to_plain(value: object) -> object:
    kind: type = type(value)
    if kind in _SCALARS:
        return value
    names = _field_names(kind)
    if names is not None:
        plain: dict[str, object] = {"t": typing.cast(Message, value).TAG}
        for name in names:
            plain[name] = _to_plain(getattr(value, name))
        return plain
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(item.name for item in dataclasses.fields(kind))


@functools.cache
def _fields(kind: type) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        _Field(
            item.name,
            _converter(hints[item.name], item.name),
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING,
        )
        for item in dataclasses.fields(kind)
    )


def _dataclass_from(plain: Mapping[str, object], kind: type, path: str) -> object:
    fields = _fields(kind)
    unknown = plain.keys() - {item.name for item in fields} - {"t"}
    if unknown:
        raise ProtocolError(f"{path}.{min(unknown)[:40]}: no such field")
    values: dict[str, object] = {}
    for item in fields:
        if item.name in plain:
            values[item.name] = item.convert(plain[item.name], f"{path}.{item.name}")
        elif item.required:
            raise ProtocolError(f"{path}.{item.name}: missing")
    return kind(**values)


def _by_tag(kinds: tuple[type, ...]) -> _Convert:
    tags = {typing.cast(Message, kind).TAG: kind for kind in kinds}

    def convert(value: object, path: str) -> object:
        if not isinstance(value, dict):
            raise ProtocolError(f"{path}: a map is expected, not {type(value).__name__}")
        tag = value.get("t")
        if not isinstance(tag, str) or tag not in tags:
            raise ProtocolError(f"{path}.t: one of {', '.join(sorted(tags))} is expected")
        return _dataclass_from(value, tags[tag], path)

    return convert


def _converter(hint: object, name: str) -> _Convert:
    """The check for one annotation: scalars, enums, optionals, lists, messages, documents."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        return _integer(_RANGES.get(name, _NATURAL))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _by_tag((hint,))
    if hint in (bool, float, str, bytes):
        return _scalar(typing.cast(type, hint))
    if origin in (types.UnionType, typing.Union):
        others = tuple(item for item in arguments if item is not types.NoneType)
        if all(dataclasses.is_dataclass(item) for item in others):
            return _by_tag(others)
        return _optional(_converter(others[0], name))
    if origin is list:
        return _list(_converter(arguments[0], name))
    if origin is dict:
        return _document
    raise TypeError(f"no conversion for {hint}")


def _integer(allowed: range) -> _Convert:
    def convert(value: object, path: str) -> object:
        if type(value) is not int:
            raise ProtocolError(f"{path}: an integer is expected, not {type(value).__name__}")
        if value not in allowed:
            raise ProtocolError(f"{path}: {value} is outside {allowed.start} to {allowed.stop - 1}")
        return value

    return convert


def _member(kind: type[enum.Enum]) -> _Convert:
    def convert(value: object, path: str) -> object:
        if type(value) in (int, str):  # bool would compare equal to 0 and 1
            for member in kind:
                if member.value == value:
                    return member
        raise ProtocolError(f"{path}: not a {kind.__name__}")

    return convert


def _scalar(kind: type) -> _Convert:
    def convert(value: object, path: str) -> object:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ProtocolError(f"{path}: {kind.__name__} is expected, not {type(value).__name__}")
        return value

    return convert


def _optional(inner: _Convert) -> _Convert:
    return lambda value, path: None if value is None else inner(value, path)


def _list(inner: _Convert) -> _Convert:
    def convert(value: object, path: str) -> object:
        if not isinstance(value, list):
            raise ProtocolError(f"{path}: a list is expected, not {type(value).__name__}")
        return [inner(item, f"{path}[{index}]") for index, item in enumerate(value)]

    return convert


def _document(value: object, path: str, depth: int = 0) -> object:
    """A JSON-able document: maps, lists and scalars, no bytes, bounded depth."""
    if depth == 0 and not isinstance(value, dict):
        raise ProtocolError(f"{path}: a map is expected, not {type(value).__name__}")
    if depth > DEPTH_MAX:
        raise ProtocolError(f"{path}: nested more than {DEPTH_MAX} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            _document(item, f"{path}.{key[:40]}", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _document(item, f"{path}[{index}]", depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ProtocolError(f"{path}: {type(value).__name__} is not allowed here")
    return value
