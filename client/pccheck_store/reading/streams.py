"""Connections to the peer servers of other nodes, over TLS 1.3 (`pccheck_native/nodes/peer.py`). A
server is known by its certificate, and this process by the job's token there."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import math
import struct
import time
from collections.abc import Callable
from typing import TypeVar

from pccheck_native import NativeError, _core, tls
from pccheck_native.nodes import peer
from pccheck_native.nodes.holding import Holding
from pccheck_native.tls import BusyError, LeftError
from pccheck_wire.messages import FarNode

_T = TypeVar("_T")

#: For an answer that is not a part; the node may send slowly.
ASKED_LIMIT_S = 60.0


class WantedRanges:
    """Ranges of memory that are to be filled."""

    def __init__(self, ranges: bytes) -> None:
        self.packed = ranges
        self._items = list(struct.iter_unpack("<QQQ", ranges))
        self._ends = [begin + nbytes for _, begin, nbytes in self._items]

    def memory(self, offset: int, length: int) -> memoryview | None:
        """Where these bytes go, if all of them go to one place: no copy is made. They are checked
        there: a restore that fails has changed the state anyway."""
        at = bisect.bisect_right(self._ends, offset)
        if at == len(self._items):
            return None
        address, begin, nbytes = self._items[at]
        if begin > offset or offset + length > begin + nbytes:
            return None
        memory = (ctypes.c_char * length).from_address(address + offset - begin)
        return memoryview(memory).cast("B")


class _Connection:
    """To a peer server, for one question."""

    def __init__(self, node: FarNode) -> None:
        """Raises LeftError."""
        self._socket = tls.connected(node.addresses, node.fingerprint)

    def answer(self, ask: peer.Ask, most: int, limit_s: float = math.inf) -> bytearray:
        """At most `most` bytes. Raises LeftError."""
        deadline_s = time.monotonic() + limit_s
        try:
            self._socket.sendall(ask.packed())
            return self._exactly(self._head(most), deadline_s)
        except OSError as error:
            raise tls.gone(error) from error

    def close(self) -> None:
        self._socket.close()

    def _head(self, most: int) -> int:
        """How many bytes follow. Raises LeftError with what the server says instead."""
        said, nbytes = peer.ANSWER.unpack(self._exactly(peer.ANSWER.size))
        if said != peer.OK:
            raise (BusyError if said == peer.BUSY else LeftError)(self._text(nbytes))
        if nbytes > most:
            raise LeftError("its answer is too long")
        return int(nbytes)

    def _text(self, nbytes: int) -> str:
        text = bytes(self._exactly(min(nbytes, peer.TEXT_BYTES_MAX))).decode(errors="replace")
        return "".join(c if c.isprintable() else "?" for c in text) or "it refused"

    def _exactly(self, nbytes: int, deadline_s: float = math.inf) -> bytearray:
        found = bytearray()
        while len(found) < nbytes:  # never more memory than what has arrived
            if time.monotonic() > deadline_s:
                raise TimeoutError
            data = self._socket.recv(min(nbytes - len(found), 1 << 20))
            if not data:
                raise ConnectionResetError("the connection ended")
            found += data
        return found


class Stream(_Connection):
    """One connection, which reads one part."""

    def __init__(self, node: FarNode, ask: peer.Ask, digest: bytes) -> None:
        """Raises LeftError."""
        super().__init__(node)
        try:
            first = self.answer(ask, peer.MANIFEST_BYTES_MAX)
            if len(first) < peer.WALL.size:
                raise LeftError("it sent no manifest")
            (self.wall_ns,) = peer.WALL.unpack_from(first)
            self.manifest = bytes(memoryview(first)[peer.WALL.size :])
            #: The bytes of the payload, the tree's place and bytes, the bytes of a block.
            self.facts = _core.manifest_facts(self.manifest, digest)
        except NativeError as error:
            self.close()
            raise LeftError("its manifest is not the one that it offered") from error
        except LeftError:
            self.close()
            raise
        self._buffer = bytearray(0)

    def place(
        self, offset: int, length: int, wanted: WantedRanges, arrived: Callable[[int], None]
    ) -> None:
        """Reads whole blocks, and copies the wanted bytes to their places. Calls `arrived` with the
        number of bytes, whenever some have come. Raises LeftError."""
        try:
            self._socket.sendall(peer.REQUEST.pack(offset, length))
            if self._head(length) != length:
                raise LeftError("it sent another number of bytes")
            straight = wanted.memory(offset, length)
            if straight is None and len(self._buffer) < length:
                self._buffer = bytearray(length)
            view = memoryview(self._buffer)[:length] if straight is None else straight
            self._fill(view, arrived)
            left = wanted.packed if straight is None else b""
            _core.manifest_place(self.manifest, view, offset, left)
        except NativeError as error:
            raise LeftError(f"what it sent is damaged: {self._doubt(offset, length)}") from error
        except OSError as error:
            raise LeftError(tls.in_words(error)) from error

    def _doubt(self, offset: int, length: int) -> str:
        """Has the server check blocks that do not match; what it says."""
        try:
            self._socket.sendall(peer.REQUEST.pack(offset | peer.DOUBTED, length))
            _, nbytes = peer.ANSWER.unpack(self._exactly(peer.ANSWER.size))
            return self._text(nbytes)
        except OSError as error:
            return tls.in_words(error)

    def _fill(self, view: memoryview, arrived: Callable[[int], None]) -> None:
        at = 0
        while at < len(view):
            count = self._socket.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("the connection ended")
            at += count
            arrived(count)


def holding(node: FarNode, job: str) -> Holding:
    """What a node holds of a job. Raises LeftError."""
    return _asked(node, peer.Ask(node.token, job), Holding.of_packed)


def reach(node: FarNode, job: str) -> list[tuple[bytes, str]]:
    """The ids of the nodes that this one cannot read from, and why. Raises LeftError."""
    return _asked(node, peer.Ask(node.token, job, reach=True), peer.reach_of_packed)


def _asked(node: FarNode, ask: peer.Ask, read: Callable[[bytes], _T]) -> _T:
    """`read` raises ValueError."""
    with contextlib.closing(_Connection(node)) as connection:
        body = bytes(connection.answer(ask, peer.HOLDING_BYTES_MAX, ASKED_LIMIT_S))
    try:
        return read(body)
    except ValueError as error:
        raise LeftError(f"its answer cannot be read: {error}") from error
