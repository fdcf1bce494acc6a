"""Both ends of push in one process: a tenant with a volume, and the client that feeds it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pccheck_native import (
    WORD_REFUSED,
    WORD_REQUESTED,
    Client,
    Event,
    Events,
    Pool,
    Tenant,
    Volume,
    create_volume,
)

BLOCK_BYTES = 4096
CHUNK_BYTES = 32 * 1024
STRIDE_BYTES = 4096
LIMIT_S = 240.0


def deadline(seconds: float = LIMIT_S) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def address(memory: bytearray) -> int:
    """The address of the bytes; the caller must keep them alive and not resize them."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def pack(ranges: Sequence[tuple[int, int, int]]) -> bytes:
    return b"".join(struct.pack("<QQQ", *one) for one in ranges)


def make_volume(path: Path, *, payload_capacity: int = 1 << 20, **changes: int) -> Path:
    """A small volume of rank 0 of job "job" of uid 7."""
    numbers = {
        "uid": 7, "rank": 0, "world_size": 1, "slots": 4, "keep": 2, "block_bytes": BLOCK_BYTES,
        "record_stride": STRIDE_BYTES, **changes,
    }  # fmt: skip
    create_volume(path, job="job", payload_capacity=payload_capacity, **numbers)  # type: ignore[arg-type]
    return path


@dataclass(frozen=True, slots=True)
class Layout:
    """A payload: extents, each at a 64-byte boundary, then the tree."""

    offsets: list[int]
    tree_offset: int
    payload_bytes: int


def plan(sizes: Sequence[int], tree_bytes: int) -> Layout:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = -(-(end + size) // 64) * 64
    return Layout(offsets, end, end + tree_bytes)


#: Events of the queue, which `Loop.take` leaves out.
QUEUE = frozenset({"requested", "begun", "waits", "refused"})


class Loop:
    """Everything open; `save` and `load` do what client and daemon do between them. A snapshot
    that is submitted waits until `begin`."""

    incarnation = 1
    world_size = 1

    def __init__(
        self, path: Path, *, chunks: int = 16, engine: str = "pwrite", **volume: int
    ) -> None:
        self.path = path if path.exists() else make_volume(path, **volume)
        self.volume = Volume(self.path, writable=True, engine=engine)
        self.pool = Pool(64 << 20)
        self.events = Events()
        self.tenant = Tenant(
            self.pool, self.events, id=1, chunk_bytes=CHUNK_BYTES, block_bytes=BLOCK_BYTES,
            chunk_capacity=64, lanes=2, writers=2,
        )  # fmt: skip
        self.tenant.policy(held=True)
        self.tenant.bind(self.volume)
        self.tenant.grow(chunks * CHUNK_BYTES)
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page = self.tenant.attach(self.far.fileno(), 1)
        try:
            self.client = Client(self.near.fileno(), page)
        finally:
            os.close(page)

    def submit(
        self, snapshot: int, extents: Sequence[bytearray], tree: bytes, *, inline: int = 0,
        **request: int,
    ) -> Layout:  # fmt: skip
        """Requests and submits a snapshot; copies the last `inline` extents during the call."""
        layout = plan([len(extent) for extent in extents], len(tree))
        ranges = [
            (address(extent), offset, len(extent))
            for extent, offset in zip(extents, layout.offsets, strict=True)
        ]
        kept = len(ranges) - inline
        self.client.request(snapshot)
        self.client.submit(
            snapshot, pack(ranges[:kept]), pack(ranges[kept:]), tree, layout.tree_offset,
            **{"step": snapshot} | request,  # type: ignore[arg-type]
        )  # fmt: skip
        return layout

    def begin(self, snapshot: int) -> int:
        """Lets one begin that was submitted; its sequence."""
        self.tenant.policy(numbers=True, incarnation=self.incarnation, world_size=self.world_size)
        self.tenant.noted()
        until_s = time.monotonic() + LIMIT_S
        while (now := self.client.state(snapshot)) is None or now.word == WORD_REQUESTED:
            assert time.monotonic() < until_s, now
            self.tenant.retry()
            time.sleep(0.001)
        self.tenant.policy(held=True)
        assert now.word != WORD_REFUSED, now
        return now.sequence

    def take(self) -> list[Event]:
        """What was reported of copies and saves."""
        return [event for event in self.events.take() if event.kind not in QUEUE]

    def save(
        self, snapshot: int, extents: Sequence[bytearray], tree: bytes = b"tree", *, step: int = 0,
        inline: int = 0, frozen: int = 0,
    ) -> int:  # fmt: skip
        """Saves, waits until the checkpoint is durable, and returns its sequence."""
        self.submit(snapshot, extents, tree, inline=inline, step=step, frozen_bytes=frozen)
        sequence = self.begin(snapshot)
        assert self.client.wait(snapshot, "copied", deadline())
        assert self.client.wait(snapshot, "durable", deadline())
        return sequence

    def load(self, sequence: int, sizes: Sequence[int], tree_bytes: int) -> list[bytearray]:
        """Loads through the tenant into new memory; the tree comes last."""
        layout = plan(sizes, tree_bytes)
        into = [bytearray(size) for size in (*sizes, tree_bytes)]
        places = (*layout.offsets, layout.tree_offset)
        ranges = [(address(m), o, len(m)) for m, o in zip(into, places, strict=True) if m]
        self.client.load_start(sequence, pack(ranges))
        self.tenant.load(self.volume, sequence, 0, layout.payload_bytes, sequence)
        assert self.client.load_wait(sequence, deadline()) == 0
        return into

    def close(self) -> None:
        self.client.close()
        self.near.close()
        self.tenant.close()
        self.far.close()
        self.events.close()
        self.pool.close()
        self.volume.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        with contextlib.suppress(OSError):
            self.close()
