"""TCP connections of a tree, by the kernel's tables."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pccheck_process.procs.descriptors import OpenDescriptor
from pccheck_process.procs.holders import Holders
from pccheck_process.procs.procfs import Proc, whole

from .found import Findings

_LISTENING, _CLOSED, _TIME_WAIT = 0x0A, 0x07, 0x06
_UNCONNECTED = (_CLOSED, _TIME_WAIT)

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class TcpConnection:
    local: Address
    remote: Address
    state: int
    waiting: int  # connections that a listening socket has not accepted
    inode: int


def look_at_tcp(
    found: Findings, proc: Proc, pid: int, mine: Mapping[int, list[OpenDescriptor]],
    holders: Holders, *, root: bool,
) -> None:  # fmt: skip
    """`mine`: the sockets of the tree, by inode."""
    table = [line for name in ("tcp", "tcp6") for line in connections(proc.text(pid, "net", name))]
    ends = {(one.local, one.remote): one.inode for one in table}
    refused = {one.local for one in table if one.inode in mine and one.waiting}
    for one in table:
        if one.inode not in mine or one.state in _UNCONNECTED:
            continue
        owner = mine[one.inode][0]
        if one.state == _LISTENING:
            _look_at_listener(found, owner, one)
            continue
        other = ends.get((one.remote, one.local), 0)
        if not other and one.remote in refused:
            continue
        if other in mine:
            _look_inside(found, owner, one, root=root)
        else:
            peer = holders.holder(f"socket:[{other}]") if other else None
            _refuse_outside(found, owner, one, peer)


def connections(table: str) -> Iterator[TcpConnection]:
    """The lines of /proc/net/tcp and tcp6 that can be read."""
    for line in table.split("\n")[1:]:
        fields = line.split()
        if len(fields) < 10:
            continue
        local, remote = parse_address(fields[1]), parse_address(fields[2])
        waiting = whole(fields[4].partition(":")[2], 16)
        if local and remote:
            yield TcpConnection(local, remote, whole(fields[3], 16), waiting, whole(fields[9]))


def parse_address(text: str) -> Address | None:
    """ "0100007F:07E8" is 127.0.0.1 and 2024: words in the order of this machine."""
    host, _, port = text.partition(":")
    if len(host) not in (8, 32):
        return None
    try:
        words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
        packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
        address = ipaddress.ip_address(packed)
        number = int(port, 16)
    except (ValueError, OverflowError):
        return None
    mapped = getattr(address, "ipv4_mapped", None)  # the other end may be an IPv4 socket
    return str(mapped or address), number


def _look_at_listener(found: Findings, owner: OpenDescriptor, one: TcpConnection) -> None:
    if one.waiting:
        found.refuse(
            f"{owner.member} has not accepted {one.waiting} connection(s) to port "
            f"{one.local[1]} yet",
            "try again after it has accepted every connection",
        )


def _look_inside(found: Findings, owner: OpenDescriptor, one: TcpConnection, *, root: bool) -> None:
    found.tcp_established = True
    if not root:
        found.refuse(
            f"{owner.member} has a TCP connection to {_shown(one.remote)} inside the tree, which "
            "only root can snapshot",
            "ask as root",
        )


def _refuse_outside(
    found: Findings, owner: OpenDescriptor, one: TcpConnection, pid: int | None
) -> None:
    peer = "" if pid is None else f" (process {pid})"
    found.refuse(
        f"{owner.member} has a TCP connection to {_shown(one.remote)}{peer}, which is outside the "
        "tree",
        "close that connection first; jobs with ranks on other hosts use PCcheckClient instead",
    )


def _shown(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
