"""An authority, a server's certificate for 127.0.0.1 and a client's, made with openssl."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", "30")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files; a pair is certificate and key."""

    ca: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]

    def context(self) -> ssl.SSLContext:
        """A client's."""
        made = ssl.create_default_context(cafile=self.ca)
        made.load_cert_chain(*self.client)
        return made


def make(directory: Path) -> Certificates:
    directory.mkdir(exist_ok=True)
    ca = _made(directory, "ca", "/CN=ca", ())
    signed = (
        "-CA",
        str(ca[0]),
        "-CAkey",
        str(ca[1]),
        "-addext",
        "basicConstraints=critical,CA:FALSE",
    )
    address = ("-addext", "subjectAltName=IP:127.0.0.1")
    server = _made(directory, "server", "/CN=etcd", (*signed, *address))
    # With a name in it etcd takes no request through its gateway, once it has users.
    return Certificates(ca[0], server, _made(directory, "client", "/", signed))


def _made(directory: Path, name: str, subject: str, more: tuple[str, ...]) -> tuple[Path, Path]:
    pair = directory / f"{name}.pem", directory / f"{name}.key"
    command = [*_NEW, "-subj", subject, *more, "-out", str(pair[0]), "-keyout", str(pair[1])]
    subprocess.run(command, check=True, capture_output=True)
    return pair
