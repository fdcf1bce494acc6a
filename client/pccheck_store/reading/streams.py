"""Connections to the peer servers of other nodes, over TLS 1.3 (`pccheck_native/nodes/peer.py`). A
server is known by its certificate, and this process by the job's token there."""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import socket
import ssl
import struct
from collections.abc import Callable

from pccheck_native import NativeError, _core
from pccheck_native.nodes import peer
from pccheck_native.nodes.holding import Holding
from pccheck_wire.messages import FarNode

CONNECT_LIMIT_S = 10.0
#: A node that sends nothing for so long is given up; the reader tries another copy.
SILENT_LIMIT_S = 30.0


class LeftError(Exception):
    """Another copy is to be tried; why."""


class BusyError(LeftError):
    """The server takes no more connections now."""


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


class _Asked:
    """A connection that has asked one question, and its answer."""

    def __init__(self, node: FarNode, ask: peer.Ask, most: int) -> None:
        """`most`: the bytes that an answer may have. Raises LeftError."""
        self._socket = _connected(node)
        try:
            self._socket.sendall(ask.packed())
            self.first = self._exactly(self._head(most))
        except LeftError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise _gone(error) from error

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

    def _exactly(self, nbytes: int) -> bytearray:
        found = bytearray()
        while len(found) < nbytes:  # never more memory than what has arrived
            data = self._socket.recv(min(nbytes - len(found), 1 << 20))
            if not data:
                raise ConnectionResetError("the connection ended")
            found += data
        return found


class Stream(_Asked):
    """One connection, which reads one part."""

    def __init__(self, node: FarNode, ask: peer.Ask, digest: bytes) -> None:
        """Raises LeftError."""
        super().__init__(node, ask, peer.MANIFEST_BYTES_MAX)
        try:
            if len(self.first) < peer.WALL.size:
                raise LeftError("it sent no manifest")
            (self.wall_ns,) = peer.WALL.unpack_from(self.first)
            self.manifest = bytes(memoryview(self.first)[peer.WALL.size :])
            #: The bytes of the payload, the tree's place and bytes, the bytes of a block.
            self.facts = _core.manifest_facts(self.manifest, digest)
        except NativeError as error:
            self.close()
            raise LeftError("its manifest is not the one that it offered") from error
        except LeftError:
            self.close()
            raise
        self.first = bytearray(0)
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
            raise LeftError(_words(error)) from error

    def _doubt(self, offset: int, length: int) -> str:
        """Has the server check blocks that do not match; what it says."""
        try:
            self._socket.sendall(peer.REQUEST.pack(offset | peer.DOUBTED, length))
            _, nbytes = peer.ANSWER.unpack(self._exactly(peer.ANSWER.size))
            return self._text(nbytes)
        except OSError as error:
            return _words(error)

    def _fill(self, view: memoryview, arrived: Callable[[int], None]) -> None:
        at = 0
        while at < len(view):
            count = self._socket.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("the connection ended")
            at += count
            arrived(count)


def _connected(node: FarNode) -> ssl.SSLSocket:
    """To the first address where this node's certificate is. Raises LeftError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint tells
    failed, busy = [], None
    for address in node.addresses:
        try:
            plain = socket.create_connection(peer.split(address), CONNECT_LIMIT_S)
        except (OSError, ValueError) as error:
            failed.append(f"{address}: {_words(error)}")
            continue
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = context.wrap_socket(plain, suppress_ragged_eofs=False)
        except (OSError, ValueError) as error:
            plain.close()
            failed.append(f"{address}: {_words(error)}")
            busy = _gone(error) if _ended(error) else busy
            continue
        shown = stream.getpeercert(binary_form=True) or b""
        if hashlib.sha256(shown).digest() == node.fingerprint:
            stream.settimeout(SILENT_LIMIT_S)
            return stream
        stream.close()
        failed.append(f"{address}: another node, or another daemon, answers there")
    raise busy or LeftError("; ".join(failed) or "it has no address")


def _gone(error: Exception) -> LeftError:
    """Of a connection before its first answer: a server that has too many ends the connection."""
    return (BusyError if _ended(error) else LeftError)(_words(error))


def _ended(error: Exception) -> bool:
    """The server has ended the connection."""
    return isinstance(error, (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError))


def holding(node: FarNode, job: str) -> Holding:
    """What a node holds of a job. Raises LeftError."""
    asked = _Asked(node, peer.Ask(node.token, job), peer.HOLDING_BYTES_MAX)
    asked.close()
    try:
        return Holding.of_packed(bytes(asked.first))
    except ValueError as error:
        raise LeftError(f"its answer cannot be read: {error}") from error


def reaches(host: str, addresses: list[str], fingerprint: bytes) -> str:
    """Why this process cannot read from a node; "": it can, or at least shows itself there."""
    try:
        _connected(FarNode(host, addresses, fingerprint, b"")).close()
    except LeftError as error:
        return str(error)
    return ""


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error) or type(error).__name__
