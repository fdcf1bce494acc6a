"""The payloads of a checkpoint whose parts lie on other nodes: read from their peer servers over
TLS 1.3 (`pccheck_native/nodes/peer.py`), each block checked against the manifest, whose digest that
node has offered in the job's store. Bytes go straight to where they are wanted."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import threading
import time
from collections.abc import Callable, Sequence

from pccheck_native.nodes import peer
from pccheck_native.tls import BusyError, LeftError
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError, PccheckError
from pccheck_wire.messages import FarNode, Opened
from pccheck_wire.units import MIB

from .errors import PartUnreachableError
from .loads import DaemonPayloads
from .streams import Stream, WantedRanges

#: Connections that read one part at the same time.
STREAMS = 3
#: How long a reader tries while the server has as many connections as it takes.
BUSY_LIMIT_S, BUSY_PAUSE_S = 90.0, 1.0
#: A node that is slower than this is given up, if there is another copy.
SLOW_BYTES_PER_S = 8 << 20
SLOW_AFTER_S = 5.0


class _Copy:
    """A part on one node, and the connections that read it and are not in use."""

    def __init__(self, node: FarNode, ask: peer.Ask, digest: bytes) -> None:
        self.node, self._ask, self._digest = node, ask, digest
        self._idle: list[Stream] = []
        self._lock = threading.Lock()

    def take(self, *, waits: bool = True) -> Stream:
        """`waits`: as long as the server is busy. Raises LeftError."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        deadline_s = time.monotonic() + (BUSY_LIMIT_S if waits else 0)
        while True:
            try:
                return Stream(self.node, self._ask, self._digest)
            except BusyError:
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
        self, copy: _Copy, wanted: WantedRanges, pieces: Sequence[tuple[int, int]], *, is_last: bool
    ) -> None:
        """`is_last`: there is no other copy, however slow this one is."""
        self.failed: LeftError | None = None
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
        except LeftError as error:
            self.failed = self.failed or error
        for helper in helpers:
            helper.join()
        return sorted([*self._left, *self._lost])

    def _help(self) -> None:
        """If the server takes one more connection."""
        with contextlib.suppress(LeftError):
            self._work(self._copy.take(waits=False))

    def _work(self, stream: Stream) -> None:
        while (piece := self._next()) is not None:
            try:
                stream.place(*piece, self._wanted, self._arrived)
            except LeftError as error:
                self.failed = self.failed or error
                self._lost.append(piece)
                stream.close()
                return
        self._copy.give_back(stream)

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            return self._left.pop() if self._left and self.failed is None else None

    def _arrived(self, nbytes: int) -> None:
        """Raises LeftError when all streams together are slow."""
        with self._lock:
            self._read += nbytes
            passed_s = time.monotonic() - self._began_s
        if not self._is_last and passed_s >= SLOW_AFTER_S:
            rate = self._read / passed_s
            if rate < SLOW_BYTES_PER_S:
                raise LeftError(f"it sends only {rate / MIB:.1f} MiB/s")


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

    def packed_tree(self, rank: int) -> bytearray:
        payload_bytes, offset, nbytes, _ = self.facts(rank)
        if not 0 < nbytes <= tree.TREE_BYTES_MAX or offset + nbytes > payload_bytes:
            raise DamagedError(f"a tree of {nbytes} bytes at {offset}")
        packed = bytearray(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(packed))
        self.read_into(rank, offset, nbytes, struct.pack("<QQQ", address, offset, nbytes))
        return packed

    def tree(self, rank: int) -> tree.Tree:
        return tree.decode(memoryview(self.packed_tree(rank)), self.facts(rank)[1])

    def read_into(
        self, rank: int, offset: int, length: int, ranges: bytes, device_ranges: bytes = b""
    ) -> None:
        assert not device_ranges
        if not length:
            return
        began_s = time.monotonic()
        payload_bytes, _, _, block_bytes = self.facts(rank)
        left = peer.pieces(offset, length, payload_bytes, block_bytes)
        failures, wanted = list[str](), WantedRanges(ranges)
        while left:
            copies = self._copies[rank]
            if not copies:
                raise self._none_left(rank, failures)
            is_last = len(copies) == 1 and len(self._opened.copies) < 2
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

    def facts(self, rank: int) -> tuple[int, int, int, int]:
        """Of the first copy that can be reached, as `Stream.facts`. All copies of a part have the
        same tree and payload."""
        failures: list[str] = []
        if rank in self._known:
            return self._known[rank]
        while copies := self._copies.get(rank):
            try:
                stream = copies[0].take()
            except LeftError as error:
                failures.append(self._leave(rank, error))
                continue
            copies[0].give_back(stream)
            self.wall_ns = max(self.wall_ns, stream.wall_ns)
            self._known[rank] = stream.facts
            return stream.facts
        raise self._none_left(rank, failures)

    def _leave(self, rank: int, why: LeftError) -> str:
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
        why = "; ".join(failures) or "no node that has it can be read from"
        return PartUnreachableError(
            f"the part of rank {rank} of step {step} cannot be read from another node: {why}",
            hint="try again (restore(): on all ranks); the error then names what can be restored"
            if "damaged" in why
            else "check that pccheckd runs there, and that its --listen address can be reached "
            "from this node; then try again (restore(): on all ranks)",
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

    def packed_tree(self, rank: int) -> bytes | bytearray:
        return self._of(rank).packed_tree(rank)

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
