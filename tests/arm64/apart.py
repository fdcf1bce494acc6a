"""Namespaces of users and mounts in which arm64 programs run: their binfmt_misc names qemu's user
mode. Nothing outside of them changes, and they end with this process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

QEMU = Path("/usr/bin/qemu-aarch64-static")
BINFMT = Path("/proc/sys/fs/binfmt_misc")
#: The head of an arm64 executable, and which bits of it count: a program or a shared object.
_MAGIC = rb"\x7fELF\x02\x01\x01" + rb"\x00" * 9 + rb"\x02\x00\xb7\x00"
_MASK = rb"\xff" * 7 + rb"\x00" + rb"\xff" * 8 + rb"\xfe" + rb"\xff" * 3
#: F: qemu is opened now, so that a chroot need not have it.
_RULE = b":pccheck-arm64:M::" + _MAGIC + b":" + _MASK + b":" + str(QEMU).encode() + b":F"
_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
BIND, RECURSIVE = 4096, 16384

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str = "", flags: int = 0) -> None:
    """Raises OSError."""
    words = (source.encode(), bytes(target), kind.encode() or None)
    if _libc.mount(*words, ctypes.c_ulong(flags), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def go() -> None:
    """Moves this process, which has one thread and belongs to root, into the namespaces. Raises
    OSError, for example on kernels before 6.7, which have one binfmt_misc for all namespaces."""
    told, tell = os.pipe()
    mapper = os.fork()  # only a process outside may map more than one user
    if mapper == 0:
        os.read(told, 1)
        for kind in ("uid", "gid"):
            Path(f"/proc/{os.getppid()}/{kind}_map").write_text("0 0 65536\n")
        os._exit(0)
    if _libc.unshare(_NEW_USERS | _NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare: user namespaces are not allowed here")
    os.write(tell, b".")
    os.waitpid(mapper, 0)
    mount("binfmt_misc", BINFMT, "binfmt_misc")
    (BINFMT / "register").write_bytes(_RULE)
