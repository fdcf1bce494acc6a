"""Connections to the peer servers of nodes, over TLS 1.3. Nobody signs their certificates: a server
is known by the fingerprint of its own."""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Sequence

from pccheck_native.nodes import peer

CONNECT_LIMIT_S = 10.0
#: A node that sends nothing for so long is given up; the reader tries another copy.
SILENT_LIMIT_S = 30.0


class LeftError(Exception):
    """A node cannot be read from; why. The reader tries another copy."""


class BusyError(LeftError):
    """The server takes no more connections now."""


def connected(addresses: Sequence[str], fingerprint: bytes) -> ssl.SSLSocket:
    """To the first address where the node's certificate is. Raises LeftError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint tells
    failed, busy = [], None
    for address in addresses:
        try:
            plain = socket.create_connection(peer.split(address), CONNECT_LIMIT_S)
        except (OSError, ValueError) as error:
            failed.append(f"{address}: {in_words(error)}")
            continue
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = context.wrap_socket(plain, suppress_ragged_eofs=False)
        except (OSError, ValueError) as error:
            plain.close()
            failed.append(f"{address}: {in_words(error)}")
            busy = gone(error) if _ended(error) else busy
            continue
        shown = stream.getpeercert(binary_form=True) or b""
        if hashlib.sha256(shown).digest() == fingerprint:
            stream.settimeout(SILENT_LIMIT_S)
            return stream
        stream.close()
        failed.append(f"{address}: another node, or another daemon, answers there")
    raise busy or LeftError("; ".join(failed) or "it has no address")


def gone(error: Exception) -> LeftError:
    """Of a connection before its first answer: a server that has too many ends the connection."""
    return (BusyError if _ended(error) else LeftError)(in_words(error))


def _ended(error: Exception) -> bool:
    """The server has ended the connection."""
    return isinstance(error, (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError))


def reaches(addresses: Sequence[str], fingerprint: bytes) -> str:
    """Why this process cannot read from a node; "": it can, or at least shows itself there."""
    try:
        connected(addresses, fingerprint).close()
    except LeftError as error:
        return str(error)
    return ""


def in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error) or type(error).__name__
