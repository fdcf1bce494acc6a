"""Checks of open files and memory. They need no daemon, no storage."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from pccheck_native.cgroups import available
from pccheckctl.output import render

from .finding import Finding, ok, problem, warning

FILES_WANTED = 65536
#: Descriptors that the daemon opens for one trainer (sockets, page, segment, watches, volume), and
#: for the first trainer of a user. A test counts them.
FILES_OF_A_TRAINER, FILES_OF_A_USER = 7, 3


def open_files(daemon_pid: int = 0) -> Iterator[Finding]:
    """The limit of the daemon where it can be read, else that of this shell."""
    whose, allowed = "this shell", resource.prlimit(0, resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        if daemon_pid:
            whose, allowed = "pccheckd", resource.prlimit(daemon_pid, resource.RLIMIT_NOFILE)[1]
    if allowed == resource.RLIM_INFINITY:
        yield ok("open files", f"{whose} has no limit")
    elif allowed >= FILES_WANTED:
        yield ok("open files", f"{whose} may open {allowed} files")
    else:
        yield warning(
            "open files", f"{whose} may only open {allowed} files",
            effect="pccheckd refuses trainers when none are left: it opens "
            f"{FILES_OF_A_TRAINER} files for each trainer, {FILES_OF_A_USER} for each user, and "
            "one for each 256 MiB of DRAM",
            fix=f"ulimit -Hn {FILES_WANTED}; for a service: LimitNOFILE={FILES_WANTED}",
        )  # fmt: skip


def memory(wanted_bytes: int) -> Iterator[Finding]:
    """Shared memory is made of memfds: RAM and the cgroup limit it, not the size of /dev/shm."""
    try:
        os.close(os.memfd_create("pccheckctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:
        yield problem(
            "shared memory", f"cannot create shared memory: {error}",
            effect="pccheckd cannot start: no checkpoints",
            fix="allow memfd_create (seccomp profile)",
        )  # fmt: skip
        return
    free, bound = available()
    found = f"{render.size(free)} available ({bound})"
    if wanted_bytes:
        found += f"; the pool may take {render.size(wanted_bytes)} more"
    if wanted_bytes > free:
        yield warning(
            "shared memory", found,
            effect="the kernel kills processes before the pool reaches its budget: checkpoints "
            "that were only copied are lost with pccheckd",
            fix="lower --dram, or raise the memory limit of the service or container",
            promise="copied",
        )  # fmt: skip
    else:
        yield ok("shared memory", found)
