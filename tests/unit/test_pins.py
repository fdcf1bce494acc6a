"""P7: which checkpoints a run that has not restored may not recycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccheck_native import SLOT_DAMAGED, catalog
from pccheck_native.layout import capacity_for
from pccheckd.retention import pins


def found(*runs: tuple[int, int]) -> list[catalog.Checkpoint]:
    """(sequence, incarnation), newest first."""
    return [
        catalog.Checkpoint(
            uid=0, job="job", rank=0, sequence=sequence, step=sequence, incarnation=incarnation,
            world_size=1, payload_bytes=1, tree_offset=0, tree_bytes=1, wall_ns=0, flags=0, slot=0,
            volume_path=Path("x"),
        )
        for sequence, incarnation in sorted(runs, reverse=True)
    ]  # fmt: skip


RUNS = found((5, 1), (6, 2), (7, 2), (9, 3))


@pytest.mark.parametrize(
    ("pinned", "incarnation", "slots", "wanted"),
    [
        (set(), 4, 4, {9}),
        (set(), 3, 4, {7}),
        ({5}, 3, 4, {5, 7}),
        ({5}, 3, 3, {5}),
        ({5, 7}, 4, 4, {5, 9}),
        ({99}, 3, 4, {7}),
        (set(), 1, 4, set()),
        ({5}, 1, 4, set()),
    ],
)
def test_pins(pinned: set[int], incarnation: int, slots: int, wanted: set[int]) -> None:
    assert pins(RUNS, pinned, incarnation, slots) == wanted


def test_a_damaged_one_is_worth_no_pin() -> None:
    runs = [item._replace(flags=SLOT_DAMAGED) if item.sequence == 9 else item for item in RUNS]
    assert pins(runs, {9}, 4, 3) == {7}


def test_a_new_volume_leaves_room_to_grow_a_little() -> None:
    assert capacity_for(1) == (2 << 20) + (1 << 15)
    assert capacity_for(64 << 20) == (64 + 2 + 1) << 20
