"""What the background check does in its thread: reading pieces, and what an error there says."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import struct
import threading
from pathlib import Path
from typing import Literal

import psutil

from pccheck_native import _core, layout
from pccheck_wire.units import MIB

#: What is read at once. Larger ones burden the disk for longer, smaller ones read the manifest
#: (8 bytes per MiB of payload) more often.
PIECE_BYTES = 16 * MIB

#: What was found; "recycled": a newer one took its slot, or the volume was closed.
Result = Literal["ok", "damaged", "unreadable", "recycled"]


def open_volume(path: Path, buffered: bool) -> _core.Volume:
    return _core.Volume(str(path), writable=False, allow_buffered=buffered)


def payload_of(files: list[layout.VolumeFile], buffered: bool) -> int:
    """Bytes of all checkpoints in these volumes."""
    total = 0
    for file in files:
        with (
            contextlib.suppress(OSError, _core.NativeError),
            contextlib.closing(open_volume(file.path, buffered)) as volume,
        ):
            total += sum(entry.payload_bytes for entry in volume.table() if entry.sequence)
    return total


_buffer = threading.local()


def check(volume: _core.Volume, sequence: int, offset: int, length: int) -> None:
    """Reads and verifies one piece, in the thread itself."""
    if not hasattr(_buffer, "bytes"):
        _buffer.bytes = ctypes.create_string_buffer(PIECE_BYTES)
    target = struct.pack("<QQQ", ctypes.addressof(_buffer.bytes), offset, length)
    volume.read_into(sequence, target, threads=0)


def result_of(error: BaseException) -> Result:
    """What an error of `check` says of the checkpoint; of memory that was short it says nothing."""
    if isinstance(error, _core.NativeError):
        found: dict[str, Result] = {"DAMAGED": "damaged", "UNREADABLE": "unreadable"}
        return found.get(error.code_name, "recycled")
    if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOMEM):
        return "unreadable"
    return "recycled"


def stand_back() -> None:
    """Reads of this thread come after all others, where the disk's scheduler knows an order."""
    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_IDLE)
