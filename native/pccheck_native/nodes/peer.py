"""What a process says to the peer server of a node, over TLS 1.3 (PROTOCOL.md, Peers). The server's
certificate is known from the job's store, and so is the token that the server asks for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from pccheck_native.nodes import plain

VERSION = 1
TOKEN_BYTES = 32
FINGERPRINT_BYTES = 32  # SHA-256 of the certificate in DER
NAME_FIELDS = 4
ASK_BYTES_MAX = 4096
TEXT_BYTES_MAX = 1024
#: What a node holds of a job.
HOLDING_BYTES_MAX = 4 << 20
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


def packed_reach(found: Sequence[tuple[bytes, str]]) -> bytes:
    """The answer to `reach`: the ids of nodes that cannot be read from, and why."""
    return plain.packed(found)


def reach_of_packed(body: bytes) -> list[tuple[bytes, str]]:
    """Raises ValueError."""
    found = plain.items(plain.unpacked(body), "nodes")
    pairs = [plain.items(one, "a node", count=2) for one in found]
    return [
        (plain.raw(node, "a node"), plain.text(why, "a reason", TEXT_BYTES_MAX))
        for node, why in pairs
    ]


class Ask(NamedTuple):
    """The first message: what is to be read. Without a start: what the node holds of the job
    (`holding.py`); or, with `reach`, which other nodes of the job this one cannot read from."""

    token: bytes
    job: str
    start: bytes = b""  # the checkpoint: the start that saved it, ...
    name: tuple[int, ...] = ()  # ... and its name in that start: base, descents, step, row
    part: int = 0  # the rank that stored it
    reach: bool = False

    def packed(self) -> bytes:
        more = self[2:5] if self.start else [True] * self.reach
        body = plain.packed([VERSION, self.token, self.job, *more])
        return ASK.pack(len(body)) + body

    @classmethod
    def of_packed(cls, body: bytes) -> Ask:
        """Raises ValueError."""
        found = plain.unpacked(body)
        if not isinstance(found, list) or found[:1] != [VERSION] or len(found) not in (3, 4, 6):
            raise ValueError(f"it is not a question of protocol {VERSION}")
        _, token, job = found[:3]
        if not isinstance(token, bytes) or len(token) != TOKEN_BYTES or not isinstance(job, str):
            raise ValueError("token or job is of another type")
        if len(found) < 6:
            return cls(token, job, reach=len(found) == 4)
        start, name, part = found[3:]
        if not isinstance(start, bytes) or len(start) != 16:
            raise ValueError("a start is 16 bytes")
        if not isinstance(name, list) or len(name) != NAME_FIELDS:
            raise ValueError("a name is of another type")
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
