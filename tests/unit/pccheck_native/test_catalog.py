"""Which checkpoints exist, and which step a group recovers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccheck_native import (
    SLOT_DAMAGED,
    SLOT_GLOBAL,
    SLOT_OFFERED,
    SLOT_PROTECTED,
    Volume,
    create_volume,
    layout,
)
from pccheck_native.catalog import (
    StoredCheckpoint,
    by_rank,
    checkpoint_document,
    checkpoint_documents,
    checkpoints_of,
    common_step,
    newest_first,
    scan,
)
from pccheck_native.identity import CheckpointId
from tests.support.coreloop import Loop


def made(
    rank: int, sequence: int, step: int, *, incarnation: int = 1, world_size: int = 2,
    flags: int = 0, job: str = "job", uid: int = 7,
) -> StoredCheckpoint:  # fmt: skip
    return StoredCheckpoint(
        CheckpointId(uid, job, rank, sequence, step, incarnation, world_size),
        payload_bytes=1, tree_offset=0, tree_bytes=1, wall_ns=0, flags=flags, slot=0,
        volume_path=Path("v"),
    )  # fmt: skip


def volume_of(storage: Path, rank: int = 0, generation: int = 0) -> Path:
    path = layout.volume_path(storage, 7, "job", rank, generation)
    layout.make_directories(path)
    return path


def test_order_is_by_sequence_never_by_step() -> None:
    found = newest_first([made(0, 1, 90), made(0, 3, 10), made(0, 2, 50)])
    assert [c.id.step for c in found] == [10, 50, 90]


def test_a_catalog_of_real_volumes(tmp_path: Path) -> None:
    with Loop(volume_of(tmp_path)) as loop:
        for step in (10, 20):
            last = loop.save(step, [bytearray(1000)], b"tree!", step=step)
        loop.volume.flag(last, set=SLOT_PROTECTED | SLOT_OFFERED | SLOT_GLOBAL, now=True)
        while_locked = scan(tmp_path)
        beside = checkpoints_of(loop.volume, loop.path)
    assert while_locked.checkpoints == beside
    catalog = scan(tmp_path, uid=7, job="job", rank=0)
    assert catalog.unreadable == []
    assert list(catalog.volumes) == [loop.path]
    newest, before = catalog.checkpoints
    assert (newest.id.step, before.id.step) == (20, 10)
    assert (newest.id.uid, newest.id.job, newest.id.rank, newest.id.world_size) == (7, "job", 0, 1)
    assert (newest.tree_offset, newest.tree_bytes, newest.payload_bytes) == (1024, 5, 1029)
    assert (newest.is_protected, newest.is_damaged) == (True, False)
    assert (newest.is_offered, newest.is_known_global) == (True, True)
    assert (before.is_offered, before.is_known_global) == (False, False)
    assert checkpoint_document(newest)["marks"] == ["offered", "global"]
    assert newest.volume_path == loop.path
    assert newest.wall_ns > 0
    assert scan(tmp_path, uid=8).checkpoints == []


def test_generations_of_a_rank_are_one_sequence(tmp_path: Path) -> None:
    with Loop(volume_of(tmp_path, generation=0)) as loop:
        first = loop.save(1, [bytearray(10)], step=1)
    with Loop(volume_of(tmp_path, generation=1), next_sequence=first + 1) as loop:
        second = loop.save(1, [bytearray(10)], step=2)
    assert [c.id.sequence for c in scan(tmp_path).checkpoints] == [second, first]


def test_one_unreadable_volume_hides_no_other(tmp_path: Path) -> None:
    with Loop(volume_of(tmp_path, rank=0)) as loop:
        loop.save(1, [bytearray(10)])
    volume_of(tmp_path, rank=1).write_bytes(bytes(1 << 16))
    with Loop(volume_of(tmp_path, rank=2)):
        pass  # holds rank 0 of the job, under the name of rank 2
    catalog = scan(tmp_path)
    assert len(catalog.checkpoints) == 1
    assert [(u.file.rank, u.code_name) for u in catalog.unreadable] == [
        (1, "NOT_A_VOLUME"),
        (2, "MISPLACED"),
    ]


def test_a_new_volume_has_no_checkpoints(tmp_path: Path) -> None:
    path = volume_of(tmp_path)
    create_volume(
        path, uid=7, job="job", rank=0, world_size=1, slots=3, keep=1, payload_capacity=4096,
        block_bytes=512, record_stride=4096,
    )  # fmt: skip
    volume = Volume(path, writable=False)
    assert checkpoints_of(volume, path) == []
    volume.close()


# -- groups ------------------------------------------------------------------------------------


def test_the_newest_step_that_every_rank_has() -> None:
    ranks = {
        0: [made(0, 1, 10), made(0, 2, 20), made(0, 3, 30)],
        1: [made(1, 1, 10), made(1, 2, 20)],
    }
    common = common_step(ranks, 2)
    assert common is not None
    assert (common[0].id.incarnation, common[0].id.step) == (1, 20)
    assert {rank: c.id.sequence for rank, c in common.items()} == {0: 2, 1: 2}
    assert [c.id.rank for c in common.values()] == [0, 1]


@pytest.mark.parametrize(
    "other", [made(1, 2, 10), made(1, 1, 20), made(1, 1, 10, incarnation=2)],
    ids=["sequence", "step", "incarnation"],
)  # fmt: skip
def test_what_differs_in_anything_is_not_common(other: StoredCheckpoint) -> None:
    assert common_step({0: [made(0, 1, 10)], 1: [made(1, 1, 10)]}, 2) is not None
    assert common_step({0: [made(0, 1, 10)], 1: [other]}, 2) is None


def test_a_later_save_wins_over_a_higher_step_and_an_incarnation() -> None:
    """Sequences are given out once for all ranks, so that they say what came last."""
    ranks = {
        rank: [
            made(rank, 1, 900, incarnation=1),
            made(rank, 2, 100, incarnation=3),
            made(rank, 3, 50, incarnation=2),
        ]
        for rank in (0, 1)
    }
    common = common_step(ranks, 2)
    assert common is not None
    assert (common[0].id.incarnation, common[0].id.step) == (2, 50)


def test_damage_and_other_world_sizes_do_not_count() -> None:
    ranks = {
        0: [made(0, 1, 10), made(0, 2, 20), made(0, 3, 30)],
        1: [made(1, 1, 10), made(1, 2, 20, flags=SLOT_DAMAGED), made(1, 3, 30, world_size=4)],
    }
    common = common_step(ranks, 2)
    assert common is not None
    assert common[0].id.step == 10


@pytest.mark.parametrize("world_size", [0, 3])
def test_a_missing_rank_leaves_nothing_common(world_size: int) -> None:
    ranks = {rank: [made(rank, 1, 10, world_size=world_size)] for rank in (0, 2)}
    assert common_step(ranks, world_size) is None


def test_a_step_saved_twice_counts_once_by_its_newest() -> None:
    common = common_step({0: [made(0, 1, 10, world_size=1), made(0, 4, 10, world_size=1)]}, 1)
    assert common is not None
    assert common[0].id.sequence == 4


def test_documents_say_what_all_ranks_of_a_job_have() -> None:
    found = [
        made(0, 1, 10), made(0, 2, 20), made(1, 1, 10), made(1, 2, 20, flags=SLOT_DAMAGED),
        made(0, 1, 10, job="half"), made(0, 1, 10, world_size=1, job="alone"),
        made(0, 1, 10, uid=8), made(1, 1, 10, uid=9),
    ]  # fmt: skip
    documents = checkpoint_documents(found)
    assert [document["global"] for document in documents] == [
        True, False, True, False, False, False, False, False,
    ]  # fmt: skip
    assert [(d["uid"], d["job"], d["rank"], d["sequence"]) for d in documents] == [
        (one.id.uid, one.id.job, one.id.rank, one.id.sequence) for one in found
    ]


def test_documents_say_what_all_nodes_of_a_job_have() -> None:
    found = [made(0, 1, 10, flags=SLOT_GLOBAL), made(0, 2, 20), made(0, 3, 30)]
    documents = checkpoint_documents(found, {(7, "job", 2), (7, "other", 3), (8, "job", 3)})
    assert [document["global"] for document in documents] == [True, True, False]


def test_by_rank_groups_newest_first() -> None:
    grouped = by_rank([made(1, 1, 10), made(0, 1, 10), made(0, 2, 20)])
    assert {rank: [c.id.sequence for c in found] for rank, found in grouped.items()} == {
        0: [2, 1],
        1: [1],
    }
