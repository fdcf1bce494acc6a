"""Readies GPU tensors for the way that `pccheck_native.transfer` chooses: the daemon pulls them out
of exposed memory, or the core pushes them.

Pull is tried first. What cannot be shared is laid out apart, and pushed beside what is pulled.
Memory is exposed again when addresses, or the memory behind them, changed, and after a pulled copy
failed. (A daemon whose driver fails again and again refuses.) Once a checkpoint was for level
"device", replicated state is exposed as a whole, for the other ranks (`Replica`). After a refusal
this connection pushes. When the reason may pass (a full GPU, a slow driver), pull is tried again
after 10 checkpoints, then after 20, and so on. When memory is short, torch's allocator first frees
what it does not use.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from pccheck.daemon.connection import Connection
from pccheck.state import devices
from pccheck.state.extents import DevicePart, Replica, unpack_device
from pccheck.warn import LOG
from pccheck_native import Client, NativeError
from pccheck_native.transfer import PULL, PUSH, Decision, chosen
from pccheck_wire.basics import size_text
from pccheck_wire.codec import PIECE_BYTES, PIECES_MAX
from pccheck_wire.ends import Why
from pccheck_wire.errors import DaemonUnreachableError, DeviceError, PccheckError, WaitTimeoutError
from pccheck_wire.messages import Chose, Expose

#: Staging memory per GPU for tensors that no gate guards, unless snapshot="device" asked for more.
STAGING_BYTES_MAX = 512 << 20
#: The daemon accepts reasons of this length.
REASON_LENGTH_MAX = 200
_T = TypeVar("_T")
#: What refuses an exposure here, by the core's code.
_OBSTACLES = {
    "TOO_LARGE": "the state lies in more than 262144 separate ranges of GPU memory, or in more "
    "than 16384 allocations or descriptors; use fewer and larger tensors",
    "BAD_HANDLE": "this GPU memory cannot be shared: its allocator gives it neither a CUDA IPC "
    "handle nor a descriptor (a memory pool, or TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0)",
}
_APART = "some GPU memory cannot be shared; from the next checkpoint on only this part is pushed"
_UNSHAREABLE, _DISTRUSTED = "cannot be shared", "pccheckd reads differently"

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
    """The device part of a snapshot as core and daemon take it."""

    part: DevicePart
    ranges: bytes
    map: int  # of the exposure that the daemon pulls by; 0: the core pushes

    def sources(self) -> tuple[bytes, int, int]:
        """As Client.submit takes them: what the core pushes, or size and GPUs that are pulled."""
        part = self.part
        if self.map:
            return part.rest, part.pulled_bytes, part.mask
        return self.ranges + part.rest, 0, 0

    def enqueue(self, native: Client, snapshot: int) -> None:
        """Stages what needs it, and marks the snapshot's place in the training streams."""
        part = self.part
        for device in part.devices:
            stream = devices.current_stream(device)
            aside = part.aside.get(device, b"")
            native.sample(snapshot, device, stream, part.unstaged)
            if device in part.staged:
                native.stage(device, stream, part.staged[device])
            if aside:
                native.stage(device, stream, aside, aside=True)
            if self.map and device in part.pulled:
                native.mark(snapshot, device, stream, pull=True, aside=bool(aside))
            if not self.map or device in part.pushed:
                native.mark(snapshot, device, stream, pull=False, aside=bool(aside))


