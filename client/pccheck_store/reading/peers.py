"""The payloads of a checkpoint whose parts lie on other nodes: read from their peer servers over
TLS 1.3 (`pccheck_native/nodes/peer.py`), each block checked against the manifest, whose digest that
node has offered in the job's store. Bytes go straight to where they are wanted."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import hashlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

from pccheck_native import NativeError, _core
from pccheck_native.nodes import peer
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError, PccheckError
from pccheck_wire.messages import FarNode, Opened
from pccheck_wire.units import MIB

from .errors import PartUnreachableError
from .loads import DaemonPayloads

#: Connections that read one part at the same time.
STREAMS = 3
#: How long a reader tries while the server has as many connections as it takes.
BUSY_LIMIT_S, BUSY_PAUSE_S = 90.0, 1.0
CONNECT_LIMIT_S = 10.0
#: A node that sends nothing for so long is given up; the reader tries another copy.
SILENT_LIMIT_S = 30.0
#: The same for a node that is slower than this, if there is another copy.
SLOW_BYTES_PER_S = 8 << 20
SLOW_AFTER_S = 5.0


class _LeftError(Exception):
    """Another copy is to be tried; why."""


class _BusyError(_LeftError):
    """The server takes no more connections now."""


class _Wanted:
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


class Stream:
    """One connection, which reads one part."""

    def __init__(self, node: FarNode, ask: peer.Ask, digest: bytes) -> None:
        """Raises _LeftError."""
        self._socket = _connected(node)
        try:
            self._socket.sendall(ask.packed())
            first = self._exactly(self._head(peer.MANIFEST_BYTES_MAX))
            if len(first) < peer.WALL.size:
                raise _LeftError("it sent no manifest")
            (self.wall_ns,) = peer.WALL.unpack_from(first)
            self.manifest = bytes(memoryview(first)[peer.WALL.size :])
            #: The bytes of the payload, the tree's place and bytes, the bytes of a block.
            self.facts = _core.manifest_facts(self.manifest, digest)
        except NativeError as error:
            self.close()
            raise _LeftError("its manifest is not the one that it offered") from error
        except _LeftError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise _gone(error) from error
        self._buffer = bytearray(0)

    def place(
        self, offset: int, length: int, wanted: _Wanted, arrived: Callable[[int], None]
    ) -> None:
        """Reads whole blocks, and copies the wanted bytes to their places. Calls `arrived` with the
        number of bytes, whenever some have come. Raises _LeftError."""
        try:
            self._socket.sendall(peer.REQUEST.pack(offset, length))
            if self._head(length) != length:
                raise _LeftError("it sent another number of bytes")
            straight = wanted.memory(offset, length)
            if straight is None and len(self._buffer) < length:
                self._buffer = bytearray(length)
            view = memoryview(self._buffer)[:length] if straight is None else straight
            self._fill(view, arrived)
            left = wanted.packed if straight is None else b""
            _core.manifest_place(self.manifest, view, offset, left)
        except NativeError as error:
            raise _LeftError(f"what it sent is damaged: {self._doubt(offset, length)}") from error
        except OSError as error:
            raise _LeftError(_words(error)) from error

    def close(self) -> None:
        self._socket.close()

    def _doubt(self, offset: int, length: int) -> str:
        """Has the server check blocks that do not match; what it says."""
        try:
            self._socket.sendall(peer.REQUEST.pack(offset | peer.DOUBTED, length))
            _, nbytes = peer.ANSWER.unpack(self._exactly(peer.ANSWER.size))
            return self._text(nbytes)
        except OSError as error:
            return _words(error)

    def _head(self, most: int) -> int:
        """How many bytes follow. Raises _LeftError with what the server says instead."""
        said, nbytes = peer.ANSWER.unpack(self._exactly(peer.ANSWER.size))
        if said != peer.OK:
            raise (_BusyError if said == peer.BUSY else _LeftError)(self._text(nbytes))
        if nbytes > most:
            raise _LeftError("its answer is too long")
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

    def _fill(self, view: memoryview, arrived: Callable[[int], None]) -> None:
        at = 0
        while at < len(view):
            count = self._socket.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("the connection ended")
            at += count
            arrived(count)


def _connected(node: FarNode) -> ssl.SSLSocket:
    """To the first address where this node's certificate is. Raises _LeftError."""
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
    raise busy or _LeftError("; ".join(failed) or "it has no address")


