"""Asking the daemon: an observer on the attach socket, with plain maps in place of message classes.

To build the classes of `pccheck_wire.messages` takes as long as the rest of `status`; a test
compares these maps with them. Every call has a deadline.
"""

from __future__ import annotations

import contextlib
import os

import msgpack  # type: ignore[import-untyped]

from pccheck_store import VERSION
from pccheck_wire.basics import PROTOCOL_VERSION, Closing, socket_name
from pccheck_wire.connection import DaemonSocket, raise_failure
from pccheck_wire.errors import DaemonUnreachableError, PccheckError, ProtocolError

from .documents import Document, part, rows, text
from .ranks import add_stored

TYPE_CHECKING = False  # the import of `typing` takes a fifth of the time of `status`
if TYPE_CHECKING:
    from pathlib import Path

CONNECT_LIMIT_S = 10.0
REQUEST_LIMIT_S = 30.0
DROP_LIMIT_S = 600.0  # a disk may need minutes to free terabytes
VERIFY_LIMIT_S = 3600.0
TRACE_S_MAX = 1e8  # what the daemon takes; it remembers less
LISTING_LIMIT_S = 2.0  # of the list that completes `status`


def hello(*, storage: str = "") -> Document:
    """The first packet of an observer. With any `storage` the answer names the directory."""
    about = {"protocol": PROTOCOL_VERSION, "version": VERSION, "pid": os.getpid()}
    return {"t": "hello", "role": "observer", "storage": storage, **about}


def private_daemon(storage: Path) -> Observer | None:
    """The private daemon (autostart=True) that serves this directory. A copied directory has a
    note of the original's daemon, which is not returned. Raises why the daemon refuses."""
    from pccheck_native import layout  # most commands ask the daemon of the node

    noted = layout.noted_socket(storage)
    if noted is None:
        return None
    with contextlib.suppress(DaemonUnreachableError, OSError):  # it has ended
        number, found = layout.number(storage), Observer(str(noted), storage="?")
        if found.serves == number:
            return found
        found.close()
    return None


class Observer(Closing):
    """A connection to the daemon; close it, or use it as a context manager."""

    def __init__(
        self, path: str | None = None, *, timeout_s: float = CONNECT_LIMIT_S, storage: str = ""
    ) -> None:
        """Connects and says hello. Raises DaemonUnreachableError, or why the daemon refuses."""
        self._connection = DaemonSocket(socket_name(path), timeout_s=timeout_s)
        self._number = 0
        try:
            welcome, _ = self._connection.exchange(msgpack.packb(hello(storage=storage)), timeout_s)
            raise_failure(welcome)
            token = welcome.get("token")
            if welcome.get("t") != "welcome" or not isinstance(token, bytes):
                raise ProtocolError(f"{self._connection.path} is not the socket of a pccheckd")
        except BaseException:
            self._connection.close()
            raise
        self._token = token
        self.serves = welcome.get("storage")  #: with `storage`: layout.number of its directory

    @property
    def path(self) -> str:
        """Its socket."""
        return self._connection.path

    def status(self, *, uid: int | None = None) -> Document:
        """The daemon's document, with the ranks that it has not loaded since it started."""
        document = self._report({"t": "status"})
        with contextlib.suppress(PccheckError):  # a slow disk must not hide what the daemon does
            add_stored(document, self.listing(timeout_s=LISTING_LIMIT_S))
        if uid is not None:
            document["ranks"] = [rank for rank in rows(document, "ranks") if rank.get("uid") == uid]
        return document

    def storage(self) -> str:
        """The directory that the daemon serves."""
        return text(part(self._report({"t": "status"}), "storage"), "path")

    def listing(
        self, job: str = "", *, uid: int | None = None, timeout_s: float = REQUEST_LIMIT_S
    ) -> Document:
        document = self._report({"t": "list", "job": job}, timeout_s)
        for key in ("volumes", "checkpoints"):
            document[key] = [i for i in rows(document, key) if uid in (None, i.get("uid"))]
        return document

    def verify(
        self, job: str, *, rank: int, sequence: int = 0, uid: int = -1, subset: str = "",
        seed: int = 0,
    ) -> Document:  # fmt: skip
        body = {"job": job, "rank": rank, "sequence": sequence, "uid": uid, "seed": seed}
        return self._report({"t": "verify", "subset": subset, **body}, VERIFY_LIMIT_S)

    def trace(self, last_s: float) -> Document:
        """Checkpoints of the last seconds; `math.inf` for all that the daemon remembers."""
        return self._report({"t": "trace", "last_s": min(float(last_s), TRACE_S_MAX)})

    def servers(self) -> Document:
        """Where the nodes of jobs let each other read, also after the job (`ListServers`)."""
        return self._report({"t": "servers"})

    def config(self) -> Document:
        return self._report({"t": "config"})

    def drop(
        self, job: str, *, rank: int | None = None, uid: int | None = None, dry_run: bool
    ) -> Document:
        body = {"job": job, "rank": rank, "uid": -1 if uid is None else uid, "dry_run": dry_run}
        return self._report({"t": "drop", **body}, DROP_LIMIT_S)

    def close(self) -> None:
        self._connection.close()

    def _report(self, body: Document, timeout_s: float = REQUEST_LIMIT_S) -> Document:
        self._number += 1
        message = {"t": "request", "number": self._number, "token": self._token, "body": body}
        packed = msgpack.packb(message)
        reply, _ = self._connection.exchange(packed, timeout_s, number=self._number)
        answer = part(reply, "body")
        raise_failure(answer)
        document = answer.get("document")
        if not isinstance(document, dict):
            raise ProtocolError("the answer of the daemon is not a report")
        return document
