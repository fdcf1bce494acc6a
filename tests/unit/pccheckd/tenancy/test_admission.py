"""What the loop answers to the queue of the core: numbers, slots, and ends with a reason."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_native import _core
from pccheck_native.group import Agreement
from pccheck_wire.ends import Cause, Why, in_words
from pccheck_wire.errors import StorageFullError
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import Tasks
from pccheckd.core.uses import Uses
from pccheckd.tenancy.admission import Admission, Slots
from pccheckd.tenancy.checkpoint import End, RankCheckpoint
from pccheckd.tenancy.group import Numbered
from pccheckd.tenancy.ledger import Ledger
from pccheckd.tenancy.outcomes import Chronicle
from pccheckd.tenancy.pulling import Pulling
from pccheckd.tenancy.readiness import Readiness
from pccheckd.tenancy.saves import Saves
from pccheckd.tenancy.volumes import Key

SESSION = 3
UNDECIDED = Agreement(0, 0, frozenset())
_TIMES = _core.SaveTimes(*[0] * len(_core.SaveTimes._fields))
_ASKED = _core.SaveRequest(*[0] * len(_core.SaveRequest._fields))._replace(payload_bytes=10)


def event(kind: str, snapshot: int = 1, *, sequence: int = 0, why: str = "") -> _core.Event:
    error = -1 if why else 0
    return _core.Event(
        kind, 1, SESSION, snapshot, sequence, 0, error, why, "", 0, 10, 0, 0, _TIMES, None
    )


class Core:
    """The core: refuses what is not in `copied`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.copied: set[int] = set()
        self.policies: list[dict[str, Any]] = []

    def noted(self) -> None:
        self.calls.append(("noted",))

    def number(self, *numbers: Any) -> None:
        self.calls.append(("number", *numbers))

    def retry(self) -> None:
        self.calls.append(("retry",))

    def refuse(self, snapshot: int, _outcome: int, _sequence: int = 0, **_why: int) -> bool:
        return snapshot not in self.copied

    def policy(self, **policy: Any) -> None:
        self.policies.append(policy)


class Ranks:
    """The group, as one rank sees it; `given` is its next answer."""

    def __init__(self, *, shared: bool) -> None:
        self.is_shared = shared
        self.given = Numbered(5, 0)
        self.given_up: set[int] = set()
        self.asked_slot = 0
        self.newest_common = 0

    def incarnation(self, _rank: int, _owner: object) -> int:
        return 5

    def alone(self, _rank: int, _owner: object) -> tuple[int, int] | None:
        return 5, 40

    def number(self, _rank: int, _requested: object) -> Numbered:
        return self.given

    def took(self, _rank: int, sequence: int) -> int:
        return sequence or 41

    def gives_up(self, sequence: int) -> bool:
        return sequence in self.given_up

    def why_given_up(self, _sequence: int) -> Why:
        return Why(Cause.RANK_ENDED, 1)

    async def request_slot(self, _rank: int, _needs_it: object) -> list[int]:
        self.asked_slot += 1
        return []

    def decide_soon(self) -> None: ...
    def appeared(self) -> None: ...


