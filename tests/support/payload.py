"""A payload in plain memory, without daemon or native code: does what a copy and a load do.

GPU memory is host memory here; `FakeDevices` only defines which GPU a tensor is on.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from pccheck.restoring.rebuild import state_of_tree
from pccheck.state import devices
from pccheck.state.extents import DevicePart
from pccheck.state.plan import Snapshot
from pccheck_wire import tree


class FakeDevices:
    """Stands in for `pccheck.state.devices`, and reports storages as on GPUs."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[int, object]] = {}  # address -> GPU, what keeps it
        self.synchronized: list[int] = []
        self.streams: dict[int, int] = {}
        self.followed: list[tuple[int, int]] = []
        self.captures = False
        self.emptied: list[int] = []

    def install(self, patch: object) -> FakeDevices:
        for name in (
            "device_of", "current_stream", "follow", "synchronize", "capturing", "empty",
            "empty_cache",
        ):  # fmt: skip
            patch.setattr(devices, name, getattr(self, name))  # type: ignore[attr-defined]
        return self

    def put(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = (device, storage)
        return tensor

    def device_of(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided:
            return devices.HOST
        return self._storages.get(tensor.untyped_storage().data_ptr(), (devices.HOST, None))[0]

    def current_stream(self, device: int) -> int:
        return self.streams.get(device, 100 + device)

    def follow(self, device: int, stream: int) -> None:
        self.followed.append((device, stream))

    def synchronize(self, device: int) -> None:
        self.synchronized.append(device)

    def capturing(self) -> bool:
        return self.captures

    def empty_cache(self, device: int) -> None:
        self.emptied.append(device)

    def empty(
        self, shape: list[int], strides: list[int], dtype: torch.dtype, like: torch.Tensor
    ) -> torch.Tensor:
        made = torch.empty_strided(shape, strides, dtype=dtype)
        return self.put(made, self.device_of(like))


def build(snapshot: Snapshot) -> bytearray:
    """The payload's bytes; checks that ranges ascend and do not overlap."""
    payload = bytearray(snapshot.payload_bytes)
    end = _build_devices(snapshot.device, payload) if snapshot.device else 0
    for address, offset, nbytes in struct.iter_unpack("<QQQ", snapshot.ranges + snapshot.volatile):
        assert offset >= end and offset % 64 == 0 and nbytes > 0, (offset, end, nbytes)
        end = offset + nbytes
        payload[offset:end] = ctypes.string_at(address, nbytes)
    assert snapshot.tree_offset >= end and snapshot.tree_offset % 64 == 0
    payload[snapshot.tree_offset :] = snapshot.tree
    return payload


def _build_devices(part: DevicePart, payload: bytearray) -> int:
    """Stages, then copies the device part; returns where that part ends."""
    room = {d: ctypes.create_string_buffer(n) for d, n in part.staging_bytes.items()}
    staging = {d: ctypes.addressof(memory) for d, memory in room.items()}
    for copies in (part.aside, part.staged):
        for device, packed in copies.items():
            for address, at, nbytes in struct.iter_unpack("<QQQ", packed):
                assert at + nbytes <= part.staging_bytes[device]
                ctypes.memmove(staging[device] + at, address, nbytes)
    end = 0
    for address, offset, nbytes, _, _ in struct.iter_unpack("<QQQII", part.ranges(staging)):
        assert offset >= end and offset % 64 == 0 and nbytes > 0, (offset, end, nbytes)
        end = offset + nbytes
        payload[offset:end] = ctypes.string_at(address, nbytes)
    assert end <= part.nbytes
    return part.nbytes


def tree_of(snapshot: Snapshot) -> tree.Tree:
    return tree.decode(snapshot.tree, snapshot.tree_offset)


def load(payload: bytearray, ranges: bytes, device_ranges: bytes = b"") -> None:
    """Fills packed ranges from the payload."""
    targets = list(struct.iter_unpack("<QQQ", ranges))
    targets += [item[:3] for item in struct.iter_unpack("<QQQII", device_ranges)]
    for address, offset, nbytes in targets:
        ctypes.memmove(address, bytes(payload[offset : offset + nbytes]), nbytes)


def round_trip(snapshot: Snapshot) -> object:
    """The state that comes back."""
    payload = build(snapshot)
    return state_of_tree(tree_of(snapshot), lambda ranges: load(payload, ranges))
