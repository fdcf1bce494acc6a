"""What a process says to the peer server of a node, over TLS 1.3 (PROTOCOL.md, Peers). The server's
certificate is known from the job's store, and so is the token that the server asks for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgpack  # type: ignore[import-untyped]

VERSION = 1
TOKEN_BYTES = 32
FINGERPRINT_BYTES = 32  # SHA-256 of the certificate in DER
NAME_FIELDS = 4
ASK_BYTES_MAX = 4096
TEXT_BYTES_MAX = 1024
#: Of a rank's manifest: 8 bytes for each block.
MANIFEST_BYTES_MAX = 1 << 30
#: What a request asks for at most, and at least one block.
PIECE_BYTES = 4 << 20

ASK = struct.Struct("<I")  # the bytes of the question that follows
ANSWER = struct.Struct("<II")  # OK or why not, the bytes that follow
REQUEST = struct.Struct("<QQ")  # offset and length: whole blocks of the payload
#: Added to the offset: they did not match, and the server is to check them itself.
DOUBTED = 1 << 63
WALL = struct.Struct("<Q")  # when it became durable, in ns since 1970; then comes the manifest

#: Values of ANSWER's first field; after the others a text follows, and the connection
#: ends. BUSY: try again.
OK, REFUSED, DAMAGED, UNREADABLE, BUSY = range(5)


class Ask(NamedTuple):
    """The first message: what is to be read."""

    token: bytes
    job: str
    start: bytes  # the checkpoint: the start that saved it, ...
    name: tuple[int, ...]  # ... and its name in that start: base, descents, step, row
    part: int  # the rank that stored it

    def packed(self) -> bytes:
        body = msgpack.packb([VERSION, *self])
        assert isinstance(body, bytes)
        return ASK.pack(len(body)) + body

    @classmethod
    def of_packed(cls, body: bytes) -> Ask:
        """Raises ValueError."""
        try:
            found = msgpack.unpackb(body, use_list=True, strict_map_key=True)
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError("it is not MessagePack") from error
        if not isinstance(found, list) or found[:1] != [VERSION] or len(found) != 6:
            raise ValueError(f"it is not a question of protocol {VERSION}")
        _, token, job, start, name, part = found
        sizes = (token, TOKEN_BYTES), (start, 16)
        if not all(isinstance(one, bytes) and len(one) == size for one, size in sizes):
            raise ValueError("token or start has another size")
        if not isinstance(job, str) or not isinstance(name, list) or len(name) != NAME_FIELDS:
            raise ValueError("job or name is of another type")
        numbers = [*name, part]
        if not all(type(one) is int and 0 <= one < 1 << 63 for one in numbers):
            raise ValueError("a number is out of range")
        return cls(token, job, start, tuple(name), part)


def split(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def pieces(offset: int, length: int, payload: int, block: int) -> Sequence[tuple[int, int]]:
    """The requests for payload [offset, +length): whole blocks, PIECE_BYTES at a time."""
    step = max(PIECE_BYTES // block, 1) * block
    first = offset // block * block
    end = min(payload, -(-(offset + length) // block) * block)
    return [(at, min(step, end - at)) for at in range(first, end, step)]
