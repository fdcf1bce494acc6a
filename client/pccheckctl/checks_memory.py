"""Checks of memory: whether the daemon's segments can be made, how large, and of which pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pccheck_native import cgroups

from . import render
from .checks_kernel import MADV_COLLAPSE, huge_page_bytes
from .findings import Finding, ok, problem, read, warning

_PROBE_BYTES = 1 << 20
_F_ADD_SEALS, _SEALS = 1033, 0x0002 | 0x0004  # F_SEAL_SHRINK, F_SEAL_GROW
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_NODES = "/sys/devices/system/node"
_THP = "/sys/kernel/mm/transparent_hugepage"


def shared_memory(wanted_bytes: int) -> Iterator[Finding]:
    """Segments are memfds: the size of /dev/shm does not bound them, RAM and the cgroup do."""
    try:
        fd = os.memfd_create("pccheckctl", _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        yield problem(
            "shared memory", f"no memfd can be made: {error}",
            costs="pccheckd cannot work", mend="allow memfd_create (seccomp profile)",
        )  # fmt: skip
        return
    try:
        os.posix_fallocate(fd, 0, _PROBE_BYTES)
        import fcntl

        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    finally:
        os.close(fd)
    room, bound = available()
    need = f"; the pool may take {render.size(wanted_bytes)} more" if wanted_bytes else ""
    if wanted_bytes > room:
        yield warning(
            "shared memory", f"{render.size(room)} to be had ({bound}){need}",
            costs="the pool cannot grow to its budget: the kernel kills processes before",
            mend="lower --dram, or raise the memory limit of the service or container",
            promise="copied",
        )  # fmt: skip
    else:
        yield ok("shared memory", f"{render.size(room)} to be had ({bound}){need}")


def available() -> tuple[int, str]:
    """Bytes that may still be taken, and what bounds them."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", read("/proc/meminfo"), re.MULTILINE)
    free, bound = int(found[1]) * 1024 if found else 0, "RAM"
    for limit in cgroups.limits():
        if limit.nbytes - limit.used_bytes < free:
            free, bound = max(0, limit.nbytes - limit.used_bytes), limit.name
    return free, bound


def huge_pages() -> Iterator[Finding]:
    """Whether a segment can be had in huge pages, by trying."""
    reserved = read("/proc/sys/vm/nr_hugepages") or "0"
    said = re.search(r"\[(\w+)\]", read(f"{_THP}/shmem_enabled"))
    policy = said[1] if said else "not there"
    if _collapses():
        yield ok("huge pages", f"can be had for shared memory (shmem_enabled: {policy})")
    elif int(reserved or 0) > 0:
        yield ok("huge pages", f"{reserved} are reserved")
    else:
        yield warning(
            "huge pages", f"none for shared memory (shmem_enabled: {policy}, nr_hugepages: 0)",
            costs="chunks lie in small pages: direct writes and copies take more CPU",
            mend=f"echo advise > {_THP}/shmem_enabled, or reserve some: "
            "sysctl vm.nr_hugepages=DRAM/2MiB",
        )  # fmt: skip


def numa(root: str = _NODES) -> Iterator[Finding]:
    """How many nodes there are, and what is put near what."""
    found = [path for path in Path(root).glob("node[0-9]*") if read(str(path / "cpulist"))]
    if len(found) < 2:
        yield ok("numa", "one node: nothing has to be placed")
    else:
        yield ok(
            "numa",
            f"{len(found)} nodes: memory and writers are placed near the GPU that is pulled from, "
            "else near a trainer that is bound to one node (numactl --cpunodebind)",
        )


def _collapses() -> bool:
    huge = huge_page_bytes()
    try:
        fd = os.memfd_create("pccheckctl", _MFD_CLOEXEC)
    except (OSError, AttributeError):
        return False
    try:
        os.ftruncate(fd, 2 * huge)
        with mmap.mmap(fd, 2 * huge) as area:
            anchor = ctypes.c_char.from_buffer(area)
            at = (huge - ctypes.addressof(anchor) % huge) % huge
            del anchor
            for page in range(0, 2 * huge, mmap.PAGESIZE):
                area[page] = 1
            try:
                area.madvise(mmap.MADV_HUGEPAGE, at, huge)
                area.madvise(MADV_COLLAPSE, at, huge)
            except OSError:
                return False
    finally:
        os.close(fd)
    return True
