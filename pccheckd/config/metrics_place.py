"""Where metrics go: HTTP, or a file that node_exporter reads. Imports no dependency, so that the
configuration can be checked without the extra."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from pccheck_wire.errors import UsageError

LOCALHOST = "127.0.0.1"
EXAMPLE = "write it like 9477, 127.0.0.1:9477, [::1]:9477 or /var/lib/node_exporter/pccheck.prom"
INSTALL = "pip install 'pccheck[metrics]'"


@dataclass(frozen=True, slots=True)
class Place:
    """An address to listen at, or a file to write."""

    host: str = ""
    port: int = 0
    file: Path | None = None

    @property
    def is_local(self) -> bool:
        return self.file is not None or ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        if self.file is not None:
            return str(self.file)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def parse(text: str) -> Place:
    """`[ADDRESS:]PORT`, or a path that ends in .prom. Raises UsageError."""
    if "/" in text:
        path = Path(text)
        if path.suffix != ".prom":
            raise UsageError(
                f"{text!r} does not end in .prom; node_exporter reads no other files", hint=EXAMPLE
            )
        return Place(file=path.absolute())
    found = re.fullmatch(r"(?:(?P<plain>[^:\[\]]*):|\[(?P<six>[^\[\]]+)\]:)?(?P<port>\d+)", text)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{text!r} is not an address, port or .prom file", hint=EXAMPLE)
    host = found["six"] or found["plain"] or LOCALHOST
    host = LOCALHOST if host == "localhost" else host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"{host!r} is not an address of this machine", hint=EXAMPLE) from None
    return Place(host, int(found["port"]))


def require(text: str) -> None:
    """Raises UsageError when metrics are wanted and prometheus-client is not installed."""
    if text and importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("--metrics needs the package prometheus-client", hint=INSTALL)
