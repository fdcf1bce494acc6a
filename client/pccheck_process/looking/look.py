"""Looks at a process through /proc before anything is stopped: what a snapshot of the process would
need, and why the snapshot would be refused."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pccheck_process.procs.descriptors import OpenDescriptor, descriptors
from pccheck_process.procs.diag import unix_peers
from pccheck_process.procs.holders import Holders
from pccheck_process.procs.members import TreeProcess, descendants, member_of
from pccheck_process.procs.procfs import Proc, shown
from pccheck_wire.errors import UsageError

from .condition import look_at_condition, look_at_tree, refuse_unreadable
from .files import look_at_files
from .found import Attached, Findings, OpenFile, Refusal
from .identity import Asked, look_at_identity
from .memory import look_at_memory
from .pipes import look_at_pipes
from .sockets import Peers, look_at_sockets
from .terminals import look_at_terminals

__all__ = ["Attached", "Looked", "OpenFile", "Refusal", "look"]

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Looked:
    pid: int
    start_time: int  # field 22 of /proc/PID/stat: with `pid` the identity of the process
    uid: int
    gid: int
    groups: tuple[int, ...]  # supplementary: CRIU must have the same
    comm: str
    argv: tuple[str, ...]
    tree: tuple[int, ...]  # `pid` first
    threads: int  # of the whole tree
    image_bytes: int  # estimate
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    shell_job: bool  # CRIU's --shell-job
    file_locks: bool  # CRIU's --file-locks
    tcp_established: bool  # CRIU's --tcp-established
    ghost_bytes: int  # CRIU's --ghost-limit: the largest file without a name
    gpu: bool
    written: tuple[OpenFile, ...]  # a grown file stops a restore, see OpenFile.size_checked
    read: tuple[OpenFile, ...]  # open for reading only; these may grow, too
    attached: tuple[Attached, ...]
    outer_pipes: tuple[str, ...]  # "pipe:[INODE]", for CRIU's --inherit-fd
    outer_terminals: tuple[str, ...]  # "tty[RDEV:DEV]", for CRIU's --external


def look(
    pid: int, *, tree: bool, root: bool, daemon_sockets: Collection[str] = (),
    proc: Path = Path("/proc"), uid: int | None = None, peers: Peers = unix_peers,
) -> Looked:  # fmt: skip
    """Collects every reason to refuse; changes and stops nothing. A process that PCcheck may never
    snapshot (another user's, pid 1) has one reason, and is not looked at further.

    `root`: root asks, for whom CRIU may have every capability. `uid`: who asks, by default this
    process. `daemon_sockets`: paths of pccheckd's sockets. `peers`: the kernel's unix sockets.
    Raises UsageError when there is no such process, or when it ends meanwhile.
    """
    files = Proc(proc)
    asked = Asked(pid, tree, root, os.geteuid() if uid is None else uid, os.getpid())
    first = member_of(files, pid)
    if first is None:
        raise UsageError(f"there is no process {pid}", hint="see: ps -e")
    for _ in range(_TRIES):
        found = Findings()
        members = _members(files, first)
        private_bytes = _look(found, files, asked, members, daemon_sockets, peers)
        first = _same(files, first)
        if set(descendants(files, pid)) == {one.pid for one in members}:
            break
    else:
        found.note(f"{first} starts and ends processes all the time")
    return _looked(found, first, members, private_bytes)


def files_of(tree: Iterable[int], proc: Path = Path("/proc")) -> list[OpenFile]:
    """The files that processes have open or mapped, as they are now."""
    files, found = Proc(proc), Findings()
    members = [one for one in (member_of(files, pid) for pid in tree) if one is not None]
    opened = _opened(found, files, members)
    look_at_files(found, files, opened, [one.pid for one in members], root=True)
    for one in members:
        look_at_memory(found, files, one)
    return found.files


def _same(files: Proc, before: TreeProcess) -> TreeProcess:
    """The process as it is now. Raises UsageError when it ended meanwhile."""
    now = member_of(files, before.pid)
    if (
        now is None
        or now.stat.start_time != before.stat.start_time
        or now.stat.ended != before.stat.ended
    ):
        raise UsageError(f"process {before.pid} ended while it was looked at", hint="see: ps -e")
    return now


def _members(files: Proc, first: TreeProcess) -> list[TreeProcess]:
    """The tree as it is now, without processes that end meanwhile."""
    others = (member_of(files, pid) for pid in descendants(files, first.pid)[1:])
    return [first, *(one for one in others if one is not None)]


def _look(
    found: Findings, files: Proc, asked: Asked, members: Sequence[TreeProcess],
    daemon_sockets: Collection[str], peers: Peers,
) -> int:  # fmt: skip
    """Adds to `found`; returns the bytes of private memory in the image, 0 when it did not look at
    the memory."""
    pids = [one.pid for one in members]
    target = members[0]
    for one in members if asked.tree else members[:1]:
        look_at_identity(found, files, asked, one, target)
    if found.refusals:
        return 0
    look_at_tree(found, files, asked, members)
    for one in members:
        look_at_condition(found, files, asked, one)
    opened = _opened(found, files, members)
    holders = Holders(files, pids)
    look_at_files(found, files, opened, pids, root=asked.root)
    look_at_terminals(found, opened)
    look_at_pipes(found, opened, holders)
    look_at_sockets(
        found, files, asked.pid, opened, holders,
        root=asked.root, daemon_sockets=daemon_sockets, peers=peers,
    )  # fmt: skip
    private_bytes = sum(look_at_memory(found, files, one) for one in members if one.runs)
    for file in found.files:
        if file.path.startswith("/dev/shm/"):
            found.note(
                f"process {file.pid} uses {shown(file.path)}, which is not in the image: the file "
                "must still be there at restore"
            )
    return private_bytes


def _opened(found: Findings, files: Proc, members: Sequence[TreeProcess]) -> list[OpenDescriptor]:
    opened: list[OpenDescriptor] = []
    for one in members:
        mine = descriptors(files, one) if one.runs else []
        if mine is None:
            refuse_unreadable(found, one)
            continue
        opened += mine
    return opened


def _looked(
    found: Findings, first: TreeProcess, members: Sequence[TreeProcess], private_bytes: int
) -> Looked:
    uids, gids = first.ids("Uid"), first.ids("Gid")
    stat = first.stat
    return Looked(
        pid=first.pid,
        start_time=stat.start_time,
        uid=uids[0] if uids else -1,
        gid=gids[0] if gids else -1,
        groups=first.ids("Groups"),
        comm=stat.comm,
        argv=first.argv,
        tree=tuple(one.pid for one in members),
        threads=sum(one.stat.threads for one in members),
        image_bytes=private_bytes + sum(found.shared.values()),
        refusals=tuple(found.refusals.values()),
        notes=tuple(found.notes),
        shell_job=stat.session != first.pid or any(one.stat.terminal for one in members),
        file_locks=found.file_locks,
        tcp_established=found.tcp_established,
        ghost_bytes=max(found.ghosts.values(), default=0),
        gpu=found.gpu,
        written=tuple(one for one in found.files if one.writable),
        read=tuple(one for one in found.files if not one.writable),
        attached=tuple(found.attached),
        outer_pipes=tuple(found.outer_pipes),
        outer_terminals=tuple(found.outer_terminals),
    )