class Exposure:
    """Keeps what one connection exposes up to date, while it pulls. Training thread only."""

    def __init__(self, connection: Connection, transfer: str, stall_limit_s: float) -> None:
        self.connection = connection
        self._transfer = transfer
        self._stall_limit_s = stall_limit_s
        self._offer = _first_offer(connection)  # the daemon's latest
        self._lacks = ""  # what a GPU lacks for pull
        self._retry = Retry()
        if self._offer.transfer != PULL:
            self._retry.refused()
        self._opened: set[int] = set()
        self._map = 0
        self._ranges = b""  # what is exposed; b"" when nothing is, or that is not certain
        self._replica = Replica()  # what is exposed for other ranks
        self.exposes_replica = True  #: False once not all of that memory could be shared
        self._kept: list[object] = []  # the memory that is exposed
        #: Addresses of memory that cannot be shared: it is laid out apart, and pushed.
        self.pushed: frozenset[int] = frozenset()
        self._why_pushed = _UNSHAREABLE
        self._mapped = False  # the daemon has the last exposure, and its runs need no descriptors
        self._announced: Decision | None = None
        self._staging: dict[int, int] = {}
        self._outgrown = False  # there is staging memory that nothing new uses

    def prepare(self, part: DevicePart, *, queued: bool = False) -> Handover:
        """Readies GPUs, staging memory and the exposure.

        `queued`: a snapshot that the daemon will pull has no slot yet. The exposure that it names
        stays as it is, and what does not fit into it is pushed, this once. Raises
        DeviceError, NoStagingError, and what a request raises when the daemon does not
        answer.
        """
        connection = self.connection
        if self._chosen().may_pass and not queued and self._retry.due():
            self._offer = Decision(PULL)
        try:
            self._open(part)
            staging = _staging(connection.native, part)
            ranges = part.ranges(staging)
            pulls = self._chosen().transfer == PULL
            if pulls and not ranges:
                pulls = self._refused(_OBSTACLES["BAD_HANDLE"], may_pass=False)
            replica = part.replica if self.exposes_replica else Replica()
            same = (ranges, replica) == (self._ranges, self._replica)
            fits = pulls and same and connection.native.exposure_holds()
            if pulls and not (fits or queued):
                fits = self._expose(part, ranges, replica)
            if not (fits or queued) and self._kept:
                self._withdraw()
        except NativeError as error:
            raise DeviceError(f"cannot copy the GPU tensors: {error}") from error
        except (ValueError, OSError) as error:
            if isinstance(error, PccheckError) or connection.alive():
                raise
            raise connection.gone() from error
        self._announce(_but_for(part, self._chosen(), self._why_pushed))
        if staging != self._staging:
            self._outgrown = self._outgrown or bool(self._staging)
            self._staging = staging
        choice = self._chosen(stale=not fits)
        self._require_demanded(choice)
        return Handover(part, ranges, self._map if choice.transfer == PULL else 0)

    def capturing(self) -> bool:
        """Whether a CUDA graph is recorded on a stream that trains."""
        try:
            return any(
                self.connection.native.capturing(device, devices.current_stream(device))
                for device in self._opened
            )
        except (NativeError, ValueError, OSError):  # closed: there is nothing to protect
            return False

    def broke(self, why: Why) -> None:
        """The daemon failed a pulled snapshot, perhaps for a stale handle: all is exposed again.
        Memory of a GPU where the daemon reads something else is pushed from then on."""
        if why.code == "OTHER_MEMORY":
            self._distrust(int(why.argument))
        self._ranges = b""
        self._mapped = False

    def trim(self) -> None:
        """Frees outgrown staging memory, when no snapshot is being read."""
        if self._outgrown:
            self._outgrown = False
            with contextlib.suppress(ValueError, OSError):
                self.connection.native.staging_trim()

    def _chosen(self, *, stale: bool = False) -> Decision:
        return chosen(self._transfer, self._offer, lacks=self._lacks, stale=stale)

    def _open(self, part: DevicePart) -> None:
        for device in part.devices:
            if device in self._opened:
                continue
            reason = self.connection.native.device_open(device)
            self._opened.add(device)
            if reason and not self._lacks:
                self._lacks = f"GPU {device}: {reason}"

    def _expose(self, part: DevicePart, ranges: bytes, replica: Replica) -> bool:
        """False when it was refused, here or by the daemon."""
        self._ranges = b""
        before, self._kept = self._kept, [self._kept, part]
        try:
            _with_room(lambda: self._send(ranges, part.pulled_bytes, replica), part)
        except (WaitTimeoutError, DaemonUnreachableError):
            raise
        except PccheckError as error:
            self._kept = []
            return self._refused(error.message, may_pass=error.retryable)
        except (NativeError, OSError) as error:  # no handle, or no memory for the probe
            code = error.code_name if isinstance(error, NativeError) else ""
            self._kept = before  # the earlier exposure stays
            if code in _OBSTACLES and replica.id:
                self.exposes_replica = False  # perhaps it is memory that other ranks store
                return self._expose(part, ranges, Replica())
            if code == "BAD_HANDLE" and self._set_apart(ranges):
                self._offer = Decision(PUSH, _APART, may_pass=True)
                return False  # the next checkpoint is laid out for it
            why = _OBSTACLES.get(code, str(error))
            return self._refused(why, may_pass=code not in _OBSTACLES)
        self._ranges, self._replica, self._mapped = ranges, replica, True
        self._kept = [part]
        return True

    def _set_apart(self, ranges: bytes) -> bool:
        """Notes what cannot be shared. False when that is nothing new, or everything, or the user
        demands pull."""
        if self._transfer == PULL:
            return False
        flags = self.connection.native.unshareable(ranges)
        places = [item.address for item, _ in unpack_device(ranges)]
        found = frozenset(p for p, flag in zip(places, flags, strict=True) if flag)
        if all(flags) or found <= self.pushed:
            return False
        self.pushed |= found
        return True

    def _distrust(self, device: int) -> None:
        """Notes what lies on this GPU, if something lies on another one. Otherwise the daemon
        refuses the next exposure, and says why."""
        exposed = list(unpack_device(self._ranges))
        found = frozenset(item.address for item, gpu in exposed if gpu == device)
        if self._transfer != PULL and len(found) < len(exposed):
            self.pushed |= found
            self._why_pushed = _DISTRUSTED

    def _send(self, ranges: bytes, nbytes: int, replica: Replica) -> None:
        data = self.connection.native.expose(
            ranges, nbytes, self._mapped, replica.id, replica.ranges, replica.shares
        )
        self._mapped = False
        self._map += 1
        sent = self._lend()
        for message in _messages(self._map, data, sent):
            if message.more:
                self.connection.post(message)  # the last one's answer is that of all
            else:
                self.connection.request(message, timeout_s=self._stall_limit_s)

    def _lend(self) -> int:
        """Sends the descriptors that the daemon needs for the exposure; how many."""
        sent = 0
        while descriptors := self.connection.native.descriptors():
            try:
                self.connection.lend(self._map, descriptors, timeout_s=self._stall_limit_s)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            sent += len(descriptors)
        return sent

    def _withdraw(self) -> None:
        """Ends the exposure: the daemon unmaps the memory, and then this process drops it."""
        self._map += 1
        self._mapped = False
        try:
            self.connection.request(Expose(self._map, []), timeout_s=self._stall_limit_s)
        except WaitTimeoutError:  # tried again at the next checkpoint
            raise
        except PccheckError:  # an empty exposure is refused, and replaces the one before
            pass
        self._kept = []

    def _announce(self, choice: Decision) -> None:
        """Reports a new choice that lasts for more than one checkpoint."""
        if choice == self._announced:
            return
        self._announced = choice
        for device in self._opened if choice.transfer == PUSH else ():
            self.connection.native.pin_for(device, later=True)  # not within the first copy
        line = "".join(c if c.isprintable() else " " for c in choice.reason)
        self.connection.post(Chose(choice.transfer, line[:REASON_LENGTH_MAX]))
        LOG.info(
            "GPU tensors go by %s%s", choice.transfer, f": {choice.reason}" if choice.reason else ""
        )

    def _require_demanded(self, choice: Decision) -> None:
        """Raises DeviceError when the choice is push and the client has transfer="pull"."""
        if choice.transfer == PULL or self._transfer != PULL:
            return
        if self._chosen().transfer == PUSH:  # tried again with the next checkpoint
            self._offer = _first_offer(self.connection)
            self._lacks = ""
            self._opened.clear()  # finds again what a GPU lacks
        raise DeviceError(f'transfer="pull" is not available: {choice.reason}', hint=choice.hint)

    def _refused(self, reason: str, *, may_pass: bool) -> bool:
        self._offer = Decision(PUSH, reason, may_pass=may_pass)
        self._retry.refused()
        return False


