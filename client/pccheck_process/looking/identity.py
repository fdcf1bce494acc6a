"""Who the processes of a tree are. What is found here ends a look: nothing else matters then."""

from __future__ import annotations

from dataclasses import dataclass

from pccheck_process.procs.members import TreeProcess
from pccheck_process.procs.procfs import Proc

from .found import Findings

#: A process that CRIU restored has a time namespace of its own, and can be dumped again.
_NAMESPACES = ("pid", "user", "net", "mnt", "ipc", "uts", "cgroup", "pid_for_children")


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks for a snapshot, and of what."""

    pid: int
    tree: bool
    root: bool
    uid: int
    own_pid: int


def look_at_identity(
    found: Findings, proc: Proc, asked: Asked, one: TreeProcess, target: TreeProcess
) -> None:
    """Adds at most one sentence for each process."""
    if one.pid == 1:
        found.refuse("process 1 is the init of this system", "name the training process")
    elif one.stat.kernel_thread:
        found.refuse(f"{one} is a kernel thread", "name a process that runs a program")
    elif one.is_daemon:
        found.refuse(
            f"{one} is pccheckd, which stores the snapshots",
            "name a process whose tree does not hold pccheckd",
        )
    elif one.stat.ended:
        if one is target:
            found.refuse(
                f"{one} has ended and waits for its parent to collect it", "name a running process"
            )
    elif not _look_at_users(found, asked, one, target):
        _look_at_namespaces(found, proc, one)


def _look_at_users(found: Findings, asked: Asked, one: TreeProcess, target: TreeProcess) -> bool:
    """Whether there is something to refuse."""
    uids, gids = one.ids("Uid"), one.ids("Gid")
    if len(uids) < 4 or len(gids) < 4:
        found.refuse(f"the user of {one} cannot be read", "try again")
    elif len(set(uids)) > 1 or len(set(gids)) > 1:
        kind, ids = ("uids", uids) if len(set(uids)) > 1 else ("gids", gids)
        found.refuse(
            f"{one} runs with several {kind}, as setuid and setgid programs do: "
            f"{', '.join(map(str, ids))}",
            "start a program that keeps the user and group of its caller",
        )
    elif not asked.root and uids[0] != asked.uid:
        found.refuse(
            f"{one} belongs to uid {uids[0]}, and uid {asked.uid} asks",
            "ask as that user or as root",
        )
    elif one is not target and uids[:1] != target.ids("Uid")[:1]:
        found.refuse(
            f"{one} belongs to uid {uids[0]}, another user than that of {target}",
            "name a tree whose processes belong to one user",
        )
    else:
        return False
    return True


def _look_at_namespaces(found: Findings, proc: Proc, one: TreeProcess) -> None:
    other = []
    seen = proc.link(one.pid, "ns", "pid") is not None
    for name in _NAMESPACES:
        ours, theirs = proc.link("self", "ns", name), proc.link(one.pid, "ns", name)
        kind, _, future = name.partition("_")
        unborn = bool(future) and seen and theirs is None  # no child is in that namespace yet
        if ours and ours != theirs and (theirs or unborn) and kind not in other:
            other.append(kind)
    if other:
        found.refuse(
            f"{one} is in another namespace ({', '.join(other)}), as in a container",
            "run pccheckd and pccheckctl in the same container or service as the process",
        )
