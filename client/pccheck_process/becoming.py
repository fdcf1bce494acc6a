"""Root asks for another user's process: this process becomes that user first, for good, so
that nothing of the image is ever another user's. It keeps the two capabilities that CRIU needs."""

from __future__ import annotations

import ctypes
import importlib
import os
import pwd
import struct
from collections.abc import Sequence

from pccheck_wire.errors import RefusedError

_SETPCAP, _CHECKPOINT_RESTORE = 8, 40
_KEPT = 1 << _SETPCAP | 1 << _CHECKPOINT_RESTORE
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_LIBC = ctypes.CDLL(None, use_errno=True)


def become(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Does nothing when this process is that user. No other thread may run yet. Raises
    RefusedError."""
    if (os.geteuid(), os.getegid()) == (uid, gid):
        return
    if os.geteuid() != 0:
        raise RefusedError(
            f"the process belongs to uid {uid}, and this command runs as uid {os.geteuid()}",
            hint="ask as that user or as root",
        )
    # What is imported late may lie where that user cannot read.
    for name in ("json", "shlex", "encodings.unicode_escape", "pccheck_store.remote"):
        importlib.import_module(name)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setresuid(uid, uid, uid)
    _keep()
    os.environ["HOME"] = "/"


def become_user(uid: int) -> None:
    """The same with the groups that the user has on this machine."""
    try:
        entry = pwd.getpwuid(uid)
        become(uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid))
    except KeyError:
        become(uid, uid, [])


def _keep() -> None:
    """The two capabilities, also over an execve."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    low, high = _KEPT & 0xFFFFFFFF, _KEPT >> 32
    data = struct.pack("<6I", low, low, low, high, high, high)
    if _LIBC.capset(header, data) != 0:
        raise _refused()
    for number in (_SETPCAP, _CHECKPOINT_RESTORE):
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number)


def _prctl(*values: int) -> None:
    padded = [ctypes.c_ulong(one) for one in [*values, 0, 0, 0, 0][1:5]]
    if _LIBC.prctl(ctypes.c_int(values[0]), *padded) != 0:
        raise _refused()


def _refused() -> RefusedError:
    return RefusedError(
        f"this root lacks a capability that CRIU needs: {os.strerror(ctypes.get_errno())}",
        hint="run it with CAP_CHECKPOINT_RESTORE and CAP_SETPCAP",
    )
