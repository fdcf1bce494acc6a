"""A job passes what volumes and sessions hold to group.py, and applies the answers to all ranks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_native import group
from pccheck_wire.ends import Cause, Why, sentence
from pccheck_wire.errors import RefusedError
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Restored
from pccheckd.group.explain import Lateness
from pccheckd.group.schedule import RESTS, Schedule
from pccheckd.tenancy.checkpoint import End
from tests.support.jobs import Ranks, arrival, owner


def connected(world: int = 2) -> Ranks:
    """All of them, in the first start."""
    ranks = Ranks(world)
    ranks.connect()
    return ranks


GIVEN_UP = Why(Cause.OTHER_RANK)


def ended(why: Why) -> Any:
    return SimpleNamespace(
        live=False, sentence=sentence(why), is_given_up=why == GIVEN_UP, sequence=1,
        state=State.FAILED,
    )  # fmt: skip


def said(why: Why | None) -> str:
    return sentence(why).reason if why is not None else ""


# -- numbers -----------------------------------------------------------------------------------


def test_ranks_that_ask_for_the_same_step_get_the_same_sequence() -> None:
    ranks = connected()
    first, second = ranks.ask(0, 5), ranks.ask(1, 5)
    assert first == second
    again, other = ranks.ask(0, 5, row=1), ranks.ask(1, 5, row=1)
    assert again == other and again[1] > first[1]


def test_a_lone_rank_gets_a_new_sequence_for_every_request() -> None:
    ranks = connected(1)
    assert len({ranks.ask(0, 5)[1] for _ in range(3)}) == 3


def test_sequences_are_above_those_in_the_volumes() -> None:
    ranks = Ranks()
    ranks.hold(41)
    ranks.job.loaded(ranks.tenants[0])  # type: ignore[arg-type]
    ranks.job.passed(50)  # by a daemon before
    ranks.connect()
    assert ranks.ask(0, 5)[1] == 51


def test_a_process_of_an_older_start_is_fenced_once_it_has_saved() -> None:
    ranks = Ranks()
    ranks.connect(1)
    ranks.ask(0, 5)
    ranks.connect(2)
    old, new = owner(0, start=1), owner(0, start=2)
    ranks.tenants[0].seat.owner = old
    assert ranks.ask(0, 6)[1] == 0 and ranks.ended.to is State.FAILED
    assert ranks.ended == End(State.FAILED, Why(Cause.FENCED))
    ranks.left(0, new.process)  # its place in the newest start is free again
    assert ranks.job.members.follow(0, old.process) == ranks.ask(0, 6)[0]


@pytest.mark.parametrize("solo", [True, False])
def test_a_rank_that_saves_alone_is_the_only_one(solo: bool) -> None:
    ranks = Ranks()
    ranks.tenants[0].seat.owner = owner(0, solo=not solo)
    with pytest.raises(RefusedError, match="was started with solo=True"):
        ranks.job.members.require_no_other(1, solo=solo)
    ranks.job.members.require_no_other(0, solo=True)  # its own rank does not count


# -- what the ranks obey -----------------------------------------------------------------------


def test_every_rank_obeys_the_same_agreement() -> None:
    ranks = connected()
    ranks.hold(1, 2)
    ranks.hold(3, ranks=(0,))
    agreed = ranks.settle()
    assert (agreed.oldest, agreed.newest) == (2, 2)
    assert [tenant.obeyed[-1] for tenant in ranks.tenants] == [agreed, agreed]
    assert [tenant.made_global for tenant in ranks.tenants] == [[2], [2]]
    ranks.settle()
    assert ranks.tenants[0].made_global == [2]  # reported once


def test_a_lone_rank_has_nothing_to_agree_on() -> None:
    ranks = connected(1)
    ranks.hold(1)
    ranks.settle()
    assert ranks.tenants[0].obeyed == []


def test_what_a_rank_did_not_save_is_given_up_for_good() -> None:
    """A rank may have acted on it: it stays given up, whatever appears later."""
    ranks = connected()
    number = ranks.ask(0, 5)[1]
    ranks.ask(1, 5)
    ranks.hold(number, ranks=(0,))
    assert ranks.settle().given_up == {number}  # rank 1 has passed it
    ranks.hold(number, ranks=(1,))
    ranks.tenants[1].retention.unreadable.add(number)
    assert number in ranks.settle().given_up
    assert ranks.job.gives_up(number) and not ranks.job.needs(number)


def test_what_was_given_up_and_is_back_is_restored_but_never_reported_as_global() -> None:
    """A file that was away is back: the other rank may be about to overwrite its part."""
    ranks = connected()
    number = ranks.ask(0, 5)[1]
    ranks.ask(1, 5)
    ranks.hold(number, ranks=(0,))
    ranks.settle()
    ranks.hold(number, ranks=(1,))
    for _ in range(2):
        ranks.settle()
        assert ranks.job.lateness.common is None
    assert [one.sequence for one in ranks.job.members.common()] == [number]


def test_the_reason_of_a_given_up_checkpoint_names_the_rank() -> None:
    ranks = connected()
    ranks.tenants[0].ledger.checkpoints[1] = ended(GIVEN_UP)
    assert "rank 1 did not ask" in said(ranks.job.why_given_up(1))
    ranks.tenants[1].ledger.checkpoints[1] = ended(Why(stage="write", code="EIO"))
    assert "rank 1 did not save this checkpoint (write: EIO)" in said(ranks.job.why_given_up(1))


def test_a_checkpoint_is_never_global_once_a_rank_that_asked_for_it_has_lost_it() -> None:
    """Also when the process of that rank has ended: the rank is not given the sequence again."""
    ranks = connected()
    number = ranks.ask(0, 5)[1]
    ranks.hold(number, ranks=(0,))
    ranks.settle()
    assert said(ranks.tenants[0].why_never(number)) == ""  # rank 1 may still ask for it
    ranks.ask(1, 5)
    ranks.tenants[1].ledger.on_its_way = {number: 2}
    ranks.settle()
    assert said(ranks.tenants[0].why_never(number)) == ""
    gone, ranks.tenants[1].seat.owner = ranks.tenants[1].seat.owner, None
    assert gone is not None
    ranks.tenants[1].ledger.on_its_way = {}
    ranks.tenants[1].ledger.checkpoints[number] = ended(Why(Cause.ENDED_BEFORE))
    ranks.left(1, gone.process)
    assert "rank 1 did not save this" in said(ranks.tenants[0].why_never(number))
    ranks.hold(number, ranks=(1,))
    ranks.settle()
    assert said(ranks.tenants[0].why_never(number)) == ""  # it is common after all


@pytest.mark.parametrize("busy", [True, False])
def test_with_skip_the_first_that_asks_decides_for_all(busy: bool) -> None:
    ranks = connected()
    ranks.tenants[1].room = not busy
    number = ranks.ask(0, 5, on_busy="skip")[1]
    assert ranks.job.gives_up(number) is busy
    ranks.tenants[1].room = not ranks.tenants[1].room
    assert ranks.ask(1, 5, on_busy="skip")[1] == number  # the second one decides nothing
    assert ranks.job.gives_up(number) is busy
    if busy:
        assert "every slot of rank 1 was busy" in said(ranks.job.why_given_up(number))


def test_a_rank_without_a_slot_gives_up_what_only_a_dead_rank_could_bring() -> None:
    ranks = connected()
    number = ranks.ask(0, 5)[1]
    ranks.hold(number, ranks=(0,))
    assert ranks.request_slot(0) == [1]  # it lives, and may still ask
    assert not ranks.job.gives_up(number)
    dead, ranks.tenants[1].seat.owner = ranks.tenants[1].seat.owner, None
    assert dead is not None
    ranks.left(1, dead.process)
    assert not ranks.job.gives_up(number)  # rank 0 still has slots
    assert ranks.request_slot(0, needs_it=False) == []  # it has got one since it asked
    assert not ranks.job.gives_up(number)
    assert ranks.request_slot(0) == []
    assert ranks.job.gives_up(number)


def test_what_was_given_up_and_recycled_before_its_event_came_ends() -> None:
    """The table of a volume may be read before the event that a checkpoint is durable arrives."""
    ranks = connected()
    number = ranks.ask(0, 5)[1]
    ranks.hold(number, ranks=(0,))
    dead, ranks.tenants[1].seat.owner = ranks.tenants[1].seat.owner, None
    assert dead is not None
    ranks.left(1, dead.process)
    ranks.request_slot(0)
    ranks.tenants[0].volumes.held.clear()
    ranks.tenants[0].ledger.checkpoints[number] = SimpleNamespace(live=False, state=State.DURABLE)
    ranks.settle()
    assert "rank 1 did not ask for this checkpoint" in said(ranks.tenants[0].why_never(number))


def test_ranks_that_need_slots_get_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have many ranks, and each tries again some times a second."""
    ranks = connected(8)
    numbers = [ranks.ask(rank, rank)[1] for rank in range(8)]
    for rank, number in enumerate(numbers):
        ranks.hold(number, ranks=(rank,))
    ranks.settle()
    decided, agree = [], group.agree

    def counted(*arguments: Any) -> group.Agreement:
        decided.append(arguments)
        return agree(*arguments)

    monkeypatch.setattr(group, "agree", counted)

    async def work() -> list[str]:
        return await asyncio.gather(
            *(ranks.job.request_slot(rank, lambda: True) for rank in range(8))
        )

    assert len(asyncio.run(work())) == 8
    assert len(decided) == 1 and decided[0][3] == set(range(8))
    ranks.settle()
    assert decided[1][3] == set()  # no rank needs a slot any longer


