"""Getting a checkpoint back: the newest valid one, the one before on damage, and saying so."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pccheck.daemon.connection import Connection
from pccheck.state.extents import devices_of
from pccheck.warn import LOG
from pccheck_native import NativeError
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
from pccheck_wire.messages import (
    Empty,
    Open,
    Opened,
    Part,
    Read,
    ReplyBody,
    Skipped,
    Writing,
)
from pccheck_wire.parts import merge, split

from .rebuild import Loader, state_of_tree

OPEN_LIMIT_S = 120.0
#: Checkpoints of the run before that are being written are waited for, as long as more of them is
#: written; pccheckd says every few seconds how much that is.
STUCK_LIMIT_S = 120.0
_READ_LIMIT_S = 60.0
_MIB = 1 << 20
_BUSY_PAUSE_S = 0.01
_SLOWEST_BYTES_PER_S = 16 << 20
#: How often others may be durable, and the one that was opened be gone, before it was read.
_ATTEMPTS = 8
_GONE = -errno.ENOENT
_DAMAGED, _UNREADABLE = -10001, -10018  # -PCC_E_DAMAGED, -PCC_E_UNREADABLE
_DEVICE = range(-10017, -10013)  # -PCC_E_NO_DRIVER to -PCC_E_BAD_HANDLE: a copy of the link's own


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What `restore()` did. Falsy when the volume was read and holds nothing."""

    step: int = 0
    sequence: int = 0
    source: str = ""  # "dram" or "volume"
    #: Passed over as damaged, or because the disk could not read them: step and reason.
    skipped: list[Skipped] = field(default_factory=list)
    metadata: Any = None

    def __bool__(self) -> bool:
        return self.sequence > 0

    def __repr__(self) -> str:
        if not self:
            return f"<{type(self).__name__}: nothing to restore>"
        passed = f" skipped={[item.step for item in self.skipped]}" if self.skipped else ""
        return f"<{type(self).__name__} step={self.step} source={self.source}{passed}>"


@dataclass(frozen=True, slots=True, repr=False)
class Found(RestoreResult):
    """What `recover()` found; `state` has the very structure that went in."""

    state: Any = None


class _GoneError(NoCheckpointError):
    """Newer ones became durable, and its slot was given away."""


def read_newest(
    connection: Connection,
    step: int | None,
    use: Callable[[Opened, tree.Tree], Any],
    *,
    replicated: bool = False,
) -> tuple[Opened, tree.Tree, Any, list[Skipped]] | list[Skipped]:
    """Opens checkpoints, newest first, until `use` got through one without meeting damage or what
    cannot be read.

    One that newer ones replace before it is read is no loss: they are opened. Returns what was used
    and what was passed over; a list alone when the volume holds nothing. Raises NoCheckpointError
    when there are some, but none that is valid.
    """
    skipped: dict[int, Skipped] = {}
    before: int | None = None
    attempts = _ATTEMPTS
    failed: DamagedError | UnreadableError | None = None
    while True:
        try:
            opened = ask_open(connection, Open(step, before, replicated))
        except PccheckError as error:
            if failed is not None:
                raise type(failed)(
                    f"{_said(skipped.values())}; and then: {error.message}", hint=error.hint
                ) from error
            raise
        if isinstance(opened, (Opened, Empty)):
            skipped.update({item.sequence: item for item in opened.skipped})
        if isinstance(opened, Empty):
            if step is not None or before is not None:
                raise NoCheckpointError(f"there is no valid checkpoint of step {step}")
            return list(skipped.values())
        assert isinstance(opened, Opened)
        try:
            described = _read_tree(connection, opened)
            used = use(opened, described)
        except _GoneError:
            attempts -= 1
            if not attempts:
                raise
            continue
        except (DamagedError, UnreadableError) as error:
            skipped[opened.sequence] = Skipped(opened.sequence, opened.step, error.message)
            before, failed = opened.sequence, error
            continue
        return opened, described, used, sorted(skipped.values(), key=lambda item: -item.sequence)


def ask_open(connection: Connection, wanted: Open) -> ReplyBody:
    """The answer, once what was copied is written. Raises WaitTimeoutError when writing stands
    still."""
    before: Writing | None = None
    moved = time.monotonic()
    while True:
        answer = connection.request(wanted, timeout_s=OPEN_LIMIT_S)
        if not isinstance(answer, Writing):
            return answer
        written, total = answer.total_bytes - answer.left_bytes, answer.total_bytes
        how_far = (
            f"pccheckd is still writing step {answer.step}: {written / _MIB:.0f} of "
            f"{total / _MIB:.0f} MiB of {answer.checkpoints} checkpoints"
        )
        if answer != before:
            before, moved = answer, time.monotonic()
        elif time.monotonic() - moved >= STUCK_LIMIT_S:
            raise WaitTimeoutError(
                f"{how_far}; nothing was written for {STUCK_LIMIT_S:g} s",
                hint="look at the disk (pccheckctl status, dmesg), then try again; what was copied "
                "is in pccheckd's memory: do not restart it",
            )
        LOG.warning("restore waits: %s", how_far)


def _said(skipped: Iterable[Skipped]) -> str:
    return "; ".join(f"step {item.step}: {item.reason}" for item in skipped)


def whole_state(connection: Connection) -> Callable[[Opened, tree.Tree], Any]:
    """For `read_newest`: the state as a value."""

    def use(opened: Opened, described: tree.Tree) -> Any:
        return state_of_tree(described, payload_loader(connection, opened))

    return use


