"""Where etcd is, and what it wants to see: `--coordinator` and the file of its credentials."""

from __future__ import annotations

import ipaddress
import re
import stat
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from pccheck_wire.errors import UsageError

EXAMPLE = "write it like etcd://10.0.0.1:2379 or etcds://a:2379,b:2379,c:2379"
_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The members of one etcd, as (host, port); `tls` for etcds://."""

    hosts: tuple[tuple[str, int], ...]
    tls: bool

    @property
    def is_local(self) -> bool:
        return all(_is_local(host) for host, _ in self.hosts)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse(text: str) -> Coordinator:
    """Raises UsageError, which never repeats the text: it may hold a password."""
    scheme, found, places = text.partition("://")
    if not found or scheme not in ("etcd", "etcds"):
        raise UsageError("the coordinator begins with etcd:// or etcds://", hint=EXAMPLE)
    if "@" in places:
        raise UsageError(
            "user and password do not belong into --coordinator, where every user of this machine "
            "reads them",
            hint="write them into a file, and name it with --coordinator-credentials",
        )
    hosts = []
    for place in places.split(","):
        match = _HOST.fullmatch(place)
        if match is None or not 0 < int(match["port"]) <= 65535:
            raise UsageError(f"{place!r} is not HOST:PORT", hint=EXAMPLE)
        hosts.append((match["name"].strip("[]"), int(match["port"])))
    return Coordinator(tuple(hosts), tls=scheme == "etcds")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys of the file, each of them optional. `ca` replaces the system's authorities;
    `certificate` and `key` are the client's. All files are PEM."""

    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    certificate: str = ""
    key: str = ""


_KEYS = tuple(item.name for item in fields(Credentials))


def read(path: Path) -> Credentials:
    """Raises UsageError that names what is wrong, and no value."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # not TOML or not UTF-8; its text may hold the password
        raise UsageError(
            f"{path} is not TOML", hint='its lines look like: user = "pccheck"'
        ) from None
    for key, value in data.items():
        if key not in _KEYS or not isinstance(value, str):
            raise UsageError(
                f"{path}: {key!r} is not one of the keys {', '.join(_KEYS)}, or not a text"
            )
    made = Credentials(**data)
    if made.password and mode & 0o077:
        raise UsageError(
            f"{path} holds a password, and other users may read it", hint=f"chmod 600 {path}"
        )
    if bool(made.user) != bool(made.password) or bool(made.certificate) != bool(made.key):
        raise UsageError(f"{path}: user goes with password, and certificate with key")
    return made


def check(place: Coordinator, path: Path) -> Credentials:
    """What the file has for this place. Raises UsageError."""
    found = read(path)
    if not place.tls and (found.ca or found.certificate):
        raise UsageError(f"{path} names certificates, and etcd:// uses none", hint="write etcds://")
    if not place.tls and found.password and not place.is_local:
        raise UsageError(
            "etcd:// would send the password unencrypted to another machine", hint="write etcds://"
        )
    return found
