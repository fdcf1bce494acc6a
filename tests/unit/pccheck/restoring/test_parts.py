"""Replicated state: who stores what, and the ranks' trees merged again."""

from __future__ import annotations

import struct

import pytest
import torch

from pccheck.restoring.inplace import Placement
from pccheck.state.extents import Shape
from pccheck.state.plan import AttachedPlan, Snapshot
from pccheck_wire import parts, tree
from pccheck_wire.errors import DamagedError, StateMismatchError
from tests.support.payload import build, load, tree_of

SIZES = [(400, 30), (7,), (90, 11), (1,), (3000,)]


def model(scale: float = 1.0) -> torch.nn.Module:
    made = torch.nn.Module()
    made.parts = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.full(size, scale * n)) for n, size in enumerate(SIZES)]
    )
    made.register_buffer("seen", torch.full((5,), scale))
    return made


def snapshots(world_size: int, attached: list[dict[str, object]]) -> list[Snapshot]:
    return [
        AttachedPlan(
            attached[rank], mode="sync", shape=Shape(rank=rank, world_size=world_size)
        ).snapshot(1, None)
        for rank in range(world_size)
    ]


def trees(world_size: int) -> list[tree.Tree]:
    made = snapshots(world_size, [{"model": model()} for _ in range(world_size)])
    return [tree_of(one) for one in made]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_each_shared_extent_is_stored_once_and_all_are_found(world_size: int) -> None:
    made = trees(world_size)
    for rank, one in enumerate(made):
        assert len(one.shared()) == len(SIZES)
        stored = [one.extents[i] for i in one.shared() if one.extents[i].offset != tree.ELSEWHERE]
        assert all(extent.owner == rank for extent in stored)
        merged = parts.merge(one, rank, made.__getitem__)
        assert tree.ELSEWHERE not in [extent.offset for extent in merged.extents]
    owners = [made[0].extents[index].owner for index in made[0].shared()]
    assert owners == [made[-1].extents[index].owner for index in made[-1].shared()]
    assert set(owners) == set(range(min(world_size, len(SIZES))))


def test_the_largest_are_spread_first() -> None:
    one = trees(2)[0]
    loads = [0, 0]
    for index in one.shared():
        loads[one.extents[index].owner] += one.extents[index].nbytes
    assert max(loads) == 4 * 400 * 30  # the largest one; all the others are with the other rank


def test_buffers_and_what_is_no_module_are_each_ranks_own() -> None:
    attached: list[dict[str, object]] = [
        {"model": model(), "extra": _Holder(torch.full((9,), float(rank)))} for rank in range(2)
    ]
    for rank, snapshot in enumerate(snapshots(2, attached)):
        described, payload = tree_of(snapshot), build(snapshot)
        own = [extent for extent in described.extents if extent.owner < 0]
        assert sorted(extent.nbytes for extent in own) == [4 * 5, 4 * 9]
        (nine,) = (extent for extent in own if extent.nbytes == 36)
        values = struct.unpack("<9f", payload[nine.offset : nine.offset + 36])
        assert values == (float(rank),) * 9


class _Holder:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def test_ranks_that_saved_other_tensors_are_not_mixed() -> None:
    other = torch.nn.Linear(3, 3)
    made = [tree_of(one) for one in snapshots(2, [{"model": model()}, {"model": other}])]
    with pytest.raises(StateMismatchError, match="ranks 0 and 1"):
        parts.merge(made[0], 0, made.__getitem__)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_whose_tensors_lie_differently_in_memory_restore_the_same_values(rank: int) -> None:
    """Each stores its part as it has it, and DDP compares the strides only when it is made."""
    whole = [torch.randn(8, 6), torch.randn(4, 6)]

    def module(values: list[torch.Tensor], *, by_columns: bool) -> torch.nn.Module:
        made = torch.nn.Module()
        made.parts = torch.nn.ParameterList(
            [v.t().contiguous().t() if by_columns else v.clone() for v in values]
        )
        return made

    saved = snapshots(2, [{"model": module(whole, by_columns=bool(one))} for one in range(2)])
    made, payloads = [tree_of(one) for one in saved], [build(one) for one in saved]
    merged = parts.merge(made[rank], rank, made.__getitem__)
    mine = module([torch.zeros_like(one) for one in whole], by_columns=bool(rank))

    def fill(ranges: bytes, _: bytes = b"") -> None:
        for at, (host, _gpus) in parts.split(ranges).items():
            load(payloads[rank if at < 0 else at], host)

    Placement(merged, {"model": mine}).targets.load(fill)
    assert all(map(torch.equal, mine.state_dict().values(), whole))


def test_a_part_that_nobody_stores_is_damage() -> None:
    made = trees(2)
    extents = [
        extent._replace(offset=tree.ELSEWHERE) if extent.owner == 1 else extent
        for extent in made[1].extents
    ]
    made[1] = tree.Tree(1, None, True, extents, made[1].root)
    with pytest.raises(DamagedError, match="rank 1 does not store"):
        parts.merge(made[0], 0, made.__getitem__)


def test_ranges_are_split_by_rank_and_ascend() -> None:
    shift = parts.RANK_SHIFT
    ranges = [(1, 3 << shift | 64, 8), (2, 128, 8), (3, 3 << shift, 8), (4, 64, 8)]
    packed = b"".join(struct.pack("<QQQ", *item) for item in ranges)
    found = {
        rank: [item[:2] for item in struct.iter_unpack("<QQQ", host)]
        for rank, (host, _) in parts.split(packed).items()
    }
    assert found == {-1: [(4, 64), (2, 128)], 2: [(3, 0), (1, 64)]}


def test_the_tree_of_replicated_state_has_a_version_of_its_own() -> None:
    alone = AttachedPlan({"model": model()}, mode="sync").snapshot(1, None)
    assert tree.decode(alone.tree).shared() == []
    shared = snapshots(2, [{"model": model()}, {"model": model()}])[0]
    assert alone.tree != shared.tree
    old = shared.tree.replace(bytes([tree.VERSION_SHARED]), bytes([tree.VERSION]), 1)
    with pytest.raises(DamagedError, match="belongs to rank"):
        tree.decode(old)