class Desk:
    """Parts of a tenant: a volume whose slots are all in use until `recycles` says otherwise."""

    def __init__(self, *, grouped: bool = False) -> None:
        self.key = Key(7, "job", 0)
        self.ledger = Ledger()
        self.group: Any = Ranks(shared=grouped)
        self.core = Core()
        self.undelivered: list[_core.Event] = []
        engine: Any = SimpleNamespace(deliver=self._deliver)
        owner = SimpleNamespace(session=SESSION, world_size=2 if grouped else 1)
        self.seat: Any = SimpleNamespace(owner=owner)
        self.port: Any = SimpleNamespace(native=self.core)
        self.stops = self.readied = 0
        self.recycles: list[bool] = []
        self.frees_slots = False  # what the loop does not know of has one
        full = SimpleNamespace(
            info=SimpleNamespace(free_slots=0, stopped=False), quarantined=2, path="v",
            checkpoints=[],
            volume=SimpleNamespace(has_expendable=lambda: False, is_full=self._is_full),
        )  # fmt: skip
        self.volumes: Any = SimpleNamespace(
            key=self.key, recycle=self._recycle, refresh=self._refresh, current=full,
            checkpoints=list, newest_incarnation=lambda: 5,
        )  # fmt: skip
        binding: Any = SimpleNamespace(
            is_usable=True, stop=self._stop, port=self.port, port_of=self._port_of,
            volumes=self.volumes,
        )  # fmt: skip
        self.retention: Any = SimpleNamespace(protected=set())
        self.ended_leases = 0
        leases: Any = SimpleNamespace(end_for_room=self._end_for_room)
        self.unready: Exception | None = None  # what reopen() raises
        about: Any = self.group, self.seat
        self.readiness = Readiness(*about, self.ledger, binding, self.retention, leases)
        self.readiness.room_bytes = 100
        self.readiness.reopen = self._reopen  # type: ignore[method-assign]
        self.saves = Saves(
            *about, self.ledger, binding, self.retention, self.readiness, Pulling(binding),
            Chronicle(), Tasks(self.key),
        )  # fmt: skip
        slots = Slots(engine, *about, Uses(), self.ledger, binding, self.retention, leases)
        self.queue = Admission(engine, self.ledger, binding, self.readiness, slots, self.saves)

    def _port_of(self, session: int) -> Any:
        return self.port if self.seat.owner and session == SESSION else None

    def _deliver(self) -> None:
        while self.undelivered:
            self.queue.on_event(self.undelivered.pop(0))

    def _stop(self) -> None:
        self.stops += 1

    async def _reopen(self) -> None:
        self.readied += 1
        if self.unready is not None:
            raise self.unready

    async def _recycle(self) -> bool:
        return self.recycles.pop(0) if self.recycles else False

    async def _refresh(self) -> None: ...

    def _end_for_room(self) -> bool:
        self.ended_leases += 1
        return False

    def _is_full(self) -> bool:
        return not (self.ledger.in_flight or self.frees_slots)

    def request(self, snapshot: int = 1, **about: Any) -> RankCheckpoint:
        asked = event("requested", snapshot)
        self.queue.on_event(asked._replace(request=_ASKED._replace(**about)))
        found = self.ledger.find(SESSION, snapshot)
        assert found is not None
        return found

    def begin(self, snapshot: int = 1, sequence: int = 0) -> None:
        self.queue.on_event(event("begun", snapshot, sequence=sequence))

    async def waits(self, why: str, snapshot: int = 1) -> None:
        """The core says so; until the loop has done what it can."""
        self.queue.on_event(event("waits", snapshot, why=why))
        await passes()


async def passes() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_rank_alone_is_numbered_by_the_core() -> None:
    desk = Desk()
    desk.readiness.instruct()
    assert desk.core.policies == [{"held": False, "numbers": True, "incarnation": 5, "above": 40}]
    found = desk.request(step=7, interval=50)
    assert (found.id.step, found.id.sequence, desk.saves.interval_steps, len(desk.queue)) == (
        7,
        0,
        50,
        1,
    )
    desk.begin(sequence=44)
    assert (found.id.sequence, found.state, len(desk.queue)) == (44, State.COPYING, 0)
    assert desk.ledger.of_sequence(44) is found and desk.ledger.last_sequence == 44
    assert desk.core.calls == [("noted",)]


def test_a_rank_alone_that_began_without_a_number_gets_one() -> None:
    desk = Desk()
    found = desk.request()
    desk.begin()
    assert found.id.sequence == 41 and ("number", 1, 41, 5, 1, 0, (0, 0, 0)) in desk.core.calls


def test_one_of_several_ranks_is_numbered_at_its_request() -> None:
    desk = Desk(grouped=True)
    desk.group.given = Numbered(6, 12, marks=_core.SLOT_OFFERED, name=(3, 1, 2))
    found = desk.request()
    assert (found.id.incarnation, found.id.sequence) == (6, 12)
    number = ("number", 1, 12, 6, 2, _core.SLOT_OFFERED, (3, 1, 2))
    assert desk.core.calls == [("noted",), number]
    desk.begin()
    assert (found.id.sequence, found.state) == (12, State.COPYING)


def test_a_fenced_one_is_refused_while_it_is_copied() -> None:
    desk = Desk()
    desk.group.given = Numbered(4, 0, End(State.FAILED, in_words("a newer start runs")))
    found = desk.request()
    assert (found.state, found.sentence.reason) == (State.FAILED, "a newer start runs")
    desk.begin()  # reported before the core had read the refusal
    assert found.state is State.FAILED