def payload_loader(connection: Connection, opened: Opened) -> Loader:
    """Loads what lies in front of the trees into packed ranges of host and of device memory, in one
    streaming pass for every rank that stores a part of it."""

    def load(ranges: bytes, device_ranges: bytes = b"") -> None:
        if not opened.parts:
            if ranges or device_ranges:
                own = _part(opened, -1)
                _read(connection, opened, own, 0, own.tree_offset, ranges, device_ranges)
            return
        for rank, (host, gpus) in sorted(split(ranges, device_ranges).items()):
            part = _part(opened, rank)
            _read(connection, opened, part, 0, part.tree_offset, host, gpus)

    return load


def _part(opened: Opened, rank: int) -> Part:
    """The payload of a rank; -1 is the opened one."""
    if rank in (-1, opened.rank):
        own = 0 if opened.rank is None else opened.rank
        return Part(own, opened.payload_bytes, opened.tree_offset, opened.tree_bytes)
    for part in opened.parts:
        if part.rank == rank:
            return part
    raise DamagedError(f"step {opened.step} is not complete: the part of rank {rank} is missing")


def _read_tree(connection: Connection, opened: Opened) -> tree.Tree:
    """With the places of what other ranks store."""
    own = _tree_of(connection, opened, _part(opened, -1))
    return merge(
        own, opened.rank or 0, lambda rank: _tree_of(connection, opened, _part(opened, rank))
    )


def _tree_of(connection: Connection, opened: Opened, part: Part) -> tree.Tree:
    end = part.tree_offset + part.tree_bytes
    if not 0 < part.tree_bytes <= tree.TREE_BYTES_MAX or end > part.payload_bytes:
        raise DamagedError(f"a tree of {part.tree_bytes} bytes at {part.tree_offset}")
    room = torch.empty(part.tree_bytes, dtype=torch.uint8, device="cpu")  # whatever the default
    target = b"".join(
        number.to_bytes(8, "little")
        for number in (room.data_ptr(), part.tree_offset, part.tree_bytes)
    )
    _read(connection, opened, part, part.tree_offset, part.tree_bytes, target)
    return tree.decode(room.numpy().tobytes(), part.tree_offset)


def _read(
    connection: Connection,
    opened: Opened,
    part: Part,
    offset: int,
    length: int,
    ranges: bytes,
    device_ranges: bytes = b"",
) -> None:
    """Raises DamagedError when a block does not fit its checksum, UnreadableError when the disk
    does not give it, DeviceError when a GPU fails, _GoneError when it was replaced."""
    code = _transfer(connection, opened, part, offset, length, ranges, device_ranges)
    if code == _GONE:
        raise _GoneError(
            f"the checkpoint of step {opened.step} was replaced by newer ones while it was read",
            hint="try again when fewer are being saved",
        )
    if code == _DAMAGED:
        raise DamagedError(f"the data of step {opened.step} does not fit its checksums")
    if code == _UNREADABLE:
        raise UnreadableError(f"the data of step {opened.step} could not be read from the disk")
    if code in _DEVICE:
        raise DeviceError(f"the checkpoint could not be copied to a GPU (code {code})")
    if code != 0:
        raise DaemonUnreachableError(f"the daemon could not read the checkpoint (code {code})")


def _transfer(
    connection: Connection,
    opened: Opened,
    part: Part,
    offset: int,
    length: int,
    ranges: bytes,
    device_ranges: bytes,
) -> int:
    """The native result of reading a part into the ranges. Raises WaitTimeoutError,
    DeviceError, DaemonUnreachableError."""
    load = connection.next_load()
    limit_s = _READ_LIMIT_S + length / _SLOWEST_BYTES_PER_S
    deadline_ns = time.monotonic_ns() + int(limit_s * 1e9)
    try:
        try:
            for device in devices_of(device_ranges):
                connection.link.device_open(device)
            connection.link.load_start(load, ranges, device_ranges)
            _ask(connection, Read(load, opened.sequence, offset, length, part.rank))
            code = int(connection.link.load_wait(load, deadline_ns))
        except BaseException:
            connection.load_broken_off = True
            _cancel(connection, load)
            raise
        connection.load_broken_off = code in _DEVICE  # ended here: the daemon may still be at it
        return code
    except TimeoutError as error:
        if isinstance(error, PccheckError):
            raise
        raise WaitTimeoutError(
            f"reading {length} bytes took longer than {limit_s:.0f} s"
        ) from error
    except NoCheckpointError:
        return _GONE
    except NativeError as error:
        raise DeviceError(f"the checkpoint could not be put on a GPU: {error}") from error
    except (ConnectionError, ValueError) as error:
        raise connection.gone() from error


def _ask(connection: Connection, read: Read) -> None:
    """Has the daemon read; what Ctrl-C broke off may keep it busy for a while."""
    deadline = time.monotonic() + _READ_LIMIT_S
    while True:
        try:
            connection.request(read, timeout_s=_READ_LIMIT_S)
            return
        except CheckpointFailedError:  # the channel is busy
            if not connection.load_broken_off or time.monotonic() >= deadline:
                raise
            time.sleep(_BUSY_PAUSE_S)


def _cancel(connection: Connection, load: int) -> None:
    """Makes sure that a late answer writes nothing."""
    with contextlib.suppress(OSError, ValueError):
        connection.link.load_wait(load, 1)
