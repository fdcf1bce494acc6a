"""The background check: what it reads, what it finds, for whom it waits, what it remembers."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_native import SLOT_DAMAGED, Volume, catalog, layout
from pccheck_wire.errors import DamagedError
from pccheckd.base.logs import LOG
from pccheckd.config.options import Config
from pccheckd.core.engine import Engine
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.volumes import Key
from pccheckd.upkeep import scrub as module
from pccheckd.upkeep.scrub import Pieces, Scrubber, ScrubState
from tests.support.volumes import UID, Rank, damage, make

KEY = Key(UID, "job", 0)


class Place:
    """A registry on a storage directory, and a check whose clock stands at `now`."""

    def __init__(self, storage: Path) -> None:
        self.config = Config(
            storage=storage, socket=storage / "s", dram_bytes=1 << 24, chunk_bytes=1 << 16,
            block_bytes=4096, allow_any_filesystem=True, scrub_rate_bytes=1 << 40,
            scrub_interval_s=100,
        )  # fmt: skip
        self.now = 1000.0
        self.engine = Engine(self.config)
        self.registry = Registry(self.engine)
        self.scrubber = self.fresh()

    def fresh(self) -> Scrubber:
        """As after a restart."""
        self.scrubber = Scrubber(self.registry, wall=lambda: self.now)
        return self.scrubber

    async def pass_(self) -> None:
        """One pass, at once."""
        self.scrubber.state = ScrubState.load(self.config.storage)
        await self.scrubber._pass()

    @property
    def results(self) -> dict[str, int]:
        return {name: n for name, n in self.scrubber.results.items() if n}


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "CONFIRM_S", 0.001)
    place = Place(make(tmp_path / "storage", 1, 2, 3))
    place.engine.start()
    yield place
    await place.scrubber.close()
    for tenant in place.registry.tenants():
        await tenant.close()
    place.engine.stop()


def damaged(storage: Path) -> list[int]:
    return [one.id.step for one in catalog.scan(storage).checkpoints if one.is_damaged]


async def test_everything_is_read(place: Place) -> None:
    await place.pass_()
    assert place.results == {"ok": 3}
    found = catalog.scan(place.config.storage).checkpoints
    assert place.scrubber.bytes_read == sum(one.payload_bytes for one in found)
    assert not list(place.registry.tenants())  # nothing was loaded for it
    document = place.scrubber.document()
    assert (document["checked"], document["damaged"], document["state"]) == (3, 0, "waiting")


@pytest.mark.parametrize("loaded", [False, True])
async def test_damage_is_flagged_as_recovery_does(place: Place, loaded: bool) -> None:
    damage(place.config.storage, 2)
    if loaded:
        await place.registry.existing(KEY)
    await place.pass_()
    assert place.results == {"ok": 2, "damaged": 1}
    assert place.scrubber.state.damaged == 1
    assert damaged(place.config.storage) == [2]
    _, tenant = await place.registry.existing(KEY)
    assert [c.id.step for c in tenant.volumes.checkpoints() if c.is_damaged] == [2]
    assert not tenant.uses.reads
    await place.pass_()  # what is known is not reported again
    assert place.results == {"ok": 4, "damaged": 1}
    assert place.scrubber.state.damaged == 0


async def test_a_volume_that_cannot_be_opened_is_told(place: Place) -> None:
    path = layout.volume_path(place.config.storage, UID, "other", 0)
    layout.make_directories(path)
    path.write_bytes(bytes(1 << 20))
    await place.pass_()
    assert place.results == {"ok": 3, "unreadable": 1}
    document = place.scrubber.document()
    assert (document["damaged"], document["unreadable"]) == (0, 1)


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_disk_that_was_away_for_a_moment_has_lost_nothing(
    place: Place, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loaded:
        await place.registry.existing(KEY)
    check, asked = Pieces.check, 0

    def away(*what: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise OSError(errno.EIO, "away")
        check(*what)

    monkeypatch.setattr(Pieces, "check", away)
    await place.pass_()
    assert (place.results, place.scrubber.state.damaged) == ({"ok": 3}, 0)
    assert damaged(place.config.storage) == []


async def test_what_cannot_be_read_twice_is_told_but_not_flagged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, bad = Pieces.check, 2

    def broken(self: Pieces, volume: Volume, sequence: int, offset: int, length: int) -> None:
        if sequence == bad:
            raise OSError(errno.EIO, "bad sector")
        check(self, volume, sequence, offset, length)

    monkeypatch.setattr(Pieces, "check", broken)
    await place.pass_()
    assert place.results == {"ok": 2, "unreadable": 1}
    assert (place.scrubber.state.damaged, place.scrubber.state.unreadable) == (0, 1)
    assert damaged(place.config.storage) == []
    _, tenant = await place.registry.existing(KEY)
    assert tenant.retention.unreadable == {2}
    every = tenant.volumes.checkpoints()
    assert [one.id.sequence for one in every if tenant.retention.is_usable(one)] == [3, 1]
    bad = 0
    await place.pass_()
    assert (place.results, place.scrubber.state.unreadable) == ({"ok": 5, "unreadable": 1}, 0)
    assert tenant.retention.unreadable == set()
    assert all(map(tenant.retention.is_usable, tenant.volumes.checkpoints()))


async def test_damage_that_cannot_be_read_again_is_not_believed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(place.config.storage, 2)
    check, met = Pieces.check, 0

    def going(self: Pieces, volume: Volume, sequence: int, offset: int, length: int) -> None:
        nonlocal met
        met += sequence == 2
        if met > 1 and sequence == 2:
            raise OSError(errno.EIO, "away")
        check(self, volume, sequence, offset, length)

    monkeypatch.setattr(Pieces, "check", going)
    await place.pass_()
    assert place.results == {"ok": 2, "unreadable": 1}
    assert damaged(place.config.storage) == []


async def test_damage_that_is_gone_loses_its_flag(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)
    damage(place.config.storage, 2, at=128)
    await place.pass_()
    assert damaged(place.config.storage) == [2]
    await place.pass_()  # it is read again each time
    assert damaged(place.config.storage) == [2]
    damage(place.config.storage, 2, at=128)
    await place.pass_()
    assert damaged(place.config.storage) == []
    assert place.results == {"ok": 7, "damaged": 1}
    _, tenant = await place.registry.existing(KEY)
    assert not any(one.is_damaged for one in tenant.volumes.checkpoints())
    assert "checkpoint 2 is readable and intact again" in caplog.text


async def test_a_flag_set_while_it_was_read_stays(place: Place) -> None:
    """The newest finding counts, in whatever order the records are written."""
    _, tenant = await place.registry.existing(KEY)
    keeper = tenant.retention
    reports = keeper.reports
    await keeper.damaged(2)
    assert not await keeper.found_whole(2, reports=reports)
    assert damaged(place.config.storage) == [2]
    reports = keeper.reports
    _, cleared = await asyncio.gather(keeper.damaged(2), keeper.found_whole(2, reports=reports))
    assert not cleared and damaged(place.config.storage) == [2]
    assert not await keeper.found_whole(3, reports=keeper.reports)  # nothing to take away
    assert await keeper.found_whole(2, reports=keeper.reports)
    assert damaged(place.config.storage) == []


async def test_a_flag_that_cannot_be_written_away_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tenant = await place.registry.existing(KEY)
    await tenant.retention.damaged(2)

    async def refused(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(tenant.retention, "flag", refused)
    assert not await tenant.retention.found_whole(2, reports=tenant.retention.reports)
    assert damaged(place.config.storage) == [2]


async def test_a_volume_that_cannot_be_checked_does_not_keep_the_others_from_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(place.config.storage, 5, job="later")
    damage(place.config.storage, 2)

    async def existing(key: Key) -> None:
        raise DamagedError(f"{key} cannot be loaded")

    monkeypatch.setattr(place.registry, "existing", existing)
    await place.pass_()
    assert place.results == {"ok": 2, "unreadable": 1}  # of the last: the newest one, and later
    assert (place.scrubber.passes, place.scrubber.state.running) == (1, False)


async def test_what_a_trainer_writes_over_meanwhile_is_no_damage(place: Place) -> None:
    """The volume was opened beside the daemon, which then loads and fills it anew."""
    path = layout.volume_path(place.config.storage, UID, "job", 0)
    volume = Volume(path, writable=False, allow_buffered=True)
    old = catalog.checkpoints_of(volume, path)
    with Rank(place.config.storage) as rank:
        for step in range(4, 12):
            rank.put(step)
    for found in old:
        await place.scrubber._checkpoint(KEY, found, volume)
    volume.close()
    assert "damaged" not in place.results
    assert damaged(place.config.storage) == []


async def test_saves_go_first_but_not_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tenant = await place.registry.existing(KEY)
    waits: list[bool] = []
    asked = 0

    def live(*_: object) -> list[object]:
        nonlocal asked
        asked += 1
        waits.append(place.scrubber.paused)
        return [SimpleNamespace(parks=False)] if asked < 5 else []

    monkeypatch.setattr(tenant.ledger, "live", live)
    await place.scrubber._give_way()
    assert asked == 5 and waits == [False, True, True, True, True]
    assert not place.scrubber.paused
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    asked = -(10**9)
    await place.scrubber._give_way()  # a node that is never idle is read all the same
    monkeypatch.undo()


async def test_a_pass_goes_on_where_a_restart_interrupted_it(place: Place) -> None:
    make(place.config.storage, 5, job="later")
    place.now = 2000.0
    seen: list[str] = []
    whole = place.scrubber._volume

    async def first_only(file: layout.VolumeFile) -> None:
        if seen:
            raise asyncio.CancelledError
        seen.append(file.job)
        await whole(file)

    place.scrubber._volume = first_only  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await place.pass_()
    assert (seen, place.results) == (["job"], {"ok": 3})
    place.now = 2050.0
    place.fresh().state = ScrubState.load(place.config.storage)
    assert place.scrubber._due_in_s() == 0.0  # it continues at once
    await place.pass_()
    assert place.results == {"ok": 1}  # the other job's only
    assert place.scrubber.document()["checked"] == 4
    assert place.scrubber._due_in_s() == 50.0  # counted from the pass's beginning


async def all_read_at(place: Place, now: float) -> None:
    """The pass that is due then comes by itself."""
    place.now = now
    place.scrubber.wake()
    while not place.scrubber.passes:
        await asyncio.sleep(0.001)
    assert place.results == {"ok": 3}


async def test_the_first_pass_comes_after_one_interval(place: Place) -> None:
    place.scrubber.start()
    while not (place.config.storage / module.STATE_NAME).exists():
        await asyncio.sleep(0.001)
    assert place.scrubber._due_in_s() == 100.0
    place.now = 500.0  # the clock is set back
    assert place.scrubber._due_in_s() == 100.0
    await all_read_at(place, 1100.0)
    assert place.scrubber.state.ended_s == 1100.0


@pytest.mark.parametrize("state", [ScrubState(since_s=1e9), ScrubState(since_s=1.0, began_s=1e9)])
async def test_a_time_of_a_wrong_clock_does_not_stop_the_check(
    place: Place, state: ScrubState
) -> None:
    """The clock was years ahead at an earlier start, or at an earlier pass."""
    state.store(place.config.storage)
    place.scrubber.start()
    stored = ScrubState()
    while not 0 < max(stored.since_s, stored.began_s) < 1e9:
        await asyncio.sleep(0.001)
        stored = ScrubState.load(place.config.storage)
    assert place.scrubber._due_in_s() == 100.0
    await all_read_at(place, 1100.0)


@pytest.mark.parametrize("off", ["scrub_rate_bytes", "scrub_interval_s"])
async def test_zero_turns_it_off_and_a_reload_on_again(place: Place, off: str) -> None:
    before = getattr(place.config, off)
    setattr(place.config, off, 0)
    assert place.scrubber.document()["state"] == "off"
    place.now = 9000.0
    place.scrubber.start()
    await asyncio.sleep(0)
    setattr(place.config, off, before)
    place.scrubber.wake()
    while place.scrubber.state.since_s == 0.0:
        await asyncio.sleep(0.001)
    place.now += 200.0
    place.scrubber.wake()
    while not place.scrubber.passes:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("off", ["scrub_rate_bytes", "scrub_interval_s"])
async def test_off_ends_it_in_the_middle_of_a_volume(
    place: Place, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, before = Pieces.check, getattr(place.config, off)
    reads = 0

    def once(*what: Any) -> None:
        nonlocal reads
        reads += 1
        if reads == 2:
            setattr(place.config, off, 0)
        check(*what)

    monkeypatch.setattr(Pieces, "check", once)
    await place.pass_()
    assert (reads, place.scrubber.passes, place.scrubber.state.running) == (2, 0, True)
    setattr(place.config, off, before)
    await place.pass_()
    assert (place.scrubber.passes, place.scrubber.state.running) == (1, False)


async def test_another_rate_counts_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a byte per second the check would continue after a minute, or after an hour."""
    monkeypatch.setattr(module, "PIECE_S_MAX", 3600.0)
    place.config.scrub_rate_bytes = 1
    reading = asyncio.create_task(place.pass_())
    while place.scrubber.bytes_read == 0:
        await asyncio.sleep(0.001)
    place.config.scrub_rate_bytes = 1 << 40
    place.scrubber.wake()
    await reading
    assert place.results == {"ok": 3}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "began_s": "x"}'])
def test_what_was_stored_wrongly_is_as_good_as_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / module.STATE_NAME).write_text(text)
    assert ScrubState.load(tmp_path) == ScrubState()


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    state = ScrubState(1.0, 2.0, 3.0, "7/job/rank-0.0.pcc", True, 4, 5)
    state.store(tmp_path)
    assert ScrubState.load(tmp_path) == state
    assert (tmp_path / module.STATE_NAME).stat().st_mode & 0o077 == 0


async def test_the_flag_is_the_one_that_readers_set(place: Place) -> None:
    damage(place.config.storage, 3)
    await place.pass_()
    path = layout.volume_path(place.config.storage, UID, "job", 0)
    volume = Volume(path, writable=False, allow_buffered=True)
    flags = {entry.step: entry.flags for entry in volume.table() if entry.sequence}
    volume.close()
    assert flags[3] & SLOT_DAMAGED and not flags[2] & SLOT_DAMAGED