def test_what_the_core_has_copied_is_not_refused() -> None:
    desk = Desk()
    desk.core.copied = {1}
    desk.readiness.stop()
    assert desk.core.policies[-1]["held"]
    assert desk.request().state is State.REQUESTED  # its events follow
    assert desk.request(2).sentence.reason == "the daemon is stopping"


def test_a_checkpoint_without_registered_room_fails() -> None:
    desk = Desk()
    desk.volumes.current, desk.readiness.room_bytes = None, 0
    assert "no space was registered" in desk.request().sentence.reason


def test_what_the_core_refused_at_once_has_its_words() -> None:
    found = Desk().request(cause=int(Cause.BAD_LEVEL), argument=2)
    assert found.state is State.FAILED and "not to level 2" in found.sentence.reason


@pytest.mark.parametrize(
    ("code", "to", "reason"),
    [
        ("NO_LANE", State.SKIPPED, "every slot was busy"),
        ("ABORTED", State.FAILED, "abandoned"),
        ("ENOTCONN", State.FAILED, "before the checkpoint began"),
        ("DEVICE_LOST", State.FAILED, "lost the GPU"),
        ("TOO_LARGE", State.FAILED, "slots smaller"),
    ],
)
def test_the_core_ends_what_waits(code: str, to: State, reason: str) -> None:
    desk = Desk()
    found = desk.request()
    for _ in range(2):  # nothing happens twice
        desk.queue.on_event(event("refused", why=code))
        assert found.state is to and reason in found.sentence.reason


def test_a_given_up_one_does_not_wait_any_more() -> None:
    desk = Desk(grouped=True)
    desk.group.given = Numbered(6, 12)
    found = desk.request()
    desk.group.given_up = {12}
    desk.queue.obey(UNDECIDED)
    assert (found.state, found.sentence.reason) == (
        State.SKIPPED, "rank 1 ended without this checkpoint, so no rank keeps it"
    )  # fmt: skip
    assert desk.request(2).state is State.SKIPPED  # the same sequence


async def test_a_slot_that_was_recycled_is_tried() -> None:
    desk = Desk(grouped=True)
    desk.group.given = Numbered(6, 12)
    desk.recycles = [True]
    desk.request()
    await desk.waits("NO_SLOT")
    assert desk.core.calls[-1] == ("retry",) and desk.group.asked_slot == 1
    desk.begin()
    await desk.queue.close()


