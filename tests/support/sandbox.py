"""Forbids system calls, as a sandbox does. As a program: runs pccheckd under what pccheckd.service
forbids, without systemd: its system calls, writable memory that becomes executable, new privileges,
and root.

    python -m tests.support.sandbox NUMBER,NUMBER,... FLAG...
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import stat
import struct
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_HEADERS = (
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/aarch64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm-generic/unistd.h"),
)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_MDWE = 38, 22, 65
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_CAP_DAC_READ_SEARCH, _CAPABILITY_VERSION = 2, 0x20080522
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000


def numbers() -> dict[str, int]:
    """The system calls that this machine's header knows; empty without one."""
    header = next((path for path in _HEADERS if path.exists()), None)
    found = re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text()) if header else []
    return {name: int(number) for name, number in found}


def allowed(unit: Path) -> set[str]:
    """What the SystemCallFilter= lines of a unit leave, by systemd's own lists."""
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    sets: dict[str, list[str]] = {}
    for line in listed.splitlines():
        if line.startswith("@"):
            members = sets.setdefault(line.strip(), [])
        elif line.startswith("    ") and not line.lstrip().startswith("#"):
            members.append(line.strip())

    def names(word: str) -> set[str]:
        if not word.startswith("@"):
            return {word}
        return {name for member in sets[word] for name in names(member)}

    left = names("@default")
    for rule in re.findall(r"(?m)^SystemCallFilter=(.*)$", unit.read_text()):
        meant = {name for word in rule.lstrip("~").split() for name in names(word)}
        left = left - meant if rule.startswith("~") else left | meant
    return left | names("@default")


def _filter(named: list[int], then: int, otherwise: int) -> bytes:
    """`then` for the calls that are named."""

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    steps = [
        step(_LOAD, 0, 0, 4),  # the architecture
        step(_EQUALS, 1, 0, _AUDIT_ARCH[platform.machine()]),
        step(_RETURN, 0, 0, _KILL),
        step(_LOAD, 0, 0, 0),  # the number
    ]
    for number in named:
        steps += [step(_EQUALS, 0, 1, number), step(_RETURN, 0, 0, then)]
    return b"".join([*steps, step(_RETURN, 0, 0, otherwise)])


def _apply(steps: bytes) -> None:
    """To this thread, and to threads and processes that it starts."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    program = ctypes.create_string_buffer(steps)
    header = struct.pack("@HP", (len(program) - 1) // 8, ctypes.addressof(program))
    if prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def forbid(number: int) -> None:
    """From now on that system call ends with EPERM."""
    _apply(_filter([number], _EPERM, _ALLOW))


def _become_nobody(libc: ctypes.CDLL) -> None:
    """If the interpreter is in root's home, the process keeps the capability to read every file,
    because the daemon starts further processes. It keeps no other capability."""
    places = (Path(sys.executable).resolve(), Path(sys.prefix), Path(__file__))
    closed = any(not up.stat().st_mode & stat.S_IXOTH for place in places for up in place.parents)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kept = 1 << _CAP_DAC_READ_SEARCH if closed else 0
    capabilities = struct.pack("6I", kept, kept, kept, 0, 0, 0)
    if libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), capabilities) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    if closed:
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)


def main() -> int:
    from tests.support import as_user

    permitted = [int(number) for number in sys.argv[1].split(",")]
    as_user.import_all("pccheckd")  # the other user may have no access to these directories
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        _become_nobody(libc)
    libc.prctl(_PR_SET_MDWE, 1, 0, 0, 0)  # Linux 6.3; without it the rest still counts
    _apply(_filter(permitted, _ALLOW, _EPERM))
    from pccheckd.cli import main as serve

    return serve(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
