"""What is in memory only: whether memory has room for one more, and how one gets to the disk."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_wire.ends import Cause
from pccheck_wire.messages import CheckpointState as State
from pccheckd.tenancy.admission import Unparking
from pccheckd.tenancy.checkpoint import End, RankCheckpoint, failed
from pccheckd.tenancy.ledger import Ledger
from tests.support.jobs import saving

CHUNK = 10
STATE = 6 * CHUNK - 5  # six chunks


class Desk:
    """The rank's DRAM has `chunks`; a write answers with the next of `codes`, then succeeds."""

    def __init__(self, chunks: int = 18) -> None:
        self.ledger = Ledger()
        self.grant = SimpleNamespace(nbytes=chunks * CHUNK, aim_bytes=chunks * CHUNK)
        self.full_chunks = 0
        self.codes: list[str] = []
        self.frees: list[bool] = []
        self.end_without: End | None = None
        self.written: list[int] = []
        self.dropped: list[tuple[int, Cause]] = []
        self.readiness: Any = SimpleNamespace(room_bytes=STATE, registers=False, stops=False)
        port = SimpleNamespace(chunk_bytes=CHUNK, grant=self.grant)
        binding: Any = SimpleNamespace(
            port=port, usage=lambda: SimpleNamespace(full_chunks=self.full_chunks)
        )
        self.slots: Any = SimpleNamespace(
            free=self._free, end_without=self._end_without, may_come=False
        )
        saves: Any = SimpleNamespace(write=self._write, drop=self._drop)
        self.unparking = Unparking(self.ledger, binding, self.readiness, self.slots, saves)

    def add(
        self, sequence: int, state: State, *, parks: bool = True, wanted: bool = False
    ) -> RankCheckpoint:
        found = saving(
            sequence, sequence, snapshot=sequence, payload_bytes=STATE, in_memory=parks,
            parks=parks, wanted=wanted, state=state,
        )  # fmt: skip
        self.ledger.add(found)
        return found

    async def _free(self, _: RankCheckpoint) -> bool:
        return self.frees.pop(0) if self.frees else False

    async def _end_without(self) -> End | None:
        return self.end_without

    def _write(self, parked: RankCheckpoint) -> str:
        if self.codes and (code := self.codes.pop(0)):
            return code
        parked.parks = False
        self.written.append(parked.id.sequence)
        return ""

    def _drop(self, parked: RankCheckpoint, end: End, _: object = None) -> None:
        self.dropped.append((parked.id.sequence, end.why.cause))
        parked.state = end.to


async def passes() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("chunks", "fits"), [(18, True), (17, False)])
def test_three_states_are_room_beside_one_on_the_disk(chunks: int, *, fits: bool) -> None:
    desk = Desk(chunks)
    desk.add(1, State.COPIED)
    desk.add(2, State.WRITING, parks=False)
    desk.add(3, State.REQUESTED)
    desk.full_chunks = 12
    assert desk.unparking.has_room() is fits


def test_a_rank_without_memory_yet_holds_up_no_other_rank() -> None:
    desk = Desk(chunks=0)
    assert not desk.unparking.has_room()
    desk.readiness.registers = True
    assert desk.unparking.has_room()


def test_what_is_replaced_soon_takes_no_room() -> None:
    desk = Desk()
    desk.add(1, State.COPIED)
    desk.add(2, State.COPYING)
    desk.add(3, State.WRITING, parks=False)
    desk.full_chunks = 18
    assert desk.unparking.has_room()


def test_what_waits_for_the_disk_stays() -> None:
    desk = Desk()
    desk.add(1, State.COPIED, wanted=True)
    desk.add(2, State.COPIED)
    assert desk.unparking.has_room()
    desk.add(3, State.WRITING, parks=False)
    desk.full_chunks = 18
    assert not desk.unparking.has_room()


def test_one_parking_place_is_for_the_next_copy() -> None:
    desk = Desk(100)
    desk.add(1, State.COPIED, wanted=True)
    desk.add(2, State.COPIED, wanted=True)
    assert not desk.unparking.has_room()


