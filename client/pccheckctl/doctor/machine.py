"""Checks of limits and memory. They need no daemon, no storage."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import resource
from collections.abc import Iterator

from pccheck_native.cgroups import available
from pccheckctl.output import render

from .finding import Finding, ok, problem, read, warning

FILES_WANTED = 65536
#: Descriptors that the daemon opens for one trainer (sockets, page, segment, watches, volume), and
#: for the first trainer of a user. A test counts them.
FILES_OF_A_TRAINER, FILES_OF_A_USER = 7, 3
MEMLOCK_WANTED = 64 << 20
MADV_COLLAPSE = 25
_THP = "/sys/kernel/mm/transparent_hugepage"


def limits(daemon_pid: int = 0) -> Iterator[Finding]:
    """The limits of the daemon where they can be read, else those of this shell."""
    whose, locked, files = "this shell", *_limits_of(0)
    with contextlib.suppress(OSError, ValueError):
        if daemon_pid:
            whose, locked, files = "pccheckd", *_limits_of(daemon_pid)
    for check, allowed, wanted, shown, costs, mend in (
        ("memlock", locked, MEMLOCK_WANTED, f"lock {render.size(locked)} of memory",
         "the GPU driver may refuse to pin memory: copies from GPUs are slower then",
         "ulimit -l unlimited; for a service: LimitMEMLOCK=infinity"),
        ("open files", files, FILES_WANTED, f"open {files} files",
         f"pccheckd refuses trainers when none are left: it opens {FILES_OF_A_TRAINER} files for "
         f"each trainer, {FILES_OF_A_USER} for each user, and one for each 256 MiB of DRAM",
         f"ulimit -Hn {FILES_WANTED}; for a service: LimitNOFILE={FILES_WANTED}"),
    ):  # fmt: skip
        if allowed == resource.RLIM_INFINITY:
            yield ok(check, f"{whose} has no limit")
        elif allowed >= wanted:
            yield ok(check, f"{whose} may {shown}")
        else:
            yield warning(check, f"{whose} may only {shown}", costs=costs, mend=mend)


def _limits_of(pid: int) -> tuple[int, int]:
    """Hard limits: bytes of locked memory, and open files."""
    return (
        resource.prlimit(pid, resource.RLIMIT_MEMLOCK)[1],
        resource.prlimit(pid, resource.RLIMIT_NOFILE)[1],
    )


def memory(wanted_bytes: int) -> Iterator[Finding]:
    """Shared memory is made of memfds: RAM and the cgroup limit it, not the size of /dev/shm."""
    try:
        os.close(os.memfd_create("pccheckctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:
        yield problem(
            "shared memory", f"cannot create shared memory: {error}",
            costs="pccheckd cannot start: no checkpoints",
            mend="allow memfd_create (seccomp profile)",
        )  # fmt: skip
        return
    free, bound = available()
    found = f"{render.size(free)} available ({bound})"
    if wanted_bytes:
        found += f"; the pool may take {render.size(wanted_bytes)} more"
    if wanted_bytes > free:
        yield warning(
            "shared memory", found,
            costs="the kernel kills processes before the pool reaches its budget: checkpoints that "
            "were only copied are lost with pccheckd",
            mend="lower --dram, or raise the memory limit of the service or container",
            promise="copied",
        )  # fmt: skip
    else:
        yield ok("shared memory", found)


def huge_pages() -> Iterator[Finding]:
    """Whether shared memory gets huge pages, by trying: the settings alone do not say it."""
    policy = re.search(r"\[(\w+)\]", read(f"{_THP}/shmem_enabled"))
    shown = f"shmem_enabled: {policy[1] if policy else 'missing'}"
    if _collapses() or int(read("/proc/sys/vm/nr_hugepages") or 0) > 0:
        yield ok("huge pages", f"available for shared memory ({shown})")
    else:
        yield warning(
            "huge pages", f"not available for shared memory ({shown}, nr_hugepages: 0)",
            costs="copies and writes of checkpoints take more CPU time",
            mend=f"echo advise > {_THP}/shmem_enabled, or sysctl vm.nr_hugepages=DRAM/2MiB",
        )  # fmt: skip


def _collapses() -> bool:
    huge = int(read(f"{_THP}/hpage_pmd_size") or 2 << 20)
    try:
        fd = os.memfd_create("pccheckctl", os.MFD_CLOEXEC)
        os.ftruncate(fd, 2 * huge)
        with mmap.mmap(fd, 2 * huge) as area:
            os.close(fd)
            anchor = ctypes.c_char.from_buffer(area)
            start = -ctypes.addressof(anchor) % huge
            del anchor  # or the mapping could not be closed
            area[start] = 1
            area.madvise(mmap.MADV_HUGEPAGE, start, huge)
            area.madvise(MADV_COLLAPSE, start, huge)
    except (OSError, AttributeError):
        return False
    return True