async def test_a_rank_without_a_slot_looks_again_after_another_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It makes the ranks decide itself: the same decision again is nothing new."""
    desk = Desk(grouped=True)
    desk.group.given = Numbered(6, 12)
    desk.request(9)
    desk.begin(9)  # in flight
    desk.group.given = Numbered(6, 13)
    agreement = UNDECIDED
    asked: list[Agreement] = []

    async def request_slot(_rank: int, _needs_it: object) -> list[int]:
        asked.append(agreement)
        desk.queue.obey(agreement)
        return []

    monkeypatch.setattr(desk.group, "request_slot", request_slot)
    waiting = desk.request(1)
    await desk.waits("NO_SLOT")
    assert waiting.state is State.REQUESTED and len(asked) <= 2
    before, agreement = len(asked), Agreement(0, 12, frozenset())
    desk.queue.obey(agreement)
    await passes()
    assert len(asked) == before + 1
    await desk.queue.close()


async def test_a_checkpoint_with_its_slot_makes_no_rank_give_up() -> None:
    """The loop looks for a slot again before it has taken the event that there is one."""
    desk = Desk(grouped=True)
    desk.recycles = [True]
    desk.group.given = Numbered(6, 12)
    desk.request()
    await desk.waits("NO_SLOT")
    assert desk.group.asked_slot == 1
    desk.undelivered.append(event("begun", sequence=12))
    desk.queue.look()
    await passes()
    assert desk.group.asked_slot == 1
    await desk.queue.close()


@pytest.mark.parametrize("skip", [False, True])
async def test_what_takes_the_slot_that_becomes_free_ends_no_lease(*, skip: bool) -> None:
    """When the volume is asked again, its slot is taken, and nothing else is free."""
    desk = Desk()
    desk.request(skip=skip)
    desk.undelivered.append(event("begun", sequence=12))
    await desk.waits("NO_SLOT")
    assert desk.ended_leases == 0
    desk.request(2, skip=skip)
    await desk.waits("NO_SLOT", 2)
    assert desk.ended_leases == skip  # one that waits gets the slot of the one in flight
    await desk.queue.close()


async def test_no_lease_ends_while_a_record_frees_a_slot() -> None:
    desk = Desk()
    desk.frees_slots = True
    desk.request()
    await desk.waits("NO_SLOT")
    assert desk.ended_leases == 0
    desk.frees_slots = False
    desk.queue.look()
    await passes()
    assert desk.ended_leases == 1
    await desk.queue.close()


async def test_without_a_slot_one_waits_and_another_is_skipped() -> None:
    desk = Desk()
    desk.request(9)
    desk.begin(9, 39)  # its end may free a slot
    waiting = desk.request(1)
    await desk.waits("NO_SLOT")
    assert waiting.state is State.REQUESTED and ("retry",) not in desk.core.calls
    desk.recycles = [True]
    desk.queue.look()
    await passes()
    assert desk.core.calls[-1] == ("retry",)
    desk.begin(1, 50)
    skipping = desk.request(2, skip=True)
    await desk.waits("NO_SLOT", 2)
    assert (skipping.state, skipping.sentence.reason) == (State.SKIPPED, "every slot was busy")
    await desk.queue.close()


async def test_a_free_slot_that_the_core_has_not_taken_is_no_skip() -> None:
    """The slot was freed a moment ago, and on a loaded machine the core has not looked again."""
    desk = Desk()
    desk.frees_slots, desk.volumes.current.info.free_slots = True, 1
    found = desk.request(skip=True)
    await desk.waits("NO_SLOT")
    assert found.state is State.REQUESTED and ("retry",) in desk.core.calls


async def test_a_slot_that_never_comes_fails_at_once() -> None:
    desk = Desk()
    desk.retention.protected = {4}
    found = desk.request()
    await desk.waits("NO_SLOT")
    assert found.state is State.FAILED and "up to sequence 4" in found.sentence.reason


async def test_a_slot_that_the_loop_knows_nothing_of_is_waited_for() -> None:
    """A save of which it has not heard, or another task's record, gives it back."""
    desk = Desk()
    desk.frees_slots = True
    found = desk.request()
    await desk.waits("NO_SLOT")
    assert found.state is State.REQUESTED
    desk.frees_slots = False
    desk.queue.look()
    await passes()
    assert found.state is State.FAILED


async def test_a_volume_that_stopped_while_it_freed_a_slot_is_opened_again() -> None:
    desk = Desk()
    found = desk.request()
    desk.volumes.current.info.stopped = True
    await desk.waits("NO_SLOT")
    assert desk.core.calls[-1] == ("retry",)
    await desk.waits("STOPPED")
    assert (desk.readied, found.state) == (1, State.REQUESTED)
    desk.begin(sequence=44)
    await desk.queue.close()


async def test_a_stopped_volume_is_opened_again_once() -> None:
    desk = Desk()
    found = desk.request()
    await desk.waits("STOPPED")
    assert (desk.stops, desk.readied, desk.core.calls[-1]) == (1, 1, ("retry",))
    await desk.waits("STOPPED")
    assert desk.readied == 1 and found.state is State.FAILED
    assert "could not write a commit record" in found.sentence.reason


async def test_a_volume_that_cannot_be_made_ends_the_checkpoint() -> None:
    desk = Desk()
    desk.unready = StorageFullError("no space left", hint="free some")
    found = desk.request()
    await desk.waits("EBUSY")
    assert found.state is State.FAILED
    assert (found.sentence.reason, found.sentence.hint) == ("no space left", "free some")


def test_a_fault_ends_one_checkpoint_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every later checkpoint of the rank would wait for ever."""
    desk = Desk()
    with monkeypatch.context() as patch:
        patch.setattr(desk.group, "number", lambda *_: 1 / 0)
        assert desk.request().sentence.reason == "an internal error of the daemon"
    assert desk.request(2).state is State.REQUESTED


def test_an_ended_session_says_nothing_more() -> None:
    desk = Desk()
    desk.seat.owner = None
    desk.queue.on_event(event("requested")._replace(request=_ASKED))
    assert not desk.ledger.checkpoints and not desk.core.calls


async def test_one_that_got_the_missing_slot_meanwhile_is_not_refused() -> None:
    """The last free slot is gone because the core gave it to this very checkpoint."""
    desk = Desk()
    found = desk.request()
    desk.undelivered.append(event("begun", sequence=44))
    await desk.waits("NO_SLOT")
    assert (found.state, found.id.sequence) == (State.COPYING, 44)