def _but_for(part: DevicePart, choice: Decision, what: str) -> Decision:
    """The choice, with what is pushed beside it."""
    if choice.transfer != PULL or not part.rest:
        return choice
    nbytes = sum(item.nbytes for item, _ in unpack_device(part.rest))
    why = f"{size_text(nbytes)} of GPU memory that {what} are pushed"
    return replace(choice, reason=why)


def _first_offer(connection: Connection) -> Decision:
    welcome = connection.welcome
    return Decision(welcome.transfer, welcome.transfer_reason, may_pass=welcome.transfer_later)


def _with_room(work: Callable[[], _T], part: DevicePart) -> _T:
    """Does it, and a second time when GPU memory is short, after torch freed what it can."""
    try:
        return work()
    except (MemoryError, OSError, DeviceError) as error:  # the last: of the daemon
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
    for device in part.devices:
        devices.empty_cache(device)
    return work()


def _staging(native: Client, part: DevicePart) -> dict[int, int]:
    """The addresses of staging memory, on every GPU that needs some."""
    made: dict[int, int] = {}
    for device, nbytes in part.staging_bytes.items():
        if nbytes > STAGING_BYTES_MAX and not part.all_staged:
            raise NoStagingError(
                f"GPU {device} has {nbytes >> 20} MiB of tensors without a gate, more than the "
                f"{STAGING_BYTES_MAX >> 20} MiB that are copied on the GPU first"
            )
        try:
            made[device] = _with_room(partial(native.staging, device, nbytes), part)
        except MemoryError as error:
            raise NoStagingError(
                f"GPU {device} has no {nbytes >> 20} MiB free for a copy on the GPU", retryable=True
            ) from error
    return made


def _messages(number: int, data: bytes, descriptors: int) -> Iterator[Expose]:
    step = PIECES_MAX * PIECE_BYTES
    for at in range(0, len(data), step):
        end = min(at + step, len(data))
        pieces = [data[i : min(i + PIECE_BYTES, end)] for i in range(at, end, PIECE_BYTES)]
        yield Expose(number, pieces, more=end < len(data), descriptors=descriptors)
