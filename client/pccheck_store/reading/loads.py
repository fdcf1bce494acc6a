"""The payloads of a checkpoint that a daemon has opened, through the shared memory of a session: a
trainer's or a reader's. The daemon lends chunks that are in its memory and reads the others from
the volume; the native client checks every block on its way (`pcc_client_load.c`)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import struct
import time
from collections.abc import Iterator
from typing import Protocol

from pccheck_native import NativeError, _core
from pccheck_wire import tree
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    DamagedError,
    DeviceError,
    NoCheckpointError,
    PccheckError,
    RequestLostError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Opened, Part, Read, ReplyBody, RequestBody

from .errors import damaged, recycled, unreadable

_READ_LIMIT_S = 60.0
_BUSY_PAUSE_S = 0.01
#: The core's own copy failed.
DEVICE_CODES = (_core.E_NO_DRIVER, _core.E_DEVICE, _core.E_DEVICE_LOST, _core.E_BAD_HANDLE)


def devices_of(device_ranges: bytes) -> list[int]:
    """The GPUs that packed device ranges are on."""
    return sorted({item[3] for item in struct.iter_unpack("<QQQII", device_ranges)})


class LoadSession(Protocol):
    """A session with a daemon, as far as a load needs it."""

    load_broken_off: bool  #: by Ctrl-C, or a GPU failed: the daemon may still be reading

    @property
    def native(self) -> _core.Client: ...
    @property
    def loads(self) -> Iterator[int]:
        """Their numbers."""

    def request(self, body: RequestBody, *, timeout_s: float) -> ReplyBody: ...
    def gone(self) -> PccheckError:
        """Why the session does not live any more."""


class DaemonPayloads:
    """See `source.Payloads`. Raises DeviceError, too, WaitTimeoutError, DaemonUnreachableError."""

    #: A load that is slower than this ends with WaitTimeoutError.
    slowest_bytes_per_s = 16 << 20
    reaches_gpus = True

    def __init__(self, session: LoadSession, opened: Opened) -> None:
        self.opened = opened
        self.cached_bytes = self.read_bytes = 0  #: from the daemon's memory; from the volume
        self.wall_ns = opened.wall_ns
        self._session = session
        own = Part(opened.rank, opened.payload_bytes, opened.tree_offset, opened.tree_bytes)
        self.rank = own.rank  #: the one whose state was opened
        is_far = any(one.rank == own.rank for one in opened.far)
        parts = opened.parts if is_far else (*opened.parts, own)
        self.parts = {part.rank: part for part in parts}

    @property
    def ranks(self) -> list[int]:
        """Those that have stored a part of it."""
        return sorted(self.parts)

    @property
    def origin(self) -> str:
        """Where the bytes that were read so far came from, which each chunk has decided when the
        daemon sent it (`pcc_tenant_load.c`): "dram" (its memory), "volume" or "both"."""
        if self.cached_bytes and self.read_bytes:
            return "both"
        return "dram" if self.cached_bytes else "volume"

    def packed_tree(self, rank: int) -> bytearray:
        part = self._part(rank)
        end = part.tree_offset + part.tree_bytes
        if not 0 < part.tree_bytes <= tree.TREE_BYTES_MAX or end > part.payload_bytes:
            raise DamagedError(f"a tree of {part.tree_bytes} bytes at {part.tree_offset}")
        packed = bytearray(part.tree_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(packed))
        place = part.tree_offset, part.tree_bytes
        self.read_into(rank, *place, struct.pack("<QQQ", address, *place))
        return packed

    def tree(self, rank: int) -> tree.Tree:
        return tree.decode(memoryview(self.packed_tree(rank)), self._part(rank).tree_offset)

    def read_into(
        self, rank: int, offset: int, length: int, ranges: bytes, device_ranges: bytes = b""
    ) -> None:
        self._part(rank)
        limit_s = _READ_LIMIT_S + length / self.slowest_bytes_per_s
        opened = self.opened
        try:
            code = self._load(
                (opened.sequence, offset, length, rank), ranges, device_ranges, limit_s
            )
        except TimeoutError as error:
            if isinstance(error, PccheckError):
                raise
            raise WaitTimeoutError(
                f"reading {length} bytes of step {opened.step} took longer than {limit_s:.0f} s",
                hint="check the disk (pccheckctl status, dmesg), then try again",
            ) from error
        except NoCheckpointError as error:
            raise recycled(opened.step, opened.sequence) from error
        except NativeError as error:
            raise DeviceError(f"cannot copy the checkpoint to a GPU: {error}") from error
        except (ConnectionError, ValueError) as error:
            raise self._session.gone() from error
        if code != 0:
            raise self._error_of(code, rank)

    def close(self) -> None:
        """Does nothing: the session stays open."""

    def _part(self, rank: int) -> Part:
        if rank not in self.parts:
            raise DamagedError(
                f"step {self.opened.step} is not complete: the part of rank {rank} is missing"
            )
        return self.parts[rank]

    def _error_of(self, code: int, rank: int) -> PccheckError:
        step, sequence = self.opened.step, self.opened.sequence
        if code == -errno.ENOENT:
            return recycled(step, sequence)
        if code == _core.E_DAMAGED:
            return damaged(step, sequence, rank, "the data does not match its checksums")
        if code == _core.E_UNREADABLE:
            return unreadable(step, sequence, rank)
        if code in DEVICE_CODES:
            return DeviceError(f"cannot copy the checkpoint to a GPU (code {code})")
        return DaemonUnreachableError(f"the daemon could not read step {step} (code {code})")

    def _load(
        self, place: tuple[int, int, int, int], ranges: bytes, device_ranges: bytes, limit_s: float
    ) -> int:
        """The native result. Begins again when the request was lost on its way to the daemon."""
        deadline_ns = time.monotonic_ns() + int(limit_s * 1e9)
        while True:
            read = Read(next(self._session.loads), *place)
            try:
                return self._load_once(read, ranges, device_ranges, deadline_ns)
            except RequestLostError:
                if time.monotonic_ns() >= deadline_ns:
                    raise

    def _load_once(self, read: Read, ranges: bytes, gpu_ranges: bytes, deadline_ns: int) -> int:
        session = self._session
        try:
            for device in devices_of(gpu_ranges):
                session.native.device_open(device)
            session.native.load_start(read.load, ranges, gpu_ranges)
            self._request(read)
            code = int(session.native.load_wait(read.load, deadline_ns))
            cached_bytes, read_bytes = session.native.loaded
            self.cached_bytes += cached_bytes
            self.read_bytes += read_bytes
        except BaseException:
            session.load_broken_off = True
            with contextlib.suppress(OSError, ValueError):
                session.native.load_wait(read.load, 1)  # a late answer writes nothing
            raise
        session.load_broken_off = code in DEVICE_CODES  # ended here only
        return code

    def _request(self, read: Read) -> None:
        """Makes the daemon read. After a read that Ctrl-C ended it may be busy for a while."""
        deadline = time.monotonic() + _READ_LIMIT_S
        while True:
            try:
                self._session.request(read, timeout_s=_READ_LIMIT_S)
                return
            except CheckpointFailedError:  # an earlier load is being read
                if not self._session.load_broken_off or time.monotonic() >= deadline:
                    raise
                time.sleep(_BUSY_PAUSE_S)
