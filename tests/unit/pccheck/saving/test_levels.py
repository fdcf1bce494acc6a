"""Which checkpoints go to the disk, which stay in memory, and what a memory too small does."""

from __future__ import annotations

import warnings

import pytest

from pccheck.options import Options
from pccheck.saving.levels import Levels
from pccheck.warn import PccheckWarning, Warner
from pccheck_native import LEVEL_DEVICE, LEVEL_DISK, LEVEL_MEMORY
from pccheck_wire.errors import CheckpointFailedError, UsageError
from pccheck_wire.units import MIB

DISK, MEMORY = LEVEL_DISK, LEVEL_MEMORY


def make(every: int | str = 1) -> Levels:
    return Levels(Options(durable_every=every), Warner())


@pytest.mark.parametrize(
    ("every", "levels"),
    [
        (1, [DISK] * 6),
        (3, [MEMORY, MEMORY, DISK] * 2),
        ("auto", [MEMORY] * 6),
    ],
)
def test_durable_every_counts_the_calls(every: int | str, levels: list[int]) -> None:
    made = make(every)
    assert made.used == {1: 1, 3: 3, "auto": 2}[every]
    assert [made.choose(None) for _ in levels] == levels


def test_a_level_of_one_call_comes_first() -> None:
    made = make(3)
    given: list[str | None] = ["memory", "disk", None, "memory", "memory", None, None, None]
    assert [made.choose(to) for to in given] == [
        MEMORY, DISK, MEMORY, MEMORY, MEMORY, DISK, MEMORY, MEMORY
    ]  # fmt: skip
    plain = make()
    assert (plain.used, plain.choose("memory"), plain.used) == (1, MEMORY, 3)


def test_what_is_no_level_is_refused() -> None:
    made = make()
    with pytest.raises(UsageError, match=r"to='tape' is not a level.*to=\"memory\""):
        made.choose("tape")
    with pytest.raises(UsageError, match="is not a level"):
        made.choose(["memory"])  # type: ignore[arg-type]
    assert made.used == 1


@pytest.mark.parametrize(
    ("room", "level", "what"),
    [(2, MEMORY, "some are skipped"), (1, DISK, "they go to the disk")],
)
def test_a_memory_too_small_is_said_once_in_numbers(room: int, level: int, what: str) -> None:
    made = make("auto")
    with pytest.warns(PccheckWarning, match=f"{what}.*{(3 - room) * 10} MiB more") as told:
        found = {made.fitting(MEMORY, 10 * MIB, room * 10 * MIB) for _ in range(4)}
    assert found == {level} and len(told) == 1


def test_with_room_for_three_nothing_is_said() -> None:
    made = make("auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.fitting(MEMORY, 10 * MIB, 30 * MIB) == MEMORY
        assert made.fitting(DISK, 10 * MIB, 0) == DISK


def test_one_on_the_device_does_not_count_for_durable_every() -> None:
    made = make(3)
    given: list[str | None] = [None, "device", "device", None, "device", None]
    chosen = [made.choose(to) for to in given]
    device = LEVEL_DEVICE
    assert chosen == [MEMORY, device, device, MEMORY, device, DISK]
    plain = make()
    # with the room to copy it after a death
    assert (plain.choose("device"), plain.used) == (LEVEL_DEVICE, 3)


@pytest.mark.parametrize(
    ("pulls", "wait", "what"),
    [
        (False, "", "does not pull"),
        (True, "copied", "no optimizer is attached"),
        (True, "read", "without memory for staging"),
    ],
)
def test_one_on_the_device_is_never_copied_instead(pulls: bool, wait: str, what: str) -> None:
    made = make()
    made.require_device(pulls=True, wait="")
    assert made.fitting(LEVEL_DEVICE, 100, 200) == LEVEL_DEVICE
    with pytest.raises(CheckpointFailedError, match="room for two states"):
        made.fitting(LEVEL_DEVICE, 100, 199)
    with pytest.warns(PccheckWarning, match=what), pytest.raises(CheckpointFailedError):
        made.require_device(pulls=pulls, wait=wait)
    with warnings.catch_warnings(), pytest.raises(CheckpointFailedError, match=what):
        warnings.simplefilter("error")  # it warns once
        made.require_device(pulls=pulls, wait=wait)
