"""What passes between the daemon and a peer server: a question, and what is answered or may be read
then. Imported by both sides, so it imports almost nothing."""

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

    @classmethod
    def of_packed(cls, answer: bytes, descriptor: int) -> Self | bytes:
        """Or a document that is to be sent as it is. Raises RefusedGrantError."""
        found = msgpack.unpackb(answer, use_list=True)
        if isinstance(found, str):
            raise RefusedGrantError(found)
        if isinstance(found, bytes):
            return found
        path, sequence, wall_ns = found
        return cls(path, sequence, wall_ns, descriptor)


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
