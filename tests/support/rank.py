"""A rank without torch: the wire, the native link and bytes of its own. For tests of the daemon."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import struct
import time
from pathlib import Path
from typing import Self

import zmq

from pccheck_native import Link, LinkState
from pccheck_wire import attach, codec
from pccheck_wire.errors import PccheckError, error_from_wire
from pccheck_wire.messages import (
    PROTOCOL_VERSION,
    Begin,
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
    Request,
    RequestBody,
    Restored,
    Role,
)
from tests.support.daemon import PATIENCE

LIMIT_S = 30.0 * PATIENCE


def payload_of(seed: int, size: int) -> bytes:
    """Bytes that can be made again from the seed."""
    word = struct.pack("<QQ", seed * 0x9E3779B97F4A7C15 % 2**64, size)
    return (word * (size // len(word) + 1))[:size]


class Rank:
    """One session, as trainer by default; `save` and `load` whole payloads of bytes."""

    def __init__(
        self,
        socket: Path,
        *,
        job: str = "job",
        rank: int = 0,
        world_size: int = 1,
        launch: str = "",
        fresh: bool = False,
        role: Role = Role.TRAINER,
    ) -> None:
        hello = Hello(
            PROTOCOL_VERSION, role, "test", os.getpid(), job=job, rank=rank, launch=launch,
            world_size=world_size, local_world_size=world_size, fresh=fresh,
        )  # fmt: skip
        self.attachment = attach.connect(hello, socket)
        self.welcome = self.attachment.welcome
        self.link = Link(self.attachment.link_fd, self.attachment.page_fd)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(self.welcome.endpoint)
        self._numbers = itertools.count(1)
        self._snapshots = itertools.count(1)
        self._loads = itertools.count(1)
        self._kept: list[object] = []

    def ask(self, body: RequestBody, limit_s: float = LIMIT_S) -> ReplyBody:
        """Over ZeroMQ; raises the daemon's failure."""
        number = next(self._numbers)
        self._send(number, body)
        deadline = time.monotonic() + limit_s
        while self._socket.poll(int(max(0, deadline - time.monotonic()) * 1000)):
            reply = codec.decode(self._socket.recv(), Reply, bytes_max=codec.REPLY_BYTES_MAX)
            if reply.number != number:
                continue
            if isinstance(reply.body, Failure):
                found = reply.body
                raise error_from_wire(found.code, found.message, found.hint, found.retryable)
            return reply.body
        raise AssertionError(f"no answer to {body}")

    def register(self, size: int) -> ReplyBody:
        return self.ask(Register(size))

    def begin(self, step: int, data: bytes, *, on_busy: str = "wait", fill: bool = True) -> int:
        """Asks for a snapshot of `data`, whose last 8 bytes are its tree; the snapshot's id."""
        snapshot = next(self._snapshots)
        body, tail = data[:-8], data[-8:]
        buffer = ctypes.create_string_buffer(body, len(body))
        self._kept.append(buffer)  # until the source was read
        self.link.request(snapshot)
        self._send(0, Begin(snapshot, step, len(data), len(body), len(tail), on_busy))
        if fill:
            ranges = struct.pack("<QQQ", ctypes.addressof(buffer), 0, len(body))
            self.link.submit(snapshot, ranges, b"", tail, len(body))
        return snapshot

    def wait(self, snapshot: int, *, copied: bool = False) -> LinkState:
        deadline = time.monotonic_ns() + int(LIMIT_S * 1e9)
        waiting = self.link.wait_copied if copied else self.link.wait_durable
        assert waiting(snapshot, deadline), f"snapshot {snapshot}: {self.link.state(snapshot)}"
        state = self.link.state(snapshot)
        assert state is not None
        return state

    def save(self, step: int, data: bytes) -> LinkState:
        """Saves and waits until it, or a newer one, is durable."""
        state = self.wait(self.begin(step, data))
        durable = (CheckpointState.DURABLE, CheckpointState.GLOBAL, CheckpointState.SUPERSEDED)
        assert state.outcome in durable, state
        return state

    def describe(self, snapshot: int) -> Described:
        from pccheck_wire.messages import Describe

        found = self.ask(Describe(snapshot))
        assert isinstance(found, Described)
        return found

    def open(self, step: int | None = None, before: int | None = None) -> Opened | Empty:
        found = self.ask(Open(step, before))
        assert isinstance(found, Opened | Empty)
        return found

    def load(self, opened: Opened) -> tuple[int, bytes]:
        """The native result code and the payload."""
        load = next(self._loads)
        buffer = ctypes.create_string_buffer(opened.payload_bytes)
        ranges = struct.pack("<QQQ", ctypes.addressof(buffer), 0, opened.payload_bytes)
        self.link.load_start(load, ranges)
        try:
            self.ask(Read(load, opened.sequence, 0, opened.payload_bytes))
        except PccheckError:
            with contextlib.suppress(TimeoutError):  # it is closed all the same
                self.link.load_wait(load, 0)
            raise
        code = self.link.load_wait(load, time.monotonic_ns() + int(LIMIT_S * 1e9))
        return code, buffer.raw

    def restore(self) -> tuple[Opened, bytes]:
        opened = self.open()
        assert isinstance(opened, Opened), opened
        code, data = self.load(opened)
        assert code == 0, code
        self.ask(Restored(opened.sequence))
        return opened, data

    def close(self) -> None:
        self.link.close()
        self._socket.close(0)
        self._context.term()
        self.attachment.close()

    def _send(self, number: int, body: RequestBody) -> None:
        self._socket.send(codec.encode(Request(number, self.welcome.token, body)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
