"""A session page that is written by hand, as no honest client writes it."""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct

from pccheck_native import SNAPSHOTS, WORD_REQUESTED

_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_WAKE = 1
_REQUEST_MESSAGE = 10
#: Offsets in struct pcc_page (pcc_shared.h).
_RING_CAPACITY_AT, _BELL_AT, _HEAD_AT, _TAIL_AT, _ENTRIES_AT = 28, 128, 320, 384, 448
_ENTRY_BYTES, _BLOCK_BYTES = 64, 168
_BLOCKS_AT = _ENTRIES_AT + SNAPSHOTS * _ENTRY_BYTES + SNAPSHOTS * 16 * 32
_PROOF_BYTES, _SAMPLES_BYTES = 17664, 32 * 80  # of a session, and of a snapshot
_END = _BLOCKS_AT + SNAPSHOTS * (_BLOCK_BYTES + _SAMPLES_BYTES) + _PROOF_BYTES


class Page:
    """Over the descriptor of a session's page, which it does not close."""

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, 0)
        self._tail = 0
        self._capacity = self._u32(_RING_CAPACITY_AT)
        self._ring_at = -(-_END // 64) * 64 + 32 * self._capacity

    def request(self, snapshot: int, block: bytes, *, word: int = WORD_REQUESTED) -> None:
        """The block, the word, the message and the bell."""
        entry = snapshot % SNAPSHOTS
        at = _BLOCKS_AT + entry * _BLOCK_BYTES
        self._bytes[at : at + _BLOCK_BYTES] = block
        struct.pack_into(
            "<Q", self._bytes, _ENTRIES_AT + entry * _ENTRY_BYTES, snapshot << 8 | word
        )
        place = self._ring_at + self._tail % self._capacity * 32
        struct.pack_into("<IIQQIi", self._bytes, place, _REQUEST_MESSAGE, 0, snapshot, 0, 0, 0)
        self._tail += 1
        struct.pack_into("<I", self._bytes, _TAIL_AT, self._tail % 2**32)
        self.ring()

    @property
    def is_full(self) -> bool:
        """The daemon has not taken what is in the ring."""
        return self._tail - self._u32(_HEAD_AT) >= self._capacity

    def ring(self) -> None:
        struct.pack_into("<I", self._bytes, _BELL_AT, (self._u32(_BELL_AT) + 1) % 2**32)
        bell = ctypes.c_uint32.from_buffer(self._bytes, _BELL_AT)
        ctypes.CDLL(None).syscall(_FUTEX, ctypes.byref(bell), _WAKE, 2**31 - 1, None, None, 0)
        del bell

    def _u32(self, at: int) -> int:
        return int(struct.unpack_from("<I", self._bytes, at)[0])

    def close(self) -> None:
        self._bytes.close()


def block_of(
    snapshot: int, payload_bytes: int, *, step: int = 1, tree_offset: int = 0, tree_bytes: int = 8,
    level: int = 0, kind: int = 0, flags: int = 0,
) -> bytes:  # fmt: skip
    """struct pcc_request."""
    return struct.pack(
        "<QqQQQ13QIIIIII", snapshot, step, payload_bytes, tree_offset, tree_bytes, *[0] * 13,
        level, kind, flags, 0, 0, 0,
    )  # fmt: skip
