"""What a helper may do, set by the helper itself before it reads a byte of a user: the user's id,
few open files, little memory, no new rights, and nothing of the file system.
Imports little, since there is a process per user."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import framing

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446  # on every architecture
_LANDLOCK_VERSION = 1  # flag of the first
_ALL_FILE_RIGHTS, _ALL_NET_RIGHTS, _ALL_SCOPES = (1 << 13) - 1, 3, 3


def run(main: Callable[[list[str]], None]) -> None:
    """The whole life of a helper's program; the daemon reads the last words."""
    try:
        main(sys.argv[1:])
    except BaseException as error:
        kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
        print(f"{kind}{error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # without clearing up: there is nothing to save, and a library might wait


class HelperArguments(NamedTuple):
    """The arguments of a helper's program."""

    uid: int
    gid: int
    listeners: list[int]  # descriptors of listening sockets
    link: int  # frames for the daemon, and its answers
    hand: int  # files that the daemon gives; -1: it gives none
    own: list[str]

    @classmethod
    def of(cls, arguments: list[str]) -> HelperArguments:
        """Exits if another version was installed since the daemon started."""
        if arguments[:1] != [str(framing.VERSION)]:
            sys.exit("another version of pccheckd was installed: restart the daemon")
        uid, gid, listeners, link, hand, *own = arguments[1:]
        places = [int(one) for one in listeners.split(",")]
        return cls(int(uid), int(gid), places, int(link), int(hand), own)


def confine(uid: int, gid: int, *, files_max: int, address_space_bytes: int) -> None:
    """Before threads start: what is set here holds for those that are made later."""
    with (
        contextlib.suppress(OSError),  # it goes first when memory is short
        Path("/proc/self/oom_score_adj").open("wb", buffering=0) as file,
    ):
        file.write(b"500")
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, files_max)
    limit(resource.RLIMIT_AS, address_space_bytes)
    # An attacker who breaks in gains no new rights. A container of one user may forbid setgroups().
    if os.geteuid() == 0 and uid != 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # forgotten when the uid changes
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _deny_files(libc)


def limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(which, (most, most))


def _deny_files(libc: ctypes.CDLL) -> None:
    """Landlock, where the kernel has it (5.13; all of this since 6.12): no file, no TCP of its own,
    no signal to others and no look into them, which counts where this process keeps the daemon's
    uid."""
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    if version < 1:
        return
    words = [_ALL_FILE_RIGHTS]
    if version >= 4:
        words.append(_ALL_NET_RIGHTS)
    if version >= 6:
        words.append(_ALL_SCOPES)
    rules = struct.pack(f"={len(words)}Q", *words)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset >= 0:
        libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)
