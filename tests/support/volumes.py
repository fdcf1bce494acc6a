"""Storage directories with real volumes, written through the native core in this process."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from pccheck_native import catalog, create_volume, layout
from pccheck_wire import tree
from pccheck_wire.tree import Mapping, Named, Node, Sequence, Tag, Tensor
from tests.support.coreloop import BLOCK_BYTES, STRIDE_BYTES, Loop, plan

UID = 7
WIDE = 40_000  # float32 elements of the large tensor: many blocks, several chunks
WIDE_AT = 64  # its offset in the payload


def mapping(**items: Node) -> Mapping:
    return Mapping(Tag.DICT, list(items.items()))


def numbers(step: int, count: int) -> list[float]:
    return [float(step * 1000 + index % 997) for index in range(count)]


def floats(step: int, count: int) -> bytearray:
    return bytearray(struct.pack(f"<{count}f", *numbers(step, count)))


def state_of(step: int) -> tuple[list[bytearray], Node]:
    """Extents and root of a state with a tensor of each kind (contiguous, tied, transposed,
    expanded, 0-d, empty, complex, of a dtype that safetensors lacks) and a leaf of each type."""
    extents = [
        floats(step, 12),
        floats(step, WIDE),
        bytearray(struct.pack("<4H", *range(step, step + 4))),
        bytearray(struct.pack("<4d", 1, 2, 3, step)),
        bytearray(struct.pack("<3i", step, -1, 2)),
    ]
    model = mapping(
        weight=Tensor([3, 4], [4, 1], "float32", 0, 0, 0),
        tied=Tensor([3, 4], [4, 1], "float32", 0, 0, 0),
        transposed=Tensor([4, 3], [1, 4], "float32", 0, 0, 0),
        row=Tensor([4], [1], "float32", 0, 0, 16),
        expanded=Tensor([2, 3], [0, 1], "float32", 0, 0, 0),
        wide=Tensor([WIDE], [1], "float32", tree.PARAMETER | tree.REQUIRES_GRAD, 1, 0),
        half=Tensor([4], [1], "bfloat16", 0, 2, 0),
        scalar=Tensor([], [], "float32", 0, 0, 4),
        empty=Tensor([0, 5], [5, 1], "int64"),
        doubles=Tensor([2], [1], "complex128", 0, 3, 0),
    )
    root = mapping(
        model=model,
        optimizer=mapping(lr=0.1, name="adamw", betas=Sequence(Tag.TUPLE, [0.9, 0.999])),
        array=tree.Array("<i4", [3], "C", 12, 4, 0),
        factor=tree.Scalar("<f4", struct.pack("<f", 2.5)),
        counts=Mapping(Tag.DEFAULT, [("a", 1)], factory="int"),
        steps=step,
        infinite=float("inf"),
        kind=Named(Tag.DTYPE, "float32"),
        raw=b"\x00\x01",
    )
    return extents, root


class Rank(Loop):
    """The volume of one rank, open for saving."""

    def __init__(
        self, storage: Path, *, job: str = "job", rank: int = 0, world_size: int = 1,
        incarnation: int = 1, uid: int = UID, slots: int = 5, keep: int = 3,
    ) -> None:  # fmt: skip
        path = layout.volume_path(storage, uid, job, rank)
        if not path.exists():
            storage.mkdir(exist_ok=True)
            layout.make_directories(path)
            create_volume(
                path, uid=uid, job=job, rank=rank, world_size=world_size, slots=slots, keep=keep,
                payload_capacity=1 << 20, block_bytes=BLOCK_BYTES, record_stride=STRIDE_BYTES,
            )  # fmt: skip
        super().__init__(path)
        self.world_size = world_size
        self.incarnation = incarnation
        self._snapshot = 0

    def put(self, step: int, *, state: tuple[list[bytearray], Node] | None = None) -> int:
        """Saves a state; returns its sequence when the checkpoint is durable."""
        extents, root = state or state_of(step)
        offsets = plan([len(extent) for extent in extents], 0).offsets
        described = tree.Tree(
            step,
            mapping(note=f"step {step}"),
            True,
            [tree.Extent(at, len(data)) for at, data in zip(offsets, extents, strict=True)],
            root,
        )
        self._snapshot += 1
        return self.save(self._snapshot, extents, tree.encode(described), step=step)


def make(storage: Path, *steps: int, **rank: object) -> Path:
    """A storage directory with checkpoints of these steps; returns it."""
    with Rank(storage, **rank) as made:  # type: ignore[arg-type]
        for step in steps:
            made.put(step)
    return storage


def damage(storage: Path, step: int, *, at: int = WIDE_AT, rank: int = 0) -> None:
    """Inverts the byte of a checkpoint's payload at this offset: its block no longer matches its
    checksum. `at` < 0 counts from the tree, which follows the tensors."""
    found = catalog.scan(storage, rank=rank).checkpoints
    (one,) = (c for c in found if c.id.step == step)
    descriptor = os.open(one.volume_path, os.O_RDWR)
    try:
        stride, slot_stride = struct.unpack("<QQ", os.pread(descriptor, 16, 80))  # FORMAT.md
        place = 2 * stride + one.slot * slot_stride + (at if at >= 0 else one.tree_offset + at)
        byte = os.pread(descriptor, 1, place)[0] ^ 0xFF
        os.pwrite(descriptor, bytes([byte]), place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bases(storage: Path) -> dict[tuple[int, int], int]:
    """For checkpoints that refer to another checkpoint: rank and step -> step of the other."""
    found = catalog.scan(storage).checkpoints
    steps = {(one.id.rank, one.id.sequence): one.id.step for one in found}
    return {(one.id.rank, one.id.step): steps[one.id.rank, one.base] for one in found if one.base}


def lose_record(path: Path) -> None:
    """Damages both replicas of the newest commit record of a volume, as two bad sectors would."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        (stride,) = struct.unpack("<Q", os.pread(descriptor, 8, 80))  # FORMAT.md
        tail = os.fstat(descriptor).st_size - 2 * stride
        numbers = {
            head: struct.unpack("<Q", os.pread(descriptor, 8, head + 48))[0] for head in (0, stride)
        }
        newest = max(numbers, key=lambda head: numbers[head])
        for place in (newest, tail + newest):
            os.pwrite(descriptor, b"\xee" * 512, place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wipe_records(path: Path) -> Callable[[], None]:
    """Zeroes every commit record of a volume that a process has open, as if the disk returned
    zeros; returns a function that writes the records back."""

    def write(parts: dict[int, bytes]) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            for place, data in parts.items():
                os.pwrite(descriptor, data, place)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    data = path.read_bytes()
    (stride,) = struct.unpack("<Q", data[80:88])  # FORMAT.md
    tail = len(data) - 2 * stride
    records = {at: data[at : at + stride] for at in (0, stride, tail, tail + stride)}
    write({at: bytes(stride) for at in records})
    return lambda: write(records)
