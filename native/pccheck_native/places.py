"""What a process runs in, and ends with: a Slurm step, a container, a pod."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

NAMESPACES = Path("/proc/self/ns")
#: The namespaces of the host have these names on every Linux (PROC_IPC_INIT_INO and
#: PROC_PID_INIT_INO of the kernel), in a virtual machine too.
_OF_HOST = {"ipc": "ipc:[4026531839]", "pid": "pid:[4026531836]"}


def places(environ: Mapping[str, str] = os.environ, namespaces: Path = NAMESPACES) -> Iterator[str]:
    """Names of all of these. Two processes that have one in common end together.

    The containers of a pod share the IPC and the network namespace; a container for itself has a
    PID and a mount namespace. One of the two alone may be borrowed (`--ipc=container:...`). What
    runs under a service manager is taken for no part of a container: it is that of a machine.
    """
    if job := environ.get("SLURM_JOB_ID"):
        yield f"Slurm step {job}.{environ.get('SLURM_STEP_ID') or 'batch'}"
    if environ.get("NOTIFY_SOCKET"):
        return
    with contextlib.suppress(OSError):  # a sandbox without /proc
        found = {kind: str((namespaces / kind).readlink()) for kind in ("ipc", "net", "pid", "mnt")}
        for kind, beside in (("ipc", "net"), ("pid", "mnt")):
            if found[kind] != _OF_HOST[kind]:
                yield f"container or pod ({found[kind]}, {found[beside]})"
