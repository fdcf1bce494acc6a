"""A payload in plain memory, without daemon or native code: what the copy thread and a load do."""

from __future__ import annotations

import ctypes
import struct

from pccheck.plan import Snapshot
from pccheck.rebuild import state_of_tree
from pccheck_wire import tree


def build(snapshot: Snapshot) -> bytearray:
    """The payload's bytes; checks that ranges ascend and do not overlap."""
    payload = bytearray(snapshot.payload_bytes)
    end = 0
    for address, offset, nbytes in struct.iter_unpack("<QQQ", snapshot.ranges + snapshot.volatile):
        assert offset >= end and offset % 64 == 0 and nbytes > 0, (offset, end, nbytes)
        end = offset + nbytes
        payload[offset:end] = ctypes.string_at(address, nbytes)
    assert snapshot.tree_offset >= end and snapshot.tree_offset % 64 == 0
    payload[snapshot.tree_offset :] = snapshot.tree
    return payload


def tree_of(snapshot: Snapshot) -> tree.Tree:
    return tree.decode(snapshot.tree, snapshot.tree_offset)


def load(payload: bytearray, ranges: bytes) -> None:
    """Fills packed ranges from the payload."""
    for address, offset, nbytes in struct.iter_unpack("<QQQ", ranges):
        ctypes.memmove(address, bytes(payload[offset : offset + nbytes]), nbytes)


def round_trip(snapshot: Snapshot) -> object:
    """The state that comes back."""
    payload = build(snapshot)
    return state_of_tree(tree_of(snapshot), lambda ranges: load(payload, ranges))
