"""msgpack bytes <-> plain maps and lists. Input may be hostile: size and depth limits, no extension
types, no duplicate keys. Imports neither the classes of messages.py nor `dataclasses`."""

from __future__ import annotations

from collections.abc import Iterable

import msgpack  # type: ignore[import-untyped]

from .errors import ProtocolError

TYPE_CHECKING = False  # the import of `typing` takes a fifth of the time of `status`
if TYPE_CHECKING:
    from typing import Any

REQUEST_BYTES_MAX = 64 * 1024
REPLY_BYTES_MAX = 16 * 1024 * 1024
#: A reply longer than this goes over the attach socket in several packets.
PACKET_BYTES = 64 * 1024
STRING_BYTES_MAX = 4096
ITEMS_MAX = 65536
#: The lists and maps of a request, and the items of each. Small items are cheap to send and take
#: long to build, so a request with more of them is refused first.
REQUEST_ITEMS_MAX = 32
#: A value in a job's torch store, as Python bytes.
VALUE_BYTES_MAX = 1 << 20
#: The operations of a `Carried`, or their results, in msgpack. A trainer begins no operation while
#: it has results of more than VALUE_BYTES_MAX, and takes no longer result than that and a little.
CARRY_BYTES_MAX = 2 * VALUE_BYTES_MAX + REQUEST_BYTES_MAX
OPERATIONS_MAX = 64


def unpack(data: bytes | memoryview, *, bytes_max: int = REQUEST_BYTES_MAX) -> object:
    """Plain msgpack within the limits, untyped. Raises ProtocolError."""
    if len(data) > bytes_max:
        raise ProtocolError(f"$: a message of {len(data)} bytes, the limit is {bytes_max}")
    try:
        plain: object = msgpack.unpackb(data, **_limits(bytes_max))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"$: not a message: {_reason(error)}") from error
    return plain


def pieces(values: list[Any]) -> list[bytes]:
    """Operations or results as msgpack, in pieces that a message may have."""
    data = msgpack.packb(values)
    return [data[at : at + STRING_BYTES_MAX] for at in range(0, len(data), STRING_BYTES_MAX)]


def joined(pieces: Iterable[bytes]) -> list[Any]:
    """What `pieces` got. Raises ProtocolError."""
    data = b"".join(pieces)
    if not data:
        return []
    if len(data) > CARRY_BYTES_MAX:
        raise ProtocolError(f"$: {len(data)} bytes are carried, the limit is {CARRY_BYTES_MAX}")
    few = _Few(1 + 2 * OPERATIONS_MAX)  # ["get", [KEY, ...]]
    limits = _limits(CARRY_BYTES_MAX) | {
        "max_bin_len": VALUE_BYTES_MAX, "max_str_len": STRING_BYTES_MAX, "max_map_len": 0,
        "list_hook": few.made_list,
    }  # fmt: skip
    try:
        plain: object = msgpack.unpackb(data, **limits)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"$: nothing that is carried: {_reason(error)}") from error
    if not isinstance(plain, list):
        raise ProtocolError(f"$: a list is expected, not {type(plain).__name__}")
    return plain


class Reassembler:
    """Joins a reply that comes in several packets; the msgpack map determines where it ends."""

    def __init__(self, *, bytes_max: int = REPLY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._unpacker = msgpack.Unpacker(max_buffer_size=bytes_max, **_limits(bytes_max))
        self._bytes = 0

    def feed(self, packet: bytes) -> object | None:
        """Returns the message when this packet completes it, else None. Raises ProtocolError."""
        self._bytes += len(packet)
        if self._bytes > self._bytes_max:
            raise ProtocolError(f"$: a message of more than {self._bytes_max} bytes")
        try:
            self._unpacker.feed(packet)
            plain: object = self._unpacker.unpack()
        except msgpack.OutOfData:
            return None
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise ProtocolError(f"$: not a message: {_reason(error)}") from error
        if self._unpacker.tell() != self._bytes:
            raise ProtocolError("$: bytes behind the end of the message")
        return plain


def packets(data: bytes) -> list[bytes]:
    """A message, cut into packets for the attach socket."""
    return [data[at : at + PACKET_BYTES] for at in range(0, len(data), PACKET_BYTES)]


def _limits(bytes_max: int) -> dict[str, object]:
    is_request = bytes_max <= REQUEST_BYTES_MAX
    few = _Few(REQUEST_ITEMS_MAX)
    return {
        "raw": False,
        "strict_map_key": True,
        "object_pairs_hook": few.made_map if is_request else _unique,
        "list_hook": few.made_list if is_request else None,
        "max_str_len": STRING_BYTES_MAX if is_request else bytes_max,
        "max_bin_len": STRING_BYTES_MAX,
        "max_array_len": REQUEST_ITEMS_MAX if is_request else ITEMS_MAX,
        "max_map_len": REQUEST_ITEMS_MAX if is_request else ITEMS_MAX,
        "max_ext_len": 0,
        "ext_hook": _no_extensions,
        "timestamp": 0,
    }


class _Few:
    """The lists and maps of one message, which are counted."""

    def __init__(self, most: int) -> None:
        self._left = self._most = most

    def made_list(self, items: list[object]) -> list[object]:
        self._count()
        return items

    def made_map(self, pairs: list[tuple[object, object]]) -> dict[str, object]:
        self._count()
        return _unique(pairs)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ProtocolError(f"$: a request of more than {self._most} lists and maps")


def _unique(pairs: list[tuple[object, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise ProtocolError("$: a map key that is not a string")
        if key in made:
            raise ProtocolError(f"$: the key {key[:40]!r} comes twice")
        made[key] = value
    return made


def _no_extensions(code: int, _data: bytes) -> object:
    raise ProtocolError(f"$: extension type {code}")


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:120]
