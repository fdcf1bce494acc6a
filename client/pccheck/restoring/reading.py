"""Reads checkpoints through the daemon: the newest valid one, and the one before on damage."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pccheck.daemon.connection import Connection, RequestLostError
from pccheck.state.extents import Range, devices_of, pack
from pccheck.warn import LOG
from pccheck_native import NativeError, _core
from pccheck_wire import tree
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    DamagedError,
    DeviceError,
    NoCheckpointError,
    PccheckError,
    UnreadableError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Empty, Open, Opened, Part, Read, Skipped, Writing
from pccheck_wire.parts import merge, spans, split
from pccheck_wire.units import MIB

OPEN_LIMIT_S = 120.0
#: A restore waits while earlier checkpoints are written, as long as more of them is written;
#: pccheckd reports every few seconds how much that is.
STUCK_LIMIT_S = 120.0
_READ_LIMIT_S = 60.0
_BUSY_PAUSE_S = 0.01
_SLOWEST_BYTES_PER_S = 16 << 20
#: How often the opened checkpoint may be replaced by newer ones before it was read.
_ATTEMPTS = 8
_GONE = -errno.ENOENT
#: The link's own copy failed.
_DEVICE = (_core.E_NO_DRIVER, _core.E_DEVICE, _core.E_DEVICE_LOST, _core.E_BAD_HANDLE)


#: Of a read: sequence, offset, length, rank.
_Place = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What `restore()` did. Falsy when the volume was read and holds nothing."""

    step: int = 0
    sequence: int = 0
    source: str = ""  # "dram" or "volume"
    #: Damaged ones, and those that the disk could not read: step and reason.
    skipped: list[Skipped] = field(default_factory=list)
    metadata: Any = None

    def __bool__(self) -> bool:
        return self.sequence > 0

    def __repr__(self) -> str:
        if not self:
            return f"<{type(self).__name__}: nothing to restore>"
        steps = ", ".join(str(item.step) if item.sequence else "unknown" for item in self.skipped)
        skipped = f" skipped=[{steps}]" if steps else ""
        return f"<{type(self).__name__} step={self.step} source={self.source}{skipped}>"


@dataclass(frozen=True, slots=True, repr=False)
class Found(RestoreResult):
    """What `recover()` found; `state` has the structure that was saved."""

    state: Any = None


class _GoneError(NoCheckpointError):
    """Newer checkpoints became durable, and took its slot."""


def _key(item: Skipped) -> tuple[int, str]:
    return item.sequence, "" if item.sequence else item.reason


def read_newest(
    connection: Connection,
    step: int | None,
    use: Callable[[Payload, tree.Tree], Any],
    *,
    any_world_size: bool = False,
) -> tuple[Found, tuple[Opened, tree.Tree] | None]:
    """Opens checkpoints, newest first, until `use` succeeds without damage or a read error: what
    it returns is the state that was found.

    If newer checkpoints replace the one that is open, the newest is opened instead. Also returns
    what was opened; None when the volume holds nothing. Raises NoCheckpointError when checkpoints
    exist, but none is valid.
    """
    skipped: dict[tuple[int, str], Skipped] = {}
    before: int | None = None
    attempts = _ATTEMPTS
    failed: DamagedError | UnreadableError | None = None
    while True:
        try:
            opened, refusal = _open(connection, Open(step, before, any_world_size))
        except PccheckError as error:
            if failed is None:
                raise
            reasons = "; ".join(
                f"step {i.step}: {i.reason}" if i.sequence else i.reason for i in skipped.values()
            )
            raise type(failed)(f"{reasons}; {error.message}", hint=error.hint) from error
        skipped.update({_key(item): item for item in opened.skipped})
        if isinstance(opened, Empty):
            if step is not None or before is not None:
                raise NoCheckpointError(
                    f"there is no valid checkpoint of step {step}", hint="see: pccheckctl list"
                )
            return Found(skipped=list(skipped.values())), None
        payload = Payload(connection, opened)
        try:
            described = payload.read_tree()
            if refusal is not None and not (described.sharded() or described.shared()):
                raise refusal
            used = use(payload, described)
        except _GoneError:
            attempts -= 1
            if not attempts:
                raise
            continue
        except (DamagedError, UnreadableError) as error:
            damaged = Skipped(opened.sequence, opened.step, error.message)
            skipped[_key(damaged)] = damaged
            before, failed = opened.sequence, error
            continue
        return Found(
            opened.step, opened.sequence, opened.source,
            sorted(skipped.values(), key=lambda item: -item.sequence),
            tree.plain(described.metadata), used,
        ), (opened, described)  # fmt: skip