async def test_a_rest_follows_a_long_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to its time."""
    now = iter([0.0, 1.0, 1.0, 1.5])  # a decision takes a second, the next is wanted soon after
    rests: list[float] = []
    monkeypatch.setattr(
        asyncio.get_running_loop(), "call_later", lambda after_s, _: rests.append(after_s)
    )
    schedule = Schedule(lambda _: None, lambda: next(now))
    schedule.now()
    schedule.soon()
    assert rests == [RESTS - 0.5]


def test_the_reason_is_found_without_a_walk_through_the_world() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        made = owner(rank, world=2**62)
        ranks.job.join(arrival(rank, made, launch="", was=0))
        ranks.tenants[rank].ledger.checkpoints[1] = ended(GIVEN_UP)
    assert ranks.job.members.world_size == 2**62
    assert "rank 3 did not ask" in said(ranks.job.why_given_up(1))


def test_what_a_rank_that_ended_lacks_is_not_waited_for() -> None:
    ranks = connected()
    number = ranks.ask(0, 5)[1]
    ranks.hold(number, ranks=(0,))
    dead, ranks.tenants[1].seat.owner = ranks.tenants[1].seat.owner, None
    assert dead is not None
    ranks.left(1, dead.process)
    ranks.job.note_absent(100.0)
    ranks.job.note_absent(110.0)
    assert not ranks.job.gives_up(number)  # it may reconnect
    ranks.job.note_absent(110.1)
    assert ranks.job.gives_up(number)
    ranks.tenants[0].ledger.checkpoints[number] = ended(GIVEN_UP)
    assert "rank 1 ended without this checkpoint" in said(ranks.job.why_given_up(number))


def test_a_rank_that_reconnects_or_is_late_is_waited_for() -> None:
    ranks = Ranks()
    ranks.connect(ranks=range(1))  # rank 1 is still loading its data
    number = ranks.ask(0, 5)[1]
    ranks.hold(number, ranks=(0,))
    for now_s in (100.0, 200.0):
        ranks.job.note_absent(now_s)
    ranks.connect(ranks=range(1, 2))
    process = owner(1).process
    ranks.left(1, process)
    ranks.job.note_absent(300.0)
    ranks.connect(ranks=range(1, 2))
    for now_s in (305.0, 320.0):
        ranks.job.note_absent(now_s)
    assert not ranks.job.gives_up(number)


async def test_it_decides_once_in_a_turn_of_the_loop() -> None:
    ranks = connected()
    ranks.settle()
    before = len(ranks.tenants[0].obeyed)
    for _ in range(5):
        ranks.job.decide_soon()
    assert before == len(ranks.tenants[0].obeyed)
    await asyncio.sleep(0)
    assert before + 1 == len(ranks.tenants[0].obeyed)


def test_a_late_group_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lateness = Lateness(7, "gpt")
    for why in ("", "late", "later", ""):  # its ranks end without a common checkpoint
        lateness.note(why)
    assert [record.getMessage() for record in caplog.records] == ["job 'gpt' of uid 7: late"]
    caplog.clear()
    lateness.note("late")
    lateness.decided(group.Held(3, 30, 1, 2))
    for why in ("", ""):
        lateness.note(why)
    assert [record.getMessage() for record in caplog.records] == [
        "job 'gpt' of uid 7: late",
        "job 'gpt' of uid 7: the ranks have a new common checkpoint again",
    ]


# -- the end of protection ----------------------------------------------------------------------


def test_protection_ends_when_the_last_rank_has_restored() -> None:
    ranks = connected()
    for tenant in ranks.tenants:
        tenant.retention.unrestored = True
    asyncio.run(ranks.job.restored(0, b"", Restored(5)))
    assert [tenant.calls for tenant in ranks.tenants] == [["restored 5"], []]
    asyncio.run(ranks.job.restored(1, b"", Restored(5)))
    assert ranks.tenants[0].calls == ["restored 5", "release"]
    assert ranks.tenants[1].calls == ["restored 5", "release"]


def test_protection_stays_while_a_rank_is_not_connected() -> None:
    ranks = Ranks()
    ranks.connect(ranks=range(1))
    asyncio.run(ranks.job.restored(0, b"", Restored(5)))
    assert ranks.tenants[0].calls == ["restored 5"]


def test_all_ranks_keep_what_becomes_common_of_the_run_before() -> None:
    """Even if a checkpoint of this run became common before."""
    ranks = connected()
    ranks.hold(1)
    ranks.hold(2, ranks=(0,))
    ranks.tenants[1].ledger.on_its_way = {2: 2}
    ranks.settle()
    ranks.connect(2)
    for tenant in ranks.tenants:
        tenant.readiness.incarnation, tenant.calls = 2, []
    ranks.hold(3, run=2)
    ranks.settle()
    assert [tenant.calls for tenant in ranks.tenants] == [[], []]  # it is of this run
    ranks.tenants[1].ledger.on_its_way = {}
    ranks.hold(2, ranks=(1,))
    ranks.settle()
    assert [tenant.calls for tenant in ranks.tenants] == [["protect late"]] * 2


def test_no_trainer_attaches_while_a_job_closes() -> None:
    ranks = Ranks()
    asyncio.run(ranks.job.close())
    assert [tenant.calls for tenant in ranks.tenants] == [["stop attaches", "close"]] * 2


# -- how the ranks stand -----------------------------------------------------------------------


def test_a_common_checkpoint_that_is_away_leaves_no_step() -> None:
    """Its file may come back, so the ranks still keep it; but none of them could restore it now."""
    ranks = connected()
    ranks.hold(1)
    ranks.settle()
    found = ranks.job.standing()
    assert found is not None and (found.sequence, found.step) == (1, 10)
    volumes = ranks.tenants[1].volumes
    volumes.lost, volumes.held = volumes.held, []
    ranks.settle()
    found = ranks.job.standing()
    assert found is not None and (found.sequence, found.step) == (1, None)


def test_a_job_that_is_held_decides_when_it_is_let_go() -> None:
    """Rank 1 is not taken over yet, and looks like one that lacks everything."""
    ranks = connected()
    ranks.job.hold(held=True)
    ranks.hold(1, ranks=(0,))
    decided = len(ranks.tenants[0].obeyed)
    ranks.settle()
    ranks.job.loaded(ranks.tenants[1])  # type: ignore[arg-type]
    assert len(ranks.tenants[0].obeyed) == decided
    ranks.hold(1, ranks=(1,))
    ranks.job.hold(held=False)
    assert ranks.tenants[0].obeyed[decided:] == [ranks.job.decisions.agreement]
    assert ranks.job.newest_common == 1
