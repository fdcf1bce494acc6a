"""Where views end up in the payload: a section per GPU, whole chunks, staged extents last."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from pccheck.state.devices import HOST
from pccheck.state.extents import (
    INLINE_BYTES_MAX,
    DevicePart,
    Layout,
    Range,
    Shape,
    View,
    lay_out,
    unpack_device,
)
from pccheck_store.reading.loads import devices_of
from pccheck_wire import tree

CHUNK = 4096
STAGING = {device: 1 << 45 | device << 40 for device in range(16)}


def view(
    address: int, nbytes: int, device: int = HOST, *, volatile: bool = False, storage: int = 0,
    frozen: bool = False,
) -> View:  # fmt: skip
    node = tree.Tensor([nbytes], [1], "uint8")
    start = storage or address
    return View("x", node, address, nbytes, start, start, volatile, device, frozen=frozen)


def some_views(rng: random.Random) -> list[View]:
    """Storages of all sizes on up to four places, with views that overlap; places share addresses,
    as memory of different devices might."""
    made: list[View] = []
    for device in rng.sample([HOST, 0, 1, 5], rng.randint(1, 4)):
        address = 1 << 30
        for _ in range(rng.randint(1, 12)):
            address += rng.choice([0, 0, 64, 512, 4096 * 3])
            nbytes = rng.choice([1, 12, 64, 512, 1000, CHUNK, 3 * CHUNK + 5])
            volatile, frozen = rng.random() < 0.3, rng.random() < 0.3
            for _ in range(rng.randint(1, 2)):
                at = rng.randrange(nbytes)
                made.append(
                    view(address + at, rng.randint(1, nbytes - at), device,
                         volatile=volatile, storage=address, frozen=frozen)
                )  # fmt: skip
            address += -(-nbytes // 64) * 64
    rng.shuffle(made)
    return made


@pytest.mark.parametrize("device", [HOST, 0])
def test_what_is_frozen_lies_together_in_front(device: int) -> None:
    views = [view(4096 + n * 1024, 512, device, frozen=n % 2 == 0) for n in range(8)]
    views[7].volatile = views[6].volatile = True  # frozen, too: may have been changed
    tied = view(4096, 64, device, storage=4096, frozen=False)  # a part of it trains
    layout = lay_out([*views, tied], Shape(chunk_bytes=CHUNK))
    where = [layout.extents[one.node.extent].offset for one in views]
    assert sorted(where[2:6:2]) == where[2:6:2] == [0, 512]
    assert min(where[1:6:2] + where[:1]) >= 1024
    assert layout.frozen == 1024


def ranges_of(part: DevicePart) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("<QQQII", part.ranges(STAGING)))


def source_of(layout: Layout, view: View, part: DevicePart) -> int:
    """From which address the byte of the payload comes that is the view's first one."""
    extent = layout.extents[view.node.extent]
    at = extent.offset + view.node.offset
    (found,) = (
        (address, offset)
        for address, offset, nbytes, device, _ in ranges_of(part)
        if offset <= at and at + view.nbytes <= offset + nbytes and device == view.device
    )
    return found[0] + at - found[1]


def staged_from(part: DevicePart, device: int, address: int) -> int:
    """What was copied to this address of the staging memory."""
    at = address - STAGING[device]
    for source, offset, nbytes in struct.iter_unpack(
        "<QQQ", part.aside.get(device, b"") + part.staged.get(device, b"")
    ):
        if offset <= at < offset + nbytes:
            return int(source + at - offset)
    raise AssertionError(address)


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_layouts_of_random_views(seed: int, aside: bool) -> None:
    rng = random.Random(seed)
    views = some_views(rng)
    layout = lay_out(views, Shape(CHUNK, aside))
    end = 0
    for extent in layout.extents:
        assert extent.offset >= end and extent.offset % 64 == 0
        end = extent.offset + extent.nbytes
    host_start = layout.device.nbytes if layout.device else 0
    assert host_start % CHUNK == 0
    for item in (*layout.gated, *layout.volatile):
        assert item.offset >= host_start
    for one in views:
        extent = layout.extents[one.node.extent]
        assert one.node.offset + one.nbytes <= extent.nbytes
        assert (extent.offset < host_start) is (one.device != HOST)
    if layout.device is None:
        return
    check_sections(layout.device)
    for one in views:
        if one.device == HOST:
            continue
        source = source_of(layout, one, layout.device)
        if source != one.address:
            assert staged_from(layout.device, one.device, source) == one.address
        assert source == one.address or aside or any(
            other.volatile and other.node.extent == one.node.extent for other in views
        )  # fmt: skip


