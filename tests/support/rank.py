"""A rank without torch, for tests of the daemon: the wire, the native link and plain bytes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import struct
import time
from pathlib import Path
from typing import Any, Self

import zmq

from pccheck_native import WORD_COPYING, Client, ClientState
from pccheck_wire import attach, codec, packing
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import DaemonUnreachableError, PccheckError, error_from_wire
from pccheck_wire.messages import (
    CheckpointState,
    Described,
    Empty,
    Failure,
    Hello,
    Open,
    Opened,
    Read,
    Register,
    Reply,
    ReplyBody,
    Report,
    Request,
    RequestBody,
    Restored,
    Role,
    Status,
    Waiting,
    Writing,
)
from tests.support.waiting import PATIENCE, until

LIMIT_S = 240.0 * PATIENCE
SLICE_NS = 50_000_000  # between two checks that the daemon runs


def payload_of(seed: int, size: int) -> bytes:
    """Random bytes; the same for the same seed."""
    word = struct.pack("<QQ", seed * 0x9E3779B97F4A7C15 % 2**64, size)
    return (word * (size // len(word) + 1))[:size]


class NoAnswerError(AssertionError):
    """A request was not answered in time."""


class Rank:
    """One session, by default of a trainer; `save` and `load` take payloads of bytes."""

    def __init__(
        self,
        socket: Path,
        *,
        job: str = "job",
        rank: int = 0,
        world_size: int = 1,
        local_world_size: int | None = None,
        launch: str = "",
        fresh: bool = False,
        role: Role = Role.TRAINER,
        process: bytes = b"",
        incarnation: int = 0,
        restored: int | None = None,
    ) -> None:
        """`local_world_size`: if some ranks are on other nodes. `process`, `incarnation` and
        `restored` are what a client repeats when it reconnects."""
        hello = Hello(
            PROTOCOL_VERSION, role, "test", os.getpid(), job=job, rank=rank, launch=launch,
            world_size=world_size, local_world_size=local_world_size or world_size, fresh=fresh,
            process=process,
            incarnation=incarnation, restored=restored,
        )  # fmt: skip
        self.rank = rank
        self.attachment = attach.connect(hello, socket, timeout_s=LIMIT_S)
        self.welcome = self.attachment.welcome
        self.native = Client(self.attachment.memory_fd, self.attachment.page_fd)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(self.welcome.endpoint)
        self._numbers = itertools.count(1)
        self.snapshots = 0  # number of requested snapshots; the id of the newest
        self._loads = itertools.count(1)
        self._kept: dict[int, object] = {}  # by snapshot: buffers that are being read

    def ask(self, body: RequestBody, limit_s: float = LIMIT_S) -> ReplyBody:
        """Sends a request over ZeroMQ; raises the failure that the daemon returns."""
        number = next(self._numbers)
        self._send(number, body)
        deadline = time.monotonic() + limit_s
        while self._answered(deadline):
            reply = codec.decode(self._socket.recv(), Reply, bytes_max=packing.REPLY_BYTES_MAX)
            if reply.number != number:
                continue
            if isinstance(reply.body, Failure):
                found = reply.body
                raise error_from_wire(found.code, found.message, found.hint, found.retryable)
            return reply.body
        raise NoAnswerError(f"no answer to {body}")

    def ask_again(self, body: RequestBody) -> ReplyBody:
        """Repeats a request until it is answered: a message that is sent before libzmq notices the
        end of a front is lost. Only for requests that may be sent twice."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return self.ask(body, limit_s=1.0)
            except NoAnswerError:
                if time.monotonic() >= deadline:
                    raise

    def _answered(self, deadline: float) -> bool:
        """False at the deadline, or when the daemon has ended."""
        while time.monotonic() < deadline:
            if self._socket.poll(SLICE_NS // 1_000_000):
                return True
            if not self.native.alive():
                raise DaemonUnreachableError("the daemon has ended")
        return False

    def register(self, size: int, *, memory: bool = False) -> ReplyBody:
        """`memory`: it will also save to memory only."""
        return self.ask(Register(size, levels=2 if memory else 1))

    def begin(
        self, step: int, data: bytes, *, on_busy: str = "wait", fill: bool = True,
        frozen: int = 0, offered: int | None = None, **name: int,
    ) -> int:  # fmt: skip
        """Requests a snapshot of `data`, whose last 8 bytes are its tree; returns its id. Without
        `fill` its last chunk never comes. The `frozen` bytes are offered, or `offered` ones.
        `name`: base, descents and row of the checkpoint; or its level."""
        self.snapshots = snapshot = self.snapshots + 1
        body, tail = data[:-8], data[-8:]
        buffer = ctypes.create_string_buffer(body, len(body))
        for old in [old for old in self._kept if self._is_read(old)]:
            del self._kept[old]
        self._kept[snapshot] = buffer
        self.native.request(snapshot)
        ranges = struct.pack("<QQQ", ctypes.addressof(buffer), 0, len(body))
        self.native.submit(
            snapshot, ranges, b"", tail, len(body), provisional=not fill, step=step,
            skip=on_busy == "skip", frozen_bytes=frozen,
            offered_bytes=frozen if offered is None else offered, **name,
        )  # fmt: skip
        return snapshot

    def until_copying(self, snapshot: int) -> None:
        """Waits until the snapshot has a slot."""
        until(lambda: (now := self.native.state(snapshot)) is not None and now.word == WORD_COPYING)

    def _is_read(self, snapshot: int) -> bool:
        state = self.native.state(snapshot)
        return state is None or state.source_read

    def wait(self, snapshot: int, *, copied: bool = False) -> ClientState:
        """Raises DaemonUnreachableError when the daemon ends first."""
        what = "copied" if copied else "durable"
        deadline = time.monotonic_ns() + int(LIMIT_S * 1e9)
        try:
            while not self.native.wait(
                snapshot, what, min(deadline, time.monotonic_ns() + SLICE_NS)
            ):
                state = self.native.state(snapshot)
                assert time.monotonic_ns() < deadline, f"snapshot {snapshot}: {state}"
                if not self.native.alive():
                    raise DaemonUnreachableError("the daemon has ended")
        except ConnectionResetError:  # the link noticed it
            raise DaemonUnreachableError("the daemon has ended") from None
        state = self.native.state(snapshot)
        assert state is not None
        return state

    def save(self, step: int, data: bytes) -> ClientState:
        """Saves, and waits until this checkpoint or a newer one is durable."""
        state = self.wait(self.begin(step, data))
        durable = (CheckpointState.DURABLE, CheckpointState.GLOBAL, CheckpointState.SUPERSEDED)
        assert state.outcome in durable, state
        return state

    def status(self) -> dict[str, Any]:
        found = self.ask(Status())
        assert isinstance(found, Report)
        return found.document

    def describe(self, snapshot: int, limit_s: float = LIMIT_S) -> Described:
        from pccheck_wire.messages import Describe

        found = self.ask(Describe(snapshot), limit_s)
        assert isinstance(found, Described)
        return found

    def open(self, step: int | None = None, before: int | None = None) -> Opened | Empty:
        while isinstance(found := self.ask(Open(step, before)), Writing | Waiting):
            pass
        assert isinstance(found, Opened | Empty)
        return found

    def load(self, opened: Opened) -> tuple[int, bytes]:
        """Returns the native result code and the payload."""
        load = next(self._loads)
        buffer = ctypes.create_string_buffer(opened.payload_bytes)
        ranges = struct.pack("<QQQ", ctypes.addressof(buffer), 0, opened.payload_bytes)
        self.native.load_start(load, ranges)
        try:
            self.ask(Read(load, opened.sequence, 0, opened.payload_bytes, self.rank))
        except PccheckError:
            with contextlib.suppress(TimeoutError):  # the session is closed in any case
                self.native.load_wait(load, 0)
            raise
        code = self.native.load_wait(load, time.monotonic_ns() + int(LIMIT_S * 1e9))
        return code, buffer.raw

    def restore(self) -> tuple[Opened, bytes]:
        opened = self.open()
        assert isinstance(opened, Opened), opened
        code, data = self.load(opened)
        assert code == 0, code
        self.ask(Restored(opened.sequence))
        return opened, data

    def close(self) -> None:
        self.native.close()
        self._socket.close(0)
        self._context.term()
        self.attachment.close()

    def _send(self, number: int, body: RequestBody) -> None:
        self._socket.send(codec.encode(Request(number, self.welcome.token, body)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
