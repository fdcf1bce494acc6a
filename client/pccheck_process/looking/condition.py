"""In which condition the processes of a tree are: children, debuggers, protections."""

from __future__ import annotations

from collections.abc import Sequence

from pccheck_process.procs.members import TreeProcess
from pccheck_process.procs.procfs import Proc, parse_fields, shown, whole

from .found import Findings
from .identity import Asked

_MOST_NAMED = 5
_YAMA = ("sys", "kernel", "yama", "ptrace_scope")


def look_at_tree(found: Findings, proc: Proc, asked: Asked, members: Sequence[TreeProcess]) -> None:
    """What the tree as a whole is."""
    target = members[0]
    if any(one.pid == asked.own_pid for one in members):
        found.refuse(
            f"process {asked.own_pid}, which asks for the snapshot, is in the tree of {target}",
            "ask from another terminal or service",
        )
    children = [str(one.pid) for one in members[1:] if not one.stat.ended]
    if children and not asked.tree:
        more = len(children) - _MOST_NAMED
        named = ", ".join(children[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        found.refuse(f"{target} has child processes: {named}", "add --tree")
    if not asked.root:
        _look_at_yama(found, proc)


def look_at_condition(found: Findings, proc: Proc, asked: Asked, one: TreeProcess) -> None:
    """What one process of the tree is."""
    if not one.runs:
        return
    if not asked.root:
        _look_at_privileges(found, proc, one)
    _look_at_threads(found, proc, asked, one)
    place = proc.link(one.pid, "root")
    if place not in (None, "/"):
        found.refuse(
            f"{one} has the root directory {shown(place or '')} (chroot)",
            "start the process without chroot",
        )
    directory = proc.link(one.pid, "cwd") or ""
    if directory.endswith(" (deleted)"):
        found.refuse(
            f"{one} works in {shown(directory.removesuffix(' (deleted)'))}, which was removed",
            "start the process in a directory that stays",
        )
    if one.stat.state == "T":
        found.note(f"{one} is stopped by a signal, and a restored process is stopped, too")


def _look_at_yama(found: Findings, proc: Proc) -> None:
    scope = whole(proc.text(*_YAMA))
    if scope:
        found.refuse(
            f"this system lets only parents stop processes (kernel.yama.ptrace_scope is {scope})",
            "ask as root, or set kernel.yama.ptrace_scope to 0",
        )


def _look_at_privileges(found: Findings, proc: Proc, one: TreeProcess) -> None:
    uid = one.ids("Uid")[:1]
    if uid != (0,) and any(whole(one.status.get(name), 16) for name in ("CapPrm", "CapInh")):
        found.refuse(f"{one} has capabilities, which only root can restore", "ask as root")
    shield = proc.stat(one.pid, "maps")  # root owns the files of a protected process
    if shield and (proc.read(one.pid, "maps") is None or shield.st_uid not in uid):
        refuse_unreadable(found, one)


def refuse_unreadable(found: Findings, one: TreeProcess) -> None:
    found.refuse(
        f"{one} made itself unreadable (PR_SET_DUMPABLE, or a program file without read "
        "permission)",
        "ask as root, or start the program without that protection",
    )


def _look_at_threads(found: Findings, proc: Proc, asked: Asked, one: TreeProcess) -> None:
    for thread in proc.numbers(one.pid, "task") or [one.pid]:
        status = one.status
        if thread != one.pid:
            status = parse_fields(proc.text(one.pid, "task", thread, "status"))
        if tracer := whole(status.get("TracerPid")):
            found.refuse(
                f"{one} is traced by process {tracer}", "end that debugger or tracer first"
            )
        if whole(status.get("Seccomp")) and not asked.root:
            found.refuse(f"{one} has a seccomp filter, which only root can snapshot", "ask as root")
        if status and status.get("Uid", "").split() != one.status.get("Uid", "").split():
            found.refuse(
                f"a thread ({thread}) of {one} has other uids than its process",
                "let all threads have one user",
            )