def check_sections(part: DevicePart) -> None:
    packed = part.ranges(STAGING)
    assert devices_of(packed) == list(part.devices)
    assert part.mask == sum(1 << device for device in part.devices)
    owner: dict[int, int] = {}
    end = 0
    for _, offset, nbytes, device, zero in struct.iter_unpack("<QQQII", packed):
        assert offset >= end and zero == 0
        end = offset + nbytes
        for chunk in range(offset // CHUNK, (end - 1) // CHUNK + 1):
            assert owner.setdefault(chunk, device) == device  # one GPU fills a chunk
    assert sorted(owner) == list(range(part.nbytes // CHUNK))  # and no chunk is all gap
    for copies in (part.staged, part.aside):
        for packed in copies.values():
            before = 0
            for _, at, nbytes in struct.iter_unpack("<QQQ", packed):
                assert at >= before
                before = at + nbytes


def test_neighbours_in_memory_are_neighbours_in_the_payload() -> None:
    base = 1 << 40
    views = [view(base + i * 512, 512, 0) for i in (2, 0, 3, 1)]
    layout = lay_out(views, Shape(CHUNK))
    assert layout.device
    found = ranges_of(layout.device)
    assert [item[:3] for item in found] == [(base + i * 512, i * 512, 512) for i in range(4)]
    assert layout.end == layout.device.nbytes == CHUNK


def test_small_tensors_keep_the_distance_that_their_allocator_gave_them() -> None:
    base = 1 << 40
    views = [view(base + i * 512, 4, 0) for i in range(3)]
    views += [view(base + 4096, 4, 0), view(base + 4096 + 20, 4, 0), view(base + 4096 + 64, 4, 0)]
    layout = lay_out(views, Shape(CHUNK))
    assert layout.device
    found = [item[:2] for item in ranges_of(layout.device)]
    assert found == [
        (base, 0), (base + 512, 512), (base + 1024, 1024),
        (base + 4096, 1088), (base + 4116, 1152),  # too far; at no boundary
        (base + 4160, 1216),
    ]  # fmt: skip


def test_gated_extents_come_before_staged_ones() -> None:
    base = 1 << 40
    views = [
        view(base, 512, 0, volatile=True), view(base + 512, 512, 0),
        view(base + 1024, 512, 0, volatile=True), view(base + 1536, 100, 0),
    ]  # fmt: skip
    part = lay_out(views, Shape(CHUNK)).device
    assert part and part.staging_bytes == {0: 1024} and not part.aside
    assert [item[:3] for item in ranges_of(part)] == [
        (base + 512, 0, 512), (base + 1536, 512, 100), (STAGING[0], 640, 1024),
    ]  # fmt: skip
    assert part.staged[0] == struct.pack("<6Q", base, 0, 512, base + 1024, 512, 512)


def test_the_device_snapshot_has_the_same_payload_and_stages_everything() -> None:
    views = [view(1 << 40, 512, 0), view(2 << 40, 512, 0, volatile=True), view(3 << 40, 64)]
    plain, aside = lay_out(views, Shape(CHUNK)), lay_out(views, Shape(CHUNK, aside=True))
    assert plain.extents == aside.extents and plain.end == aside.end
    assert aside.device and aside.device.all_staged
    assert aside.device.staging_bytes == {0: 1024}
    assert aside.device.aside[0] == struct.pack("<3Q", 1 << 40, 0, 512)
    assert aside.device.staged[0] == struct.pack("<3Q", 2 << 40, 512, 512)
    assert [item[:3] for item in ranges_of(aside.device)] == [(STAGING[0], 0, 1024)]


def test_host_and_device_memory_never_share_an_extent() -> None:
    views = [view(4096, 64), view(4096, 64, 0), view(4096, 64, 1)]
    layout = lay_out(views, Shape(CHUNK))
    assert len(layout.extents) == 3
    assert layout.device and layout.device.devices == (0, 1) and layout.device.nbytes == 2 * CHUNK
    assert layout.gated == [Range(4096, 2 * CHUNK, 64)]


def test_a_little_host_memory_beside_gpus_is_copied_at_once() -> None:
    gpu = view(1 << 40, 512, 0)
    layout = lay_out([gpu, view(4096, INLINE_BYTES_MAX)], Shape(CHUNK))
    assert layout.inline and [len(packed) for packed in layout.packed(inline=True)] == [0, 24]
    layout = lay_out([gpu, view(4096, INLINE_BYTES_MAX + 1)], Shape(CHUNK))
    assert not layout.inline and [len(packed) for packed in layout.packed(inline=False)] == [24, 0]
    assert not lay_out([view(4096, 8)], Shape(CHUNK)).inline  # without GPUs nothing has changed


def test_packed_ranges_follow_the_staging_memory() -> None:
    part = lay_out([view(1 << 40, 64, 0, volatile=True)], Shape(CHUNK)).device
    assert part
    one = part.ranges({0: 4096})
    assert part.ranges({0: 4096}) is one
    assert part.ranges({0: 8192}) == struct.pack("<QQQII", 8192, 0, 64, 0, 0)


def test_ranks_share_what_trains_as_well_as_all() -> None:
    """What is frozen is written once: it must not leave all that trains to one rank."""
    sizes = {0: 8192, 1: 2048, 2: 1024, 3: 1024, 4: 4096}  # 0 and 4 are frozen
    loads = []
    for rank in range(2):
        views = [view(n << 20, size, frozen=n in (0, 4)) for n, size in sizes.items()]
        for one in views:
            one.shared = True
        layout = lay_out(views, Shape(CHUNK, rank=rank, world_size=2))
        loads.append((layout.frozen, layout.end - layout.frozen))
    assert loads == [(8192, 2048), (4096, 2048)]


def test_memory_that_cannot_be_mapped_is_laid_out_last() -> None:
    """But for what is staged: that is copied to memory that can be mapped."""
    views = [
        view(1 << 40, 512, 0), view(2 << 40, 100, 0), view(3 << 40, 64, 1),
        view(4 << 40, 512, 0, volatile=True), view(5 << 40, 300, HOST),
    ]  # fmt: skip
    pushed = frozenset({2 << 40, 3 << 40, 4 << 40})
    layout = lay_out(views, Shape(CHUNK, pushed=pushed))
    part = layout.device
    assert part and (part.pulled, part.pushed, part.devices) == ((0,), (0, 1), (0, 1))
    assert (part.mask, part.pulled_bytes, part.nbytes) == (1, CHUNK, 3 * CHUNK)
    assert [item[:3] for item in struct.iter_unpack("<QQQII", part.rest)] == [
        (2 << 40, CHUNK, 100), (3 << 40, 2 * CHUNK, 64),
    ]  # fmt: skip
    pulled = struct.iter_unpack("<QQQII", part.ranges({0: 9 << 40}))
    assert [item[:3] for item in pulled] == [(1 << 40, 0, 512), (9 << 40, 512, 512)]
    aside = lay_out(views, Shape(CHUNK, aside=True, pushed=pushed)).device
    assert aside and not aside.rest and aside.pulled_bytes == aside.nbytes


#: Of ranks that share state.
SHAPES = [Shape(CHUNK, rank=rank, world_size=3, replica=True) for rank in range(3)]


def shared_views(seed: int) -> dict[int, View]:
    """The same state, by number, in memory that each rank has arranged otherwise."""
    rng, at, made = random.Random(seed), 1 << 30, {}
    sizes = [(n * 977) % 5000 + 1 for n in range(12)]
    for number in rng.sample(range(len(sizes)), len(sizes)):
        at += rng.choice([0, 64, 512, 40960])
        made[number] = view(at, sizes[number], 0, frozen=number == 3)
        made[number].path, made[number].shared = f"x.{number}", True
        at += -(-sizes[number] // 64) * 64
    return dict(sorted(made.items()))


def laid_out(views: dict[int, View], rank: int, **shape: Any) -> DevicePart:
    made = Shape(CHUNK, rank=rank, world_size=3, replica=True)._replace(**shape)
    part = lay_out(list(views.values()), made).device
    assert part is not None
    return part


def place_of(views: dict[int, View], address: int) -> tuple[int, int]:
    """The tensor that the address lies in, and where."""
    return next(
        (number, address - one.address)
        for number, one in views.items()
        if one.address <= address < one.address + one.nbytes
    )


def test_each_rank_finds_what_another_one_stores() -> None:
    states = [shared_views(seed) for seed in range(3)]
    parts = [laid_out(views, rank) for rank, views in enumerate(states)]
    assert len({part.replica.id for part in parts}) == 1 and parts[0].replica.id
    for mine, own in zip(states, parts, strict=True):
        sources = {item.offset: item.address for item, _ in unpack_device(own.unstaged)}
        shares = list(struct.iter_unpack("<QQQ", own.replica.shares))
        assert shares == sorted(shares, key=lambda share: share[1])
        assert sum(nbytes for _, _, nbytes in shares) == sum(
            item.nbytes for item, _ in unpack_device(own.unstaged)
        )
        for theirs, other in zip(states, parts, strict=True):
            whole = {item.offset: item for item, _ in unpack_device(other.replica.ranges)}
            assert list(whole) == sorted(whole) and len(whole) == len(theirs)
            for at, offset, nbytes in shares:
                assert whole[at].nbytes == nbytes
                here, there = place_of(mine, sources[offset]), place_of(theirs, whole[at].address)
                assert here == there


def test_no_other_rank_has_what_one_rank_alone_stores() -> None:
    views = shared_views(0)
    assert not laid_out(views, 0, replica=False).replica.id
    assert not laid_out(views, 0, aside=True).replica.id
    everything = frozenset(one.address for one in views.values())
    assert not laid_out(views, 0, pushed=everything).replica.id
    views[20] = view(1 << 40, 100, 0)
    assert not laid_out(views, 0).replica.id
    del views[20]
    assert laid_out(views, 0, first=3).replica.id != laid_out(views, 0).replica.id != 0
    views[0].volatile = True
    parts = [laid_out(views, rank) for rank in range(3)]
    assert [bool(part.replica.id) for part in parts].count(False) == 1  # where it is staged
    for part in parts:
        assert views[0].address not in exposed(part)
    views[0].volatile = False
    parts = [laid_out(views, rank, pushed=frozenset({views[3].address})) for rank in range(3)]
    assert [bool(part.replica.id) for part in parts].count(False) == 1  # where it is pushed
    for part in parts:
        assert views[3].address not in exposed(part)


def test_a_tensor_that_ranks_arrange_otherwise_is_other_bytes() -> None:
    names = set()
    for strides, dtype, begin in [
        ([10, 1], "uint8", 0), ([1, 10], "uint8", 0), ([10, 1], "int8", 0), ([10, 1], "uint8", 20)
    ]:  # fmt: skip
        views = shared_views(0)
        views[20] = view(1 << 40, 100, 0)
        views[20].node = tree.Tensor([10, 10], strides, dtype)
        views[21] = view(1 << 40 | begin, 50, 0, storage=1 << 40)
        for number in (20, 21):
            views[number].path, views[number].shared = f"y.{number}", True
        assert len({lay_out(list(views.values()), shape).division for shape in SHAPES}) == 1
        names |= {lay_out(list(views.values()), shape).replica_id for shape in SHAPES}
    assert len(names) == 4


def exposed(part: DevicePart) -> set[int]:
    """The addresses of what other ranks may read."""
    return {item.address for item, _ in unpack_device(part.replica.ranges)}