def _open(connection: Connection, wanted: Open) -> tuple[Opened | Empty, NoCheckpointError | None]:
    """Also returns why the daemon refused another number of ranks. The refusal counts for state
    that each rank stores for itself; sharded and replicated state can be read by any number."""
    try:
        return ask_open(connection, wanted), None
    except NoCheckpointError as refusal:
        if wanted.any_world_size:
            raise
        with contextlib.suppress(PccheckError):
            opened = ask_open(connection, replace(wanted, any_world_size=True))
            if isinstance(opened, Opened):  # a refusal never becomes "nothing is there"
                return opened, refusal
        raise


def ask_open(connection: Connection, wanted: Open) -> Opened | Empty:
    """The answer, once what was copied is written. Raises WaitTimeoutError when nothing more is
    written."""
    before: Writing | None = None
    progress_s = time.monotonic()
    while True:
        answer = connection.request(wanted, timeout_s=OPEN_LIMIT_S)
        if isinstance(answer, (Opened, Empty)):
            return answer
        assert isinstance(answer, Writing)
        written, total = answer.total_bytes - answer.left_bytes, answer.total_bytes
        how_far = (
            f"pccheckd is still writing step {answer.step}: {written / MIB:.0f} of "
            f"{total / MIB:.0f} MiB of {answer.checkpoints} checkpoints"
        )
        if answer != before:
            before, progress_s = answer, time.monotonic()
        elif time.monotonic() - progress_s >= STUCK_LIMIT_S:
            raise WaitTimeoutError(
                f"{how_far}, and nothing was written for {STUCK_LIMIT_S:g} s",
                hint="check the disk (pccheckctl status, dmesg), then restore again; do not "
                "restart pccheckd, which has the copied checkpoints in memory",
            )
        LOG.warning("PCcheck: restore() waits: %s", how_far)


