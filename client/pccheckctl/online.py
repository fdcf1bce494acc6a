"""Asking the daemon: an observer on the attach socket, with plain maps in place of message classes.

Building the classes of `pccheck_wire.messages` takes longer than all the rest of `status`; a test
holds these maps against them. Every call has a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

import msgpack  # type: ignore[import-untyped]

from pccheck_wire.basics import PROTOCOL_VERSION, START_HINT, socket_name
from pccheck_wire.errors import (
    DaemonUnreachableError,
    PccheckError,
    ProtocolError,
    RefusedError,
    WaitTimeoutError,
    error_from_wire,
)
from pccheck_wire.peer import require_trusted

from . import VERSION
from .output import Document, rows

TYPE_CHECKING = False  # see pccheck_wire/errors.py
if TYPE_CHECKING:
    from typing import Self

CONNECT_LIMIT_S = 10.0
REQUEST_LIMIT_S = 30.0
DROP_LIMIT_S = 600.0  # a disk may take long to give back terabytes
LISTING_LIMIT_S = 2.0  # of the list that completes `status`
_PACKET_BYTES = 64 * 1024
_REPLY_BYTES_MAX = 16 * 1024 * 1024


def hello() -> Document:
    """The first packet of an observer."""
    return {
        "t": "hello",
        "protocol": PROTOCOL_VERSION,
        "role": "observer",
        "version": VERSION,
        "pid": os.getpid(),
    }


def request(number: int, token: bytes, body: Document) -> Document:
    return {"t": "request", "number": number, "token": token, "body": body}


class Observer:
    """A connection to the daemon; close it, or use it as a context manager."""

    def __init__(self, path: str | None = None, *, timeout_s: float = CONNECT_LIMIT_S) -> None:
        """Connects and says hello. Raises DaemonUnreachableError, or the daemon's refusal."""
        self.path = socket_name(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._number = 0
        self._token = b""
        try:
            self._connect(timeout_s)
            require_trusted(self._socket, self.path)
            welcome = self._exchange(hello(), timeout_s)
        except BaseException:
            self._socket.close()
            raise
        token = welcome.get("token")
        if welcome.get("t") != "welcome" or not isinstance(token, bytes):
            self._socket.close()
            raise ProtocolError(f"{self.path} is not the socket of a pccheckd")
        self._token = token

    def status(self, *, uid: int | None = None) -> Document:
        """The daemon's document, with the ranks that it has not loaded since it started."""
        document = self._report({"t": "status"})
        with contextlib.suppress(PccheckError):  # a slow disk must not hide what the daemon does
            add_unloaded(document, self.listing(timeout_s=LISTING_LIMIT_S))
        if uid is not None:
            document["ranks"] = [rank for rank in rows(document, "ranks") if rank.get("uid") == uid]
        return document

    def listing(
        self, job: str = "", *, uid: int | None = None, timeout_s: float = REQUEST_LIMIT_S
    ) -> Document:
        document = self._report({"t": "list", "job": job}, timeout_s)
        for key in ("volumes", "checkpoints"):
            document[key] = [i for i in rows(document, key) if uid in (None, i.get("uid"))]
        return document

    def verify(
        self,
        job: str,
        *,
        rank: int,
        sequence: int = 0,
        uid: int = -1,
        subset: str = "",
        seed: int = 0,
        timeout_s: float = 3600.0,
    ) -> Document:
        body: Document = {
            "t": "verify", "job": job, "rank": rank, "sequence": sequence, "uid": uid,
            "subset": subset, "seed": seed,
        }  # fmt: skip
        return self._report(body, timeout_s)

    def trace(self, last_s: float) -> Document:
        return self._report({"t": "trace", "last_s": float(last_s)})

    def config(self) -> Document:
        return self._report({"t": "config"})

    def drop(
        self, job: str, *, rank: int | None = None, uid: int | None = None, dry_run: bool
    ) -> Document:
        body: Document = {
            "t": "drop", "job": job, "rank": rank, "uid": -1 if uid is None else uid,
            "dry_run": dry_run,
        }  # fmt: skip
        return self._report(body, DROP_LIMIT_S)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _report(self, body: Document, timeout_s: float = REQUEST_LIMIT_S) -> Document:
        self._number += 1
        reply = self._exchange(request(self._number, self._token, body), timeout_s)
        answer = reply.get("body")
        if not isinstance(answer, dict):
            raise ProtocolError("the daemon's answer is not a reply")
        _raise_failure(answer)
        document = answer.get("document")
        if not isinstance(document, dict):
            raise ProtocolError("the daemon's answer is not a report")
        return document

    def _connect(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(self.path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            raise DaemonUnreachableError(
                f"no daemon listens at {self.path}", hint=START_HINT
            ) from error
        except PermissionError as error:
            place = os.path.dirname(self.path)  # noqa: PTH120 - see pccheck_wire/basics.py
            raise RefusedError(
                f"the socket {self.path} may not be used by uid {os.getuid()}",
                hint=f"join the group of {place}, or start a pccheckd of your own",
            ) from error
        except OSError as error:
            if error.errno in (errno.EPROTOTYPE, errno.ENOTSOCK):
                raise ProtocolError(f"{self.path} is not the socket of a pccheckd") from error
            if "too long" in str(error):
                raise RefusedError(
                    f"the socket path {self.path} is longer than 107 bytes",
                    hint="choose a shorter one",
                ) from error
            raise DaemonUnreachableError(f"{self.path}: {error}", hint=START_HINT) from error

    def _exchange(self, message: Document, timeout_s: float) -> Document:
        """Sends one map and returns the next; a failure in it is raised."""
        deadline = time.monotonic() + timeout_s
        unpacker = msgpack.Unpacker(max_buffer_size=_REPLY_BYTES_MAX, raw=False)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.send(msgpack.packb(message), socket.MSG_NOSIGNAL)
            while True:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                packet = self._socket.recv(_PACKET_BYTES)
                if not packet:
                    raise ConnectionResetError(errno.ECONNRESET, "the daemon hung up")
                unpacker.feed(packet)
                try:
                    answer = unpacker.unpack()
                    break
                except msgpack.OutOfData:  # a long reply comes in several packets
                    continue
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the daemon at {self.path} did not answer within {timeout_s:g} s",
                hint="is it stopped or overloaded? its log tells",
            ) from error
        except OSError as error:
            raise DaemonUnreachableError(
                f"the daemon at {self.path} closed the connection: {error}", hint=START_HINT
            ) from error
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"{self.path} does not speak the protocol of a pccheckd") from error
        if not isinstance(answer, dict):
            raise ProtocolError(f"{self.path} does not speak the protocol of a pccheckd")
        _raise_failure(answer)
        return answer


def add_unloaded(status: Document, listing: Document) -> None:
    """Adds ranks that the daemon's list knows and its status does not: nobody has connected."""
    ranks = rows(status, "ranks")
    known = {(rank.get("uid"), rank.get("job"), rank.get("rank")) for rank in ranks}
    added: dict[tuple[object, object, object], Document] = {}
    for volume in rows(listing, "volumes"):
        key = volume.get("uid"), volume.get("job"), volume.get("rank")
        if key not in known:
            added[key] = {
                "uid": key[0], "job": key[1], "rank": key[2], "connected": False, "pid": None,
                "incarnation": volume.get("incarnation"), "newest": None, "in_flight": 0,
                "volume": volume, "checkpoints": [], "warnings": [],
            }  # fmt: skip
    for one in reversed(rows(listing, "checkpoints")):  # newest last, so that it stays
        found = added.get((one.get("uid"), one.get("job"), one.get("rank")))
        if found is not None and one.get("damaged") is not True:
            found["newest"] = {key: one.get(key) for key in ("sequence", "step", "wall_ns")}
    status["ranks"] = [*ranks, *added.values()]


def _raise_failure(answer: Document) -> None:
    if answer.get("t") == "failure":
        raise error_from_wire(
            str(answer.get("code", "")),
            str(answer.get("message", "")),
            str(answer.get("hint", "")),
            bool(answer.get("retryable", False)),
        )