@pytest.mark.parametrize(("chunks", "starved"), [(7, False), (6, True)])
def test_one_that_gets_no_chunk_beside_the_newest_is_starved(chunks: int, *, starved: bool) -> None:
    desk = Desk(chunks)
    desk.add(1, State.COPIED)
    assert not desk.unparking.is_starved
    desk.add(2, State.COPYING, parks=False)
    assert desk.unparking.is_starved is starved


def test_one_that_has_its_chunks_is_not_starved() -> None:
    """Every chunk is taken while two are copied: the first in memory is replaced in a moment."""
    desk = Desk()
    desk.add(1, State.COPIED)
    desk.add(2, State.COPYING)
    desk.add(3, State.COPYING, parks=False)
    desk.full_chunks = 11  # the others are being filled
    assert not desk.unparking.is_starved


def test_memory_that_is_about_to_grow_starves_none() -> None:
    desk = Desk(6)
    desk.grant.aim_bytes = 18 * CHUNK
    desk.add(1, State.COPIED)
    desk.add(2, State.COPYING, parks=False)
    assert not desk.unparking.is_starved


async def test_one_is_written_once_a_lane_is_free() -> None:
    desk = Desk()
    parked = desk.add(1, State.COPIED)
    desk.codes = ["NO_LANE"]
    desk.unparking.write(parked, must=True)
    await passes()
    assert desk.written == []
    desk.unparking.look()
    await desk.unparking.finished()
    assert desk.written == [1]


async def test_one_for_an_idle_disk_does_not_wait_for_a_lane() -> None:
    desk = Desk()
    parked = desk.add(1, State.COPIED)
    desk.codes = ["NO_LANE"]
    desk.unparking.write(parked, must=False)
    await desk.unparking.finished()
    assert parked.is_parked and desk.written == []


async def test_one_without_a_slot_is_blocked_until_there_is_one() -> None:
    """The other ranks then give up what else keeps one from it."""
    desk = Desk()
    parked = desk.add(1, State.COPIED)
    desk.codes = ["NO_SLOT", "NO_SLOT"]
    desk.unparking.write(parked, must=True)
    await passes()
    assert parked.blocked and parked.is_parked
    desk.frees = [True]
    desk.unparking.look()
    await desk.unparking.finished()
    assert not parked.blocked and desk.written == [1]


async def test_one_that_never_gets_a_slot_ends_if_it_had_to_be_written() -> None:
    for must in (True, False):
        desk = Desk()
        parked = desk.add(1, State.COPIED)
        desk.codes, desk.end_without = ["NO_SLOT"], failed(Cause.SLOTS_PROTECTED, 4)
        desk.unparking.write(parked, must=must)
        await desk.unparking.finished()
        assert desk.dropped == ([(1, Cause.SLOTS_PROTECTED)] if must else [])
        assert parked.is_parked is not must


async def test_a_volume_that_takes_no_more_ends_what_had_to_be_written() -> None:
    desk = Desk()
    parked = desk.add(1, State.COPIED)
    desk.codes = ["STOPPED"]
    desk.unparking.write(parked, must=True)
    await desk.unparking.finished()
    assert parked.state is State.FAILED


async def test_a_stopping_daemon_waits_only_for_what_frees_a_slot() -> None:
    desk = Desk()
    desk.readiness.stops = True
    parked = desk.add(1, State.COPIED)
    desk.codes = ["NO_SLOT"]
    desk.unparking.write(parked, must=True)
    await desk.unparking.finished()
    assert parked.is_parked and parked.blocked


async def test_a_stopping_daemon_waits_for_other_ranks_that_write() -> None:
    """The slot may come with their ends, also of one that ends while this rank looks for a slot."""
    desk = Desk()
    desk.readiness.stops, desk.slots.may_come = True, True
    parked = desk.add(1, State.COPIED)
    desk.codes = ["NO_SLOT", "NO_SLOT"]

    async def free(_: RankCheckpoint) -> bool:
        desk.slots.may_come = False
        return False

    desk.slots.free = free
    desk.unparking.write(parked, must=True)
    await passes()
    assert parked.blocked
    desk.slots.free, desk.frees = desk._free, [True]
    desk.unparking.look()
    await desk.unparking.finished()
    assert desk.written == [1]
