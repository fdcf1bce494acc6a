"""What passes between the daemon and a peer server: a reader's question, and the answer (a file,
bytes to send, or a refusal). Imported by both sides, so it imports almost nothing."""

from __future__ import annotations

from typing import NamedTuple, Self

import msgpack  # type: ignore[import-untyped]


class RefusedGrantError(Exception):
    """The daemon's words for who asked."""


class ReadGrant(NamedTuple):
    """A part that a connection may read. The file comes by the hand of the helper."""

    path: str
    sequence: int
    wall_ns: int
    descriptor: int  # open for reading

    def packed(self) -> bytes:
        return _packed([self.path, self.sequence, self.wall_ns])


def answer_of(packed: bytes, descriptor: int) -> ReadGrant | bytes:
    """What the daemon has answered: a part to read, or bytes that are sent as they are. Raises
    RefusedGrantError."""
    found = msgpack.unpackb(packed, use_list=True)
    if isinstance(found, str):
        raise RefusedGrantError(found)
    if isinstance(found, bytes):
        return found
    path, sequence, wall_ns = found
    return ReadGrant(path, sequence, wall_ns, descriptor)


def refusal(words: str) -> bytes:
    return _packed(words)


def document(content: bytes) -> bytes:
    return _packed(content)


def has_file(answer: bytes) -> bool:
    return isinstance(msgpack.unpackb(answer, use_list=True), list)


class GrantRequest(NamedTuple):
    """Of a peer server. `ask`: as the reader sent it, which the daemon checks."""

    ask: bytes
    damaged: int = 0  # the sequence of a part that was found damaged; 0: it is to be read

    def packed(self) -> bytes:
        return _packed([*self])

    @classmethod
    def of_packed(cls, request: bytes) -> Self:
        return cls(*msgpack.unpackb(request, use_list=True))


def _packed(plain: object) -> bytes:
    body = msgpack.packb(plain)
    assert isinstance(body, bytes)
    return body
