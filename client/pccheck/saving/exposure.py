"""How GPU tensors reach the daemon: it pulls them out of exposed memory, or the link pushes them.

Pull is tried first. Memory is exposed again when addresses, or the memory behind them, changed, and
after a pulled copy failed. (A daemon whose driver fails again and again refuses.) After a
refusal this connection pushes. When the reason may pass (a full GPU, a slow driver), pull is tried
again after 10 checkpoints, then after 20, and so on. When memory is short, torch's allocator first
frees what it does not use.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from pccheck.daemon.connection import Connection
from pccheck.state import devices
from pccheck.state.extents import DevicePart
from pccheck.warn import LOG
from pccheck_native import Link, NativeError
from pccheck_wire.codec import PIECE_BYTES, PIECES_MAX
from pccheck_wire.errors import (
    DaemonUnreachableError,
    DeviceError,
    PccheckError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Chose, Expose

#: Staging memory per GPU for tensors that no gate guards, unless snapshot="device" asked for more.
STAGING_BYTES_MAX = 512 << 20
#: The daemon accepts reasons of this length.
REASON_LENGTH_MAX = 200
_T = TypeVar("_T")
_TOO_MANY = (
    "the state lies in more than 262144 separate pieces of GPU memory, or in more than 16384 "
    "allocations; use fewer and larger tensors"
)


#: Checkpoints until the first time, which doubles with every refusal up to the last one.
RETRY_AFTER, RETRY_AFTER_MAX = 10, 640


class NoStagingError(DeviceError):
    """The GPU has no memory for the copy that has to be made there first."""


class Retry:
    """When to try again what was refused: a moment without memory is no reason for weeks."""

    def __init__(self) -> None:
        self._distance = RETRY_AFTER
        self._left = 0

    def refused(self) -> None:
        self._left = self._distance
        self._distance = min(2 * self._distance, RETRY_AFTER_MAX)

    def due(self) -> bool:
        """Asked once a checkpoint: whether it is time."""
        self._left -= 1
        return self._left <= 0


@dataclass(frozen=True, slots=True)
class Handover:
    """The device part of a snapshot as link and daemon take it."""

    part: DevicePart
    ranges: bytes
    map: int  # of the exposure that the daemon pulls by; 0: the link pushes

    def enqueue(self, link: Link, snapshot: int) -> None:
        """Stages what needs it, and marks the snapshot's place in the training streams."""
        part = self.part
        for device in part.devices:
            stream = devices.current_stream(device)
            aside = part.aside.get(device, b"")
            if device in part.staged:
                link.stage(device, stream, part.staged[device])
            if aside:
                link.stage(device, stream, aside, aside=True)
            link.mark(snapshot, device, stream, pull=self.map > 0, aside=bool(aside))


@dataclass(slots=True)
class _Tie:
    """What one connection has agreed on."""

    connection: Connection
    refused: str  # why this connection pushes; "" while it pulls
    for_good: bool  # no later try on this connection will end in another way
    retry: Retry = field(default_factory=Retry)
    opened: set[int] = field(default_factory=set)
    map: int = 0
    ranges: bytes = b""  # what is exposed; b"" when nothing is, or that is not certain
    kept: list[object] = field(default_factory=list)  # the memory that is exposed
    announced: tuple[str, str] | None = None
    staging: dict[int, int] = field(default_factory=dict)
    outgrown: bool = False  # there is staging memory that nothing new uses


