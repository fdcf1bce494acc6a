"""The tree of a process image: which bytes of the payload are which file of CRIU, and what must be
known before the image is restored. MessagePack, the last bytes of the payload."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

import msgpack  # type: ignore[import-untyped]

from pccheck_wire.errors import DamagedError, ProtocolError, StateMismatchError
from pccheck_wire.tree import IMAGE_MAGIC, MAGIC

VERSION = 1
NAME_BYTES_MAX = 255
_EXTENT = struct.Struct("<QQ")


@dataclass(frozen=True)
class ImageFile:
    """One file of CRIU: its pieces in the payload, offset and length in bytes, in their order."""

    name: str
    extents: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.extents)


@dataclass(frozen=True)
class ImageIndex:
    """`facts` is plain JSON; `facts.py` says what is in it."""

    streams: dict[str, ImageFile]
    facts: dict[str, object] = field(default_factory=dict)

    def pack(self) -> bytes:
        files = [
            [name, b"".join(_EXTENT.pack(*extent) for extent in stream.extents)]
            for name, stream in self.streams.items()
        ]
        packed = msgpack.packb([IMAGE_MAGIC, VERSION, json.dumps(self.facts), files])
        assert isinstance(packed, bytes)
        return packed


def unpack(data: bytes | bytearray, payload_bytes: int) -> ImageIndex:
    """Input is hostile: every size is checked. Raises StateMismatchError for a checkpoint of
    tensors, ProtocolError for a newer image, DamagedError for all else that is wrong."""
    try:
        top = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_foreign)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _bad("it is not msgpack") from error
    if type(top) is list and top[:1] == [MAGIC]:
        raise StateMismatchError(
            "the checkpoint has tensors, and no process",
            hint="restore it in the training script: PCcheckClient().restore()",
        )
    if type(top) is not list or len(top) < 2 or top[0] != IMAGE_MAGIC:
        raise _bad("it does not start like one")
    if top[1] != VERSION:
        raise ProtocolError(
            f"the image has version {top[1]!r}, this PCcheck reads {VERSION}",
            hint="install a newer PCcheck",
        )
    if len(top) != 4 or type(top[2]) is not str or type(top[3]) is not list:
        raise _bad("a part has a wrong type")
    try:
        facts = json.loads(top[2])
    except (ValueError, RecursionError) as error:
        raise _bad("its facts are not JSON") from error
    if type(facts) is not dict:
        raise _bad("its facts are no object")
    streams = dict(_stream(item, payload_bytes) for item in top[3])
    if len(streams) != len(top[3]):
        raise _bad("a name occurs twice")
    return ImageIndex(streams, facts)


def _stream(item: object, payload_bytes: int) -> tuple[str, ImageFile]:
    if type(item) is not list or len(item) != 2:
        raise _bad("a file has a wrong type")
    name, packed = item
    if type(name) is not str or not 0 < len(name) <= NAME_BYTES_MAX or "/" in name:
        raise _bad("a file has no name")
    if type(packed) is not bytes or len(packed) % _EXTENT.size:
        raise _bad(f"the extents of {name} are cut off")
    extents = tuple(_EXTENT.iter_unpack(packed))
    if any(not 0 < length <= payload_bytes - offset for offset, length in extents):
        raise _bad(f"{name} lies outside of the payload")
    return name, ImageFile(name, extents)


def _foreign(code: int, _: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _bad(what: str) -> DamagedError:
    return DamagedError(f"the index of the process image cannot be read: {what}")
