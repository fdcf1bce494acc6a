"""What a storage directory keeps of its node: an id and a secret. People name a node by its host
name; the software by a random id in its storage directory, which a reboot, another host name or
address does not change."""

from __future__ import annotations

from pathlib import Path
from secrets import token_bytes
from typing import NamedTuple

from pccheck_native import layout
from pccheck_native.identity import UNKNOWN
from pccheck_wire.errors import DamagedError
from pccheckd.base.logs import LOG

ID_BYTES = 16
SECRET_BYTES = 32


class Node(NamedTuple):
    """The same id with another place is a copy of the directory, unless its disk was mounted anew
    since. Two daemons at the same time with the same id are two nodes of which one was cloned, also
    with equal places: two machines of one image have equal ones."""

    id: bytes  # 16 bytes
    place: str  # layout.number: which directory this is, until the next boot


def node_of(storage: Path) -> Node:
    """The node of a storage directory; the first call makes its id, durably. Needs the daemon's
    lock. Raises OSError, and DamagedError for a file that holds no id."""
    path = storage / layout.NODE_NAME
    found = _kept(path, ID_BYTES, "the id of a node", "the node then gets a new id")
    return Node(found, layout.number(storage))


def secret_of(storage: Path) -> bytes:
    """The secret of a storage directory, from which the keys, tokens and ports of its node follow
    (`pccheckd/peer/identity.py`). Made and kept as the id of `node_of`."""
    path = storage / layout.SECRET_NAME
    return _kept(path, SECRET_BYTES, "a secret", "the node then gets new keys")


def _kept(path: Path, size: int, what: str, then: str) -> bytes:
    try:
        found = bytes.fromhex(layout.load(path, 4 * size).decode("ascii"))
        if len(found) != size or found == UNKNOWN:
            raise ValueError(f"it is not {size} bytes in hexadecimal")
    except FileNotFoundError:
        found = token_bytes(size)
        layout.store(path, f"{found.hex()}\n".encode())
        LOG.info("%s: made %s", path, what)
    except ValueError as error:
        raise DamagedError(
            f"{path} does not hold {what}: {error}", hint=f"remove it: rm {path}; {then}"
        ) from error
    return found
