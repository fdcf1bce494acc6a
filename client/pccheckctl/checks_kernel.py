"""Checks of the kernel, its limits and its clocks. They need neither daemon nor storage."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import resource
import tempfile
import time
from collections.abc import Iterator

from . import render
from .findings import Finding, ok, read, warning

FILES_WANTED = 65536
#: Descriptors of the daemon's: sockets, page, segment, watches, volume; the process that reads a
#: user's messages. A test counts them.
FILES_OF_A_TRAINER, FILES_OF_A_USER = 7, 3
MEMLOCK_WANTED = 64 << 20
MADV_COLLAPSE = 25
_STA_UNSYNC, _TIME_ERROR = 0x0040, 5
_SUSPENDED_S = 1.0
_FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")


def kernel() -> Iterator[Finding]:
    """Features that the daemon uses where it finds them."""
    release = platform.release()
    has = {
        "pidfd": _has_pidfd(),
        "MADV_COLLAPSE": _has_collapse(),
        "RWF_DSYNC": _has_dsync(),
        "memfd": hasattr(os, "memfd_create"),
    }
    lacking = [name for name, there in has.items() if not there]
    if not lacking:
        yield ok("kernel", f"Linux {release}: {', '.join(has)}")
        return
    what = {
        "pidfd": "the end of a trainer whose forked children hold its socket is noticed late",
        "MADV_COLLAPSE": "chunks may stay in small pages, which are slower to copy and to write",
        "RWF_DSYNC": "a commit record takes a write and a flush, not one synchronous write",
        "memfd": "no memory can be shared with trainers at all",
    }
    yield warning(
        "kernel", f"Linux {release} lacks {', '.join(lacking)}",
        costs="; ".join(what[name] for name in lacking),
        mend="run Linux 6.1 or newer; in a container, allow these system calls (seccomp)",
        promise="" if "memfd" not in lacking else "working at all",
    )  # fmt: skip


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _has_collapse() -> bool:
    """Whether the kernel knows the advice: where it does, it fails otherwise than by EINVAL."""
    huge = huge_page_bytes()
    with mmap.mmap(-1, 2 * huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        anchor = ctypes.c_char.from_buffer(area)
        at = (huge - ctypes.addressof(anchor) % huge) % huge
        del anchor  # or the mapping could not be closed
        area[at] = 1
        try:
            area.madvise(MADV_COLLAPSE, at, huge)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True


def huge_page_bytes() -> int:
    return int(read("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") or 2 << 20)


def _has_dsync() -> bool:
    with tempfile.TemporaryFile() as file:
        try:
            os.pwritev(file.fileno(), [b"x"], 0, os.RWF_DSYNC)
        except (OSError, AttributeError):
            return False
    return True


def limits(daemon_pid: int = 0) -> Iterator[Finding]:
    """The daemon's, where we may look; else those that it would get from this shell."""
    whose, (_, locked), (_, files) = "this shell", *_both(0)
    with contextlib.suppress(OSError, ValueError):
        if daemon_pid:
            whose, (_, locked), (_, files) = "pccheckd", *_both(daemon_pid)
    if locked == resource.RLIM_INFINITY or locked >= MEMLOCK_WANTED:
        yield ok("memlock", f"{whose} may lock {_limit(locked)} of memory")
    else:
        yield warning(
            "memlock", f"{whose} may lock {_limit(locked)} of memory",
            costs="GPU drivers may refuse to pin chunks",
            mend="ulimit -l unlimited; as a service: LimitMEMLOCK=infinity",
        )  # fmt: skip
    if files == resource.RLIM_INFINITY or files >= FILES_WANTED:
        yield ok("open files", f"{whose} may open {_limit(files, count=True)}")
    else:
        yield warning(
            "open files", f"{whose} may open {files}",
            costs=f"a trainer takes {FILES_OF_A_TRAINER}, and one more for every further segment "
            f"of DRAM (256 MiB, or a sixteenth of --dram if that is less); the first of each user "
            f"{FILES_OF_A_USER} more; the one too many is refused",
            mend=f"ulimit -Hn {FILES_WANTED}; as a service: LimitNOFILE={FILES_WANTED}",
        )  # fmt: skip


def _both(pid: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (
        resource.prlimit(pid, resource.RLIMIT_MEMLOCK),
        resource.prlimit(pid, resource.RLIMIT_NOFILE),
    )


def _limit(value: int, *, count: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return str(value) if count else render.size(value)


def clocks() -> Iterator[Finding]:
    """Order is kept by sequence numbers and never by clocks; these are for people and for speed."""
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source and source not in _FAST_CLOCKS:
        yield warning(
            "clock", f"the kernel's clock source is {source}, which is slow to read",
            costs="every time stamp takes a microsecond or more",
            mend="boot with clocksource=tsc tsc=reliable, if the machine's TSC is stable",
        )  # fmt: skip
    if _unsynchronised():
        yield warning(
            "clock", "nothing sets this machine's clock (NTP)",
            costs="ages in list and status may be wrong; neither the order of checkpoints nor "
            "--expire-finished depends on it",
            mend="run chrony or systemd-timesyncd",
        )  # fmt: skip
    elif asleep_s > _SUSPENDED_S:
        yield ok("clock", f"the machine was suspended for {render.duration(asleep_s)} since boot")
    else:
        yield ok("clock", f"synchronised, source {source or 'unknown'}")


def _unsynchronised() -> bool:
    """As adjtimex(2) says; False where it says nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    timex = (ctypes.c_uint64 * 64)()  # struct timex takes 208 bytes; all zero: only read
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        return False
    status = ctypes.cast(timex, ctypes.POINTER(ctypes.c_int32))[10]  # behind five longs
    return bool(status & _STA_UNSYNC) or state == _TIME_ERROR
