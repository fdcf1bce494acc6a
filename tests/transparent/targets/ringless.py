"""`python -m tests.transparent.targets.ringless COMMAND`: runs the command where io_uring_setup is
an unknown system call, as kernel.io_uring_disabled=2 does for a whole machine. The store of
torchrun has a ring even with UV_USE_IO_URING=0, and no CRIU can dump a ring."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

IO_URING_SETUP = 425  # on all architectures
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    instructions = (
        (_LOAD, 0, 0, 0), (_EQUAL, 0, 1, IO_URING_SETUP), (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_RETURN, 0, 0, _ALLOW),
    )  # fmt: skip
    code = b"".join(struct.pack("HBBI", *one) for one in instructions)
    program = _Program(len(instructions), code)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    )
    if done:
        raise OSError(ctypes.get_errno(), "seccomp")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
