"""Sockets of a tree: CRIU keeps a connection only when both ends are in the tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from pccheck_process.procs.descriptors import OpenDescriptor
from pccheck_process.procs.holders import Holders
from pccheck_process.procs.procfs import Proc, shown, whole

from .found import Attached, Findings
from .tcp import look_at_tcp

_LISTENS = 0x10000  # __SO_ACCEPTCON of the kernel

Peers = Callable[[], Mapping[int, int]]

_KEPT = {"TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "UNIX", "UNIX-STREAM", "NETLINK"}
_KEPT_BY_ROOT = {"RAW", "RAWv6", "PING", "PINGv6", "PACKET"}


@dataclass(frozen=True, slots=True)
class UnixSocket:
    inode: int
    path: str  # "" without a name; an abstract name begins with "@"
    listens: bool


def look_at_sockets(
    found: Findings, proc: Proc, pid: int, opened: Iterable[OpenDescriptor], holders: Holders, *,
    root: bool, daemon_sockets: Collection[str], peers: Peers,
) -> None:  # fmt: skip
    """Looks at the sockets of all processes of the tree of `pid` together."""
    mine: dict[int, list[OpenDescriptor]] = {}
    for one in opened:
        if one.target.startswith("socket:[") and one.inode:
            mine.setdefault(one.inode, []).append(one)
    if not mine:
        return
    _look_at_kinds(found, proc, mine, root=root)
    look_at_tcp(found, proc, pid, mine, holders, root=root)
    listed = unix_sockets(proc.text(pid, "net", "unix"))
    if any(inode in listed for inode in mine):
        _look_at_unix(found, mine, listed, holders, daemon_sockets, peers)


def unix_sockets(table: str) -> dict[int, UnixSocket]:
    """The lines of /proc/net/unix by inode; a path may hold blanks."""
    found = {}
    for line in table.split("\n")[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) >= 7 and (inode := whole(fields[6])):
            path = fields[7] if len(fields) > 7 else ""
            found[inode] = UnixSocket(inode, path, bool(whole(fields[3], 16) & _LISTENS))
    return found


def _look_at_kinds(
    found: Findings, proc: Proc, mine: Mapping[int, list[OpenDescriptor]], *, root: bool
) -> None:
    for ends in mine.values():
        one = ends[0]
        kind = _kind(proc, one)
        if not kind or kind in _KEPT or (root and kind in _KEPT_BY_ROOT):
            continue
        where = f"{one.member} has a {shown(kind)} socket open as descriptor {one.fd}"
        if kind in _KEPT_BY_ROOT:
            found.refuse(f"{where}, which only root can snapshot", "ask as root")
        elif kind == "MPTCP":
            fix = "switch multipath TCP off (Go programs: GODEBUG=multipathtcp=0)"
            found.refuse(f"{where}, which CRIU cannot snapshot", fix)
        else:
            found.refuse(f"{where}, which CRIU cannot snapshot", "close that socket first")


def _kind(proc: Proc, one: OpenDescriptor) -> str:
    """The protocol's name, "" when the kernel does not tell."""
    try:
        value = os.getxattr(proc.path(one.member.pid, "fd", one.fd), "system.sockprotoname")
    except (OSError, ValueError):
        return ""
    return os.fsdecode(value.rstrip(b"\0"))


def _look_at_unix(
    found: Findings, mine: Mapping[int, list[OpenDescriptor]], listed: Mapping[int, UnixSocket],
    holders: Holders, daemon_sockets: Collection[str], peers: Peers,
) -> None:  # fmt: skip
    try:
        connected = peers()
    except OSError:
        found.refuse(
            "the kernel does not list the peers of unix sockets", "load its module unix_diag"
        )
        return
    daemons = {one for path in daemon_sockets for one in (path, os.path.realpath(path))}
    for inode, ends in mine.items():
        peer = connected.get(inode, 0)
        if not peer or peer in mine:  # CRIU restores a socket whose peer is closed
            continue
        path = listed[peer].path if peer in listed else ""
        if path in daemons:
            found.attached += [Attached(end.member.pid, end.fd, path) for end in ends]
        else:
            _refuse_peer(found, ends[0], holders.name(f"socket:[{peer}]"), path)
    _look_at_waiting(found, mine, listed, connected)


def _refuse_peer(found: Findings, end: OpenDescriptor, other: str, path: str) -> None:
    name = f"{other} at {shown(path)}" if path else other
    found.refuse(
        f"{end.member} has a unix socket connected to {name} as descriptor {end.fd}",
        "close that connection first, or start one process that is the parent of both and name "
        "that process with --tree",
    )


def _look_at_waiting(
    found: Findings, mine: Mapping[int, list[OpenDescriptor]], listed: Mapping[int, UnixSocket],
    connected: Mapping[int, int],
) -> None:  # fmt: skip
    """A foreign process whose connection nobody accepted has one of ours as its peer."""
    for client, peer in connected.items():
        if peer in mine and client not in mine and peer in listed and listed[peer].listens:
            end = mine[peer][0]
            at = f" at {shown(listed[peer].path)}" if listed[peer].path else ""
            found.refuse(
                f"{end.member} has a unix socket{at} as descriptor {end.fd}, to which a process "
                "outside is connected",
                "close that connection first",
            )
