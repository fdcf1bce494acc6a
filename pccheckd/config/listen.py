"""The addresses at which other nodes read checkpoints from this daemon: `--listen`."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

import psutil

from pccheck_wire.errors import UsageError

EXAMPLE = "write it like eth0, 10.0.0.1, 10.0.0.1:7788 or [fd00::1]:7788; several with commas"
#: With a port: this one or one of the next, since each user has a server of its own.
PORTS = 100
_PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+)(:(?P<port>\d{1,5}))?")


class ListenPlace(NamedTuple):
    host: str  # an address, or the name of an interface
    port: int  # 0: any


def parse(text: str) -> tuple[ListenPlace, ...]:
    """Raises UsageError."""
    places = []
    for one in text.split(","):
        host, port = one.strip(), 0
        if not _is_address(host):  # IPv6 without brackets has no port
            match = _PLACE.fullmatch(host)
            port = int(match["port"] or 0) if match is not None else -1
            if match is None or not 0 <= port <= 65535 - PORTS:
                raise UsageError(f"{one!r} is not ADDRESS[:PORT] or an interface", hint=EXAMPLE)
            host = match["host"].strip("[]")
        if _is_address(host) and ipaddress.ip_address(host).is_unspecified:
            raise UsageError(
                f"{host} is no address that another node could connect to",
                hint="name the interface between the nodes, or this node's address on it",
            )
        places.append(ListenPlace(host, port))
    return tuple(places)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def addresses(place: ListenPlace) -> list[str]:
    """The addresses of a place, now. Raises UsageError when there is none."""
    if _is_address(place.host):
        return [place.host]
    found = [
        one.address
        for one in psutil.net_if_addrs().get(place.host, ())
        if one.family in (socket.AF_INET, socket.AF_INET6)
        if not ipaddress.ip_address(one.address.partition("%")[0]).is_link_local
    ]
    if not found:
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise UsageError(
            f"{place.host!r} is not an interface with an address; there are {known}", hint=EXAMPLE
        )
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
