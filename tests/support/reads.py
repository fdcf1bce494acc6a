"""Bytes of a stored checkpoint, as a source gives them."""

from __future__ import annotations

import ctypes
import struct

from pccheck_store.reading.source import Payloads


def read(payloads: Payloads, rank: int, offset: int, length: int) -> bytes:
    """A part of the payload of a rank. Raises as `Payloads` does."""
    data = bytearray(length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    payloads.read_into(rank, offset, length, struct.pack("<QQQ", address, offset, length))
    return bytes(data)
