"""What passes between the daemon and a helper: a length, an identity's length, the identity, the
message. Imported by both sides, so it imports almost nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<IB")
#: Of frames and of a helper's arguments: helpers are started from what is installed by then, which
#: may be newer than the daemon.
VERSION = 2
#: A helper's first frame: it serves. Every frame behind it has an identity.
READY = _HEADER.pack(0, 0)


class FramingError(ValueError):
    """The other end sends what is no frame; nothing that follows means anything."""


def pack(identity: bytes, message: bytes) -> bytes:
    return b"".join((_HEADER.pack(len(message), len(identity)), identity, message))


class Unpacker:
    """Frames out of a stream of bytes. Holds one frame that is not complete, at most."""

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Identity and message of each frame that is complete now. Raises FramingError."""
        held = self._held
        held += data
        at = 0
        while len(held) - at >= _HEADER.size:
            message_bytes, identity_bytes = _HEADER.unpack_from(held, at)
            if message_bytes > self._message_bytes_max:
                raise FramingError(f"a message of {message_bytes} bytes")
            middle = at + _HEADER.size + identity_bytes
            end = middle + message_bytes
            if end > len(held):
                break
            yield bytes(held[at + _HEADER.size : middle]), bytes(held[middle:end])
            at = end
        del held[:at]