class Payload:
    """An opened checkpoint: its tree, and the bytes in front of it, of every rank that stores a
    part of them. Methods raise DamagedError when a block does not match its checksum,
    UnreadableError when the disk cannot read it, DeviceError when a GPU fails, _GoneError when
    newer checkpoints replaced it, and WaitTimeoutError and DaemonUnreachableError."""

    def __init__(self, connection: Connection, opened: Opened) -> None:
        self.opened = opened
        self._connection = connection
        self._own = Part(
            opened.rank or 0, opened.payload_bytes, opened.tree_offset, opened.tree_bytes
        )

    def read_tree(self) -> tree.Tree:
        """The tree, with the places of what other ranks store."""
        own = self._tree_of(self._own)
        return merge(own, self._own.rank, lambda rank: self._tree_of(self._part(rank)))

    def others(self) -> dict[int, tree.Tree]:
        """The trees of the other ranks that have saved this checkpoint."""
        ranks = (part for part in self.opened.parts if part.rank != self._own.rank)
        return {part.rank: self._tree_of(part) for part in ranks}

    def load(self, ranges: bytes, device_ranges: bytes = b"") -> None:
        """Fills packed ranges of host and of device memory, rank by rank. Long gaps between the
        ranges are not read."""
        for rank, (host, gpus) in sorted(split(ranges, device_ranges).items()):
            for offset, length, some, some_gpus in spans(host, gpus):
                self._read(self._part(rank), offset, length, some, some_gpus)

    def _part(self, rank: int) -> Part:
        """The payload of a rank; -1 is the opened one."""
        if rank in (-1, self.opened.rank):
            return self._own
        for part in self.opened.parts:
            if part.rank == rank:
                return part
        raise DamagedError(
            f"step {self.opened.step} is not complete: the part of rank {rank} is missing"
        )

    def _tree_of(self, part: Part) -> tree.Tree:
        end = part.tree_offset + part.tree_bytes
        if not 0 < part.tree_bytes <= tree.TREE_BYTES_MAX or end > part.payload_bytes:
            raise DamagedError(f"a tree of {part.tree_bytes} bytes at {part.tree_offset}")
        buffer = torch.empty(part.tree_bytes, dtype=torch.uint8, device="cpu")
        target = pack([Range(buffer.data_ptr(), part.tree_offset, part.tree_bytes)])
        self._read(part, part.tree_offset, part.tree_bytes, target, b"")
        return tree.decode(buffer.numpy().tobytes(), part.tree_offset)

    def _read(
        self, part: Part, offset: int, length: int, ranges: bytes, device_ranges: bytes
    ) -> None:
        connection, step = self._connection, self.opened.step
        limit_s = _READ_LIMIT_S + length / _SLOWEST_BYTES_PER_S
        place = self.opened.sequence, offset, length, part.rank
        try:
            code = _transfer_again(connection, place, ranges, device_ranges, limit_s)
        except TimeoutError as error:
            if isinstance(error, PccheckError):
                raise
            raise WaitTimeoutError(
                f"reading {length} bytes of step {step} took longer than {limit_s:.0f} s",
                hint="check the disk (pccheckctl status, dmesg), then restore again",
            ) from error
        except NoCheckpointError:
            code = _GONE
        except NativeError as error:
            raise DeviceError(f"cannot copy the checkpoint to a GPU: {error}") from error
        except (ConnectionError, ValueError) as error:
            raise connection.gone() from error
        if code == _GONE:
            raise _GoneError(
                f"newer checkpoints replaced step {step} while it was read",
                hint="restore again when fewer checkpoints are saved",
            )
        if code == _core.E_DAMAGED:
            raise DamagedError("the data does not match its checksums")
        if code == _core.E_UNREADABLE:
            raise UnreadableError("the disk could not read the data")
        if code in _DEVICE:
            raise DeviceError(f"cannot copy the checkpoint to a GPU (code {code})")
        if code != 0:
            raise DaemonUnreachableError(f"the daemon could not read step {step} (code {code})")


def _transfer_again(
    connection: Connection, place: _Place, ranges: bytes, device_ranges: bytes, limit_s: float
) -> int:
    """Begins again when the request was lost on its way to the daemon."""
    deadline_ns = time.monotonic_ns() + int(limit_s * 1e9)
    while True:
        read = Read(next(connection.loads), *place)
        try:
            return _transfer(connection, read, ranges, device_ranges, deadline_ns)
        except RequestLostError:
            if time.monotonic_ns() >= deadline_ns:
                raise


def _transfer(
    connection: Connection, read: Read, ranges: bytes, device_ranges: bytes, deadline_ns: int
) -> int:
    """The native result of reading into the ranges."""
    try:
        for device in devices_of(device_ranges):
            connection.link.device_open(device)
        connection.link.load_start(read.load, ranges, device_ranges)
        _request(connection, read)
        code = int(connection.link.load_wait(read.load, deadline_ns))
    except BaseException:
        connection.load_broken_off = True
        with contextlib.suppress(OSError, ValueError):
            connection.link.load_wait(read.load, 1)  # a late answer writes nothing
        raise
    connection.load_broken_off = code in _DEVICE  # ended here: the daemon may still be reading
    return code


def _request(connection: Connection, read: Read) -> None:
    """Makes the daemon read. After a read that Ctrl-C ended it may be busy for a while."""
    deadline = time.monotonic() + _READ_LIMIT_S
    while True:
        try:
            connection.request(read, timeout_s=_READ_LIMIT_S)
            return
        except CheckpointFailedError:  # the channel is busy
            if not connection.load_broken_off or time.monotonic() >= deadline:
                raise
            time.sleep(_BUSY_PAUSE_S)
