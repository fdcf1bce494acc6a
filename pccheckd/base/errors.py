"""Errors of the native core and of the system, translated for users."""

from __future__ import annotations

import errno
import os

from pccheck_native import _core, layout
from pccheck_wire.ends import fix_of
from pccheck_wire.errors import (
    CheckpointFailedError,
    DamagedError,
    InternalError,
    NoCheckpointError,
    NoStoreError,
    PccheckError,
    RefusedError,
    StorageFullError,
    StoreLockedError,
    UnreadableError,
)

SHORTAGE_HINT = (
    "raise its limits (ulimit -a; in systemd TasksMax=, LimitAS=, LimitNOFILE=, MemoryMax=)"
)
_SHORT = {
    errno.ENOMEM: "cannot allocate memory: memory limit reached",
    # The C library's answer also where the thread's stack cannot be mapped.
    errno.EAGAIN: "cannot start a thread: limit reached, of processes or of address space "
    "(ulimit -v)",
    errno.EMFILE: "cannot open a file: descriptor limit reached",
    errno.ENFILE: "cannot open a file: descriptor limit reached",
}
_NATIVE: dict[str, tuple[type[PccheckError], str, str]] = {
    "NOT_A_VOLUME": (
        DamagedError, "holds no valid commit record", "move the file away, then restart",
    ),
    "DAMAGED": (DamagedError, "is damaged", "see: pccheckctl verify"),
    "UNREADABLE": (UnreadableError, "could not be read", "check the disk: dmesg"),
    "TRUNCATED": (
        DamagedError, "is shorter than its records say",
        "stop pccheckd, restore the whole file from a copy, start pccheckd",
    ),
    "REMOVED": (CheckpointFailedError, "was removed or moved away while it was open", ""),
    "REPLACED": (CheckpointFailedError, "was replaced by another file while it was open", ""),
    "OLDER_FORMAT": (
        RefusedError, f"has volume format 1 or 2, and this version reads {_core.FORMAT_VERSION}",
        "read it with the pccheck that wrote it, or move the file away",
    ),
    "NEWER_FORMAT": (
        RefusedError,
        f"has a newer volume format than {_core.FORMAT_VERSION}, which this version reads",
        "upgrade pccheck",
    ),
    "UNKNOWN_FLAG": (
        RefusedError,
        "has a checkpoint with a flag that a newer version wrote, and that must be understood",
        "upgrade pccheck",
    ),
    "FOREIGN_BASE": (
        RefusedError, "has a checkpoint of which a part lies in another volume", "upgrade pccheck",
    ),
    "LOCKED": (StoreLockedError, "is open in another process", "end that process first"),
    "NO_SLOT": (CheckpointFailedError, "has no free slot", "use more --slots"),
    "TOO_LARGE": (
        CheckpointFailedError, "has slots smaller than this checkpoint", "register the new size",
    ),
    "STOPPED": (CheckpointFailedError, "could not write a commit record", "check the disk"),
    "NO_MEMORY": (RefusedError, "got no DRAM: the budget is in use", "raise --dram"),
    "NO_DRIVER": (RefusedError, "found no CUDA driver", "trainers push GPU tensors"),
    "DEVICE": (CheckpointFailedError, "failed at the GPU driver", "see the kernel's log: dmesg"),
    "UNSUPPORTED": (
        NoStoreError, "cannot use direct I/O: its file system or the kernel has none",
        "use a local ext4 or xfs disk; --allow-any-filesystem overrides this for tests",
    ),
}  # fmt: skip


def translated(error: BaseException, what: str) -> PccheckError:
    """A native or kernel error as a PccheckError; `what` is its subject."""
    if isinstance(error, PccheckError):
        return error
    if isinstance(error, _core.NativeError):
        kind, text, hint = _NATIVE.get(error.code_name, (InternalError, error.code_name, ""))
        return kind(f"{what} {text}", hint=hint)
    if isinstance(error, layout.MisplacedError):
        return RefusedError(error.message, hint=layout.MISPLACED_HINTS[error.code_name])
    if words := shortage(error):
        return CheckpointFailedError(f"{what}: {words}", hint=SHORTAGE_HINT)
    if isinstance(error, OSError):
        if error.errno == errno.ENOTCONN:  # the core's word for a session that is detached
            return CheckpointFailedError("the session has ended, or the daemon is stopping")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFullError(f"{what}: no space left on the disk")
        if error.errno == errno.ENOENT:
            return NoCheckpointError(f"{error.filename or what} does not exist")
        place = f": {error.filename}" if error.filename and str(error.filename) not in what else ""
        why = f"{what}{place}: {error.strerror or error}"
        return CheckpointFailedError(why, hint=fix_of(error.errno or 0, os.geteuid()))
    return InternalError(f"{what}: {type(error).__name__}", hint="see the daemon's log")


def shortage(error: BaseException) -> str:
    """Which limit of the system the daemon has reached; "" for another error."""
    if isinstance(error, MemoryError):
        return _SHORT[errno.ENOMEM]
    if isinstance(error, RuntimeError):
        return _SHORT[errno.EAGAIN] if "start new thread" in str(error) else ""
    return _SHORT.get(error.errno or 0, "") if isinstance(error, OSError) else ""