def _gone(error: Exception) -> _LeftError:
    """Of a connection before its first answer: a server that has too many ends the connection."""
    return (_BusyError if _ended(error) else _LeftError)(_words(error))


def _ended(error: Exception) -> bool:
    """The server has ended the connection."""
    return isinstance(error, (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError))


def reaches(host: str, addresses: list[str], fingerprint: bytes) -> str:
    """Why this process cannot read from a node; "": it can, or at least shows itself there."""
    try:
        _connected(FarNode(host, addresses, fingerprint, b"")).close()
    except _LeftError as error:
        return str(error)
    return ""


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error) or type(error).__name__


class _Copy:
    """A part on one node, and the connections that read it and are not in use."""

    def __init__(self, node: FarNode, ask: peer.Ask, digest: bytes) -> None:
        self.node, self._ask, self._digest = node, ask, digest
        self._idle: list[Stream] = []
        self._lock = threading.Lock()

    def take(self, *, waits: bool = True) -> Stream:
        """`waits`: as long as the server is busy. Raises _LeftError."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        deadline_s = time.monotonic() + (BUSY_LIMIT_S if waits else 0)
        while True:
            try:
                return Stream(self.node, self._ask, self._digest)
            except _BusyError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(random.uniform(0.05, BUSY_PAUSE_S))  # not all at once again

    def give_back(self, stream: Stream) -> None:
        with self._lock:
            self._idle.append(stream)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()


class _Reading:
    """Pieces of one copy, read by several threads."""

    def __init__(
        self, copy: _Copy, wanted: _Wanted, pieces: Sequence[tuple[int, int]], *, is_last: bool
    ) -> None:
        """`is_last`: there is no other copy, however slow this one is."""
        self.failed: _LeftError | None = None
        self._copy, self._wanted, self._is_last = copy, wanted, is_last
        self._left = list(reversed(pieces))
        self._lost: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._began_s, self._read = time.monotonic(), 0

    def run(self) -> list[tuple[int, int]]:
        """What was not read."""
        count = min(STREAMS, len(self._left))
        helpers = [
            threading.Thread(target=self._help, name="pccheck-peer", daemon=True)
            for _ in range(count - 1)
        ]
        for helper in helpers:
            helper.start()
        try:
            self._work(self._copy.take())
        except _LeftError as error:
            self.failed = self.failed or error
        for helper in helpers:
            helper.join()
        return sorted([*self._left, *self._lost])

    def _help(self) -> None:
        """If the server takes one more connection."""
        with contextlib.suppress(_LeftError):
            self._work(self._copy.take(waits=False))

    def _work(self, stream: Stream) -> None:
        while (piece := self._next()) is not None:
            try:
                stream.place(*piece, self._wanted, self._arrived)
            except _LeftError as error:
                self.failed = self.failed or error
                self._lost.append(piece)
                stream.close()
                return
        self._copy.give_back(stream)

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            return self._left.pop() if self._left and self.failed is None else None

    def _arrived(self, nbytes: int) -> None:
        """Raises _LeftError when all streams together are slow."""
        with self._lock:
            self._read += nbytes
            passed_s = time.monotonic() - self._began_s
        if not self._is_last and passed_s >= SLOW_AFTER_S:
            rate = self._read / passed_s
            if rate < SLOW_BYTES_PER_S:
                raise _LeftError(f"it sends only {rate / MIB:.1f} MiB/s")


class PeerPayloads:
    """See `source.Payloads`; it does not fill memory of GPUs. Raises PartUnreachableError, too."""

    reaches_gpus = False

    def __init__(self, job: str, opened: Opened, note: Callable[[str], None]) -> None:
        """Calls `note` with a sentence whenever it gives up a copy and reads another one."""
        self.read_bytes = 0
        self.read_s = 0.0
        self.wall_ns = 0  #: when what was read became durable
        self._opened, self._note = opened, note
        self._known: dict[int, tuple[int, int, int, int]] = {}  # facts, by rank
        self._copies = {
            part.rank: [
                _Copy(opened.nodes[at], _ask(job, opened, part.rank, opened.nodes[at]), digest)
                for at, digest in zip(part.nodes, part.digests, strict=True)
            ]
            for part in opened.far
        }

    @property
    def ranks(self) -> list[int]:
        return sorted(self._copies)

    def tree(self, rank: int) -> tree.Tree:
        payload_bytes, offset, nbytes, _ = self._facts(rank)
        if not 0 < nbytes <= tree.TREE_BYTES_MAX or offset + nbytes > payload_bytes:
            raise DamagedError(f"a tree of {nbytes} bytes at {offset}")
        packed = bytearray(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(packed))
        self.read_into(rank, offset, nbytes, struct.pack("<QQQ", address, offset, nbytes))
        return tree.decode(memoryview(packed), offset)

    def read_into(
        self, rank: int, offset: int, length: int, ranges: bytes, device_ranges: bytes = b""
    ) -> None:
        assert not device_ranges
        if not length:
            return
        began_s = time.monotonic()
        payload_bytes, _, _, block_bytes = self._facts(rank)
        left = peer.pieces(offset, length, payload_bytes, block_bytes)
        failures, wanted = list[str](), _Wanted(ranges)
        while left:
            copies = self._copies[rank]
            if not copies:
                raise self._none_left(rank, failures)
            is_last = len(copies) == 1 and not self._opened.others
            reading = _Reading(copies[0], wanted, left, is_last=is_last)
            left = reading.run()
            if reading.failed is not None and left:
                failures.append(self._leave(rank, reading.failed))
        self.close()  # other ranks want connections, too
        self.read_bytes += length
        self.read_s += time.monotonic() - began_s

    def close(self) -> None:
        for copies in self._copies.values():
            for copy in copies:
                copy.close()

    def _facts(self, rank: int) -> tuple[int, int, int, int]:
        """Of the first copy that can be reached, as `Stream.facts`. All copies of a part have the
        same tree and payload."""
        failures: list[str] = []
        if rank in self._known:
            return self._known[rank]
        while copies := self._copies.get(rank):
            try:
                stream = copies[0].take()
            except _LeftError as error:
                failures.append(self._leave(rank, error))
                continue
            copies[0].give_back(stream)
            self.wall_ns = max(self.wall_ns, stream.wall_ns)
            self._known[rank] = stream.facts
            return stream.facts
        raise self._none_left(rank, failures)

    def _leave(self, rank: int, why: _LeftError) -> str:
        copy = self._copies[rank].pop(0)
        copy.close()
        text = f"host {copy.node.host}: {why}"
        if self._copies[rank]:
            self._note(
                f"the part of rank {rank} of step {self._opened.step} is read from host "
                f"{self._copies[rank][0].node.host}, and no longer from {text}"
            )
        return text

    def _none_left(self, rank: int, failures: Sequence[str]) -> PccheckError:
        step = self._opened.step
        why = "; ".join(failures) or "its nodes could not be read from before"
        return PartUnreachableError(
            f"the part of rank {rank} of step {step} cannot be read from another node: {why}",
            hint="restart all ranks: the error then names what can be restored"
            if "damaged" in why
            else "check that pccheckd runs there, and that its --listen address can be reached "
            "from this node; then restart all ranks",
        )


def _ask(job: str, opened: Opened, rank: int, node: FarNode) -> peer.Ask:
    return peer.Ask(node.token, job, opened.start, tuple(opened.name), rank)


class GatheredPayloads:
    """See `source.Payloads`: the parts that the daemon of this node has, and those of other
    nodes."""

    reaches_gpus = False

    def __init__(self, near: DaemonPayloads, far: PeerPayloads) -> None:
        self._near, self._far = near, far
        self.rank = near.rank  #: the one whose state was opened
        self.ranks = sorted({*near.parts, *far.ranks})

    @property
    def origin(self) -> str:
        return "peer" if self._far.read_bytes else self._near.origin

    @property
    def wall_ns(self) -> int:
        return self._far.wall_ns

    def __str__(self) -> str:
        """For a log."""
        far = self._far
        return f"read {far.read_bytes / MIB:.1f} MiB from other nodes in {far.read_s:.2f} s"

    def tree(self, rank: int) -> tree.Tree:
        return self._of(rank).tree(rank)

    def read_into(
        self, rank: int, offset: int, length: int, ranges: bytes, device_ranges: bytes = b""
    ) -> None:
        self._of(rank).read_into(rank, offset, length, ranges, device_ranges)

    def close(self) -> None:
        self._near.close()
        self._far.close()

    def _of(self, rank: int) -> DaemonPayloads | PeerPayloads:
        return self._far if rank in self._far.ranks else self._near