class Exposure:
    """Decides between pull and push, and keeps the exposure up to date. Training thread only."""

    def __init__(self, transfer: str, stall_limit_s: float) -> None:
        self._transfer = transfer
        self._stall_limit_s = stall_limit_s
        self._tie: _Tie | None = None

    def prepare(
        self, connection: Connection, part: DevicePart, *, queued: bool = False
    ) -> Handover:
        """Readies GPUs, staging memory and the exposure.

        `queued`: a snapshot that the daemon will pull has no slot yet. The exposure that it names
        stays as it is, and what does not fit into it is pushed, this once. Raises
        DeviceError, NoStagingError, and what a request raises when the daemon does not
        answer.
        """
        tie = self._tie_to(connection)
        if tie.refused and not (tie.for_good or queued) and tie.retry.due():
            tie.refused = ""
        try:
            self._open(tie, part)
            staging = _staging(connection.link, part)
            ranges = part.ranges(staging)
            fits = not tie.refused and ranges == tie.ranges and connection.link.exposure_holds()
            if not (tie.refused or fits or queued):
                self._expose(tie, part, ranges)
                fits = True
            if tie.refused and tie.kept and not queued:
                self._withdraw(tie)
        except NativeError as error:
            raise DeviceError(f"cannot copy the GPU tensors: {error}") from error
        except (ValueError, OSError) as error:
            if isinstance(error, PccheckError) or connection.alive():
                raise
            raise connection.gone() from error
        self._announce(tie)
        if staging != tie.staging:
            tie.outgrown = tie.outgrown or bool(tie.staging)
            tie.staging = staging
        if not (tie.refused or fits) and self._transfer == "pull":
            raise DeviceError(
                'transfer="pull" is not available: tensors were replaced while an earlier '
                "checkpoint waits for a slot",
                hint='use transfer="auto", or start pccheckd with more --slots',
            )
        return Handover(part, ranges, 0 if tie.refused or not fits else tie.map)

    def capturing(self) -> bool:
        """Whether a CUDA graph is recorded on a stream that trains."""
        if devices.capturing():
            return True
        tie = self._tie
        try:
            return tie is not None and any(
                tie.connection.link.capturing(device, devices.current_stream(device))
                for device in tie.opened
            )
        except (NativeError, ValueError, OSError):  # closed: there is nothing to protect
            return False

    def broke(self) -> None:
        """The daemon failed a pulled snapshot half-way, perhaps for a stale handle: everything is
        exposed again."""
        if self._tie is not None:
            self._tie.ranges = b""

    def trim(self) -> None:
        """Frees outgrown staging memory, when no snapshot is being read."""
        tie = self._tie
        if tie is not None and tie.outgrown:
            tie.outgrown = False
            with contextlib.suppress(ValueError, OSError):
                tie.connection.link.staging_trim()

    def forget(self) -> None:
        """The connection has ended."""
        self._tie = None

    def _tie_to(self, connection: Connection) -> _Tie:
        if self._tie is None or self._tie.connection is not connection:
            welcome = connection.welcome
            later = self._transfer != "push" and welcome.transfer_later
            self._tie = _Tie(connection, self._known_obstacle(connection), not later)
            if self._tie.refused:
                self._tie.retry.refused()
        return self._tie

    def _known_obstacle(self, connection: Connection) -> str:
        if self._transfer == "push":
            return 'the client has transfer="push"'
        welcome = connection.welcome
        if welcome.transfer != "pull":
            return welcome.transfer_reason or "this daemon cannot pull"
        return ""

    def _open(self, tie: _Tie, part: DevicePart) -> None:
        for device in part.devices:
            if device in tie.opened:
                continue
            reason = tie.connection.link.device_open(device)
            tie.opened.add(device)
            if reason:
                tie.refused, tie.for_good = tie.refused or f"GPU {device}: {reason}", True

    def _expose(self, tie: _Tie, part: DevicePart, ranges: bytes) -> None:
        connection = tie.connection
        tie.ranges = b""
        before, tie.kept = tie.kept, [tie.kept, part.owners]
        try:
            data = _with_room(lambda: connection.link.expose(ranges, part.nbytes), part)
        except (NativeError, OSError) as error:  # no handle, or no memory for the probe
            too_many = isinstance(error, NativeError) and error.code_name == "TOO_LARGE"
            _refuse(tie, _TOO_MANY if too_many else str(error), isinstance(error, NativeError))
            tie.kept = before  # the earlier exposure stays
            return
        try:
            _with_room(lambda: self._send(tie, data), part)
        except (WaitTimeoutError, DaemonUnreachableError):
            raise
        except PccheckError as error:
            _refuse(tie, error.message, not error.retryable)
            tie.kept = []
        else:
            tie.ranges, tie.kept = ranges, part.owners

    def _send(self, tie: _Tie, data: bytes) -> None:
        tie.map += 1
        for message in _messages(tie.map, data):
            if message.more:
                tie.connection.post(message)  # the last one's answer is that of all
            else:
                tie.connection.request(message, timeout_s=self._stall_limit_s)

    def _withdraw(self, tie: _Tie) -> None:
        """Ends the exposure: the daemon unmaps the memory, and then it is released here."""
        tie.map += 1
        try:
            tie.connection.request(Expose(tie.map, []), timeout_s=self._stall_limit_s)
        except WaitTimeoutError:  # tried again at the next checkpoint
            raise
        except PccheckError:  # an empty exposure is refused, and replaces the one before
            pass
        tie.kept = []

    def _announce(self, tie: _Tie) -> None:
        """Reports a new choice. Raises DeviceError when it is push and the client has
        transfer="pull"."""
        choice = ("push", tie.refused) if tie.refused else ("pull", "")
        if choice != tie.announced:
            tie.announced = choice
            tie.connection.post(Chose(choice[0], _printable(choice[1])))
            LOG.info("GPU tensors go by %s%s", choice[0], f": {choice[1]}" if choice[1] else "")
        if tie.refused and self._transfer == "pull":
            reason = tie.refused  # tried again with the next checkpoint
            tie.refused = self._known_obstacle(tie.connection)
            tie.opened.clear()  # finds again what a GPU lacks
            raise DeviceError(
                f'transfer="pull" is not available: {reason}',
                hint='use transfer="auto", which pushes instead',
            )


def _refuse(tie: _Tie, reason: str, for_good: bool) -> None:
    tie.refused, tie.for_good = reason, for_good
    tie.retry.refused()


def _with_room(work: Callable[[], _T], part: DevicePart) -> _T:
    """Does it, and a second time when GPU memory is short, after torch freed what it can."""
    try:
        return work()
    except (
        MemoryError,
        OSError,
        DeviceError,
    ) as error:  # the last: of the daemon
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
    for device in part.devices:
        devices.empty_cache(device)
    return work()


def _staging(link: Link, part: DevicePart) -> dict[int, int]:
    """The addresses of staging memory, on every GPU that needs some."""
    made: dict[int, int] = {}
    for device, nbytes in part.staging_bytes.items():
        if nbytes > STAGING_BYTES_MAX and not part.all_staged:
            raise NoStagingError(
                f"GPU {device} has {nbytes >> 20} MiB of tensors without a gate, more than the "
                f"{STAGING_BYTES_MAX >> 20} MiB that are copied on the GPU first"
            )
        try:
            made[device] = _with_room(partial(link.staging, device, nbytes), part)
        except MemoryError as error:
            raise NoStagingError(
                f"GPU {device} has no {nbytes >> 20} MiB free for a copy on the GPU", retryable=True
            ) from error
    return made


def _messages(number: int, data: bytes) -> Iterator[Expose]:
    step = PIECES_MAX * PIECE_BYTES
    for at in range(0, len(data), step):
        end = min(at + step, len(data))
        pieces = [data[i : min(i + PIECE_BYTES, end)] for i in range(at, end, PIECE_BYTES)]
        yield Expose(number, pieces, more=end < len(data))


def _printable(text: str) -> str:
    line = "".join(c if c.isprintable() else " " for c in text)
    return line[:REASON_LENGTH_MAX]
