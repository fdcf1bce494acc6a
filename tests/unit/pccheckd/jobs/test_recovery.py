"""Which checkpoint a session gets to restore, and what its reads leave behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_wire.errors import DamagedError, NoCheckpointError, RefusedError, UsageError
from pccheck_wire.messages import Empty, Open, Opened, Read, Role, Writing
from pccheckd.jobs import recovery
from pccheckd.jobs.sessions import Session
from tests.support.jobs import Ranks, kept, saving

ENGINE: Any = SimpleNamespace(directory=None)  # of no private daemon


def session(ranks: Ranks, rank: int = 0, *, role: Role = Role.TRAINER) -> Session:
    owner = ranks.tenants[rank].seat.owner
    made = Session(
        number=1, token=b"t", role=role, uid=7, pid=1, kernel_pid=1, connected_ns=0, rank=rank,
        world_size=ranks.world, process=owner.process if owner else b"",
    )  # fmt: skip
    made.job, made.tenant = ranks.job, ranks.tenants[rank]  # type: ignore[assignment]
    return made


def opened(who: Session, **wanted: Any) -> Any:
    return asyncio.run(recovery.open_checkpoint(who, Open(**wanted), ENGINE))


def alone(*damaged: int) -> tuple[Ranks, Session]:
    """A connected rank with checkpoints 1 to 3."""
    ranks = Ranks(1)
    ranks.connect()
    ranks.tenants[0].volumes.held = [kept(n, world=1, damaged=n in damaged) for n in (1, 2, 3)]
    return ranks, session(ranks)


def test_the_newest_valid_one_is_opened_and_damaged_ones_are_named() -> None:
    for role in (Role.TRAINER, Role.READER):
        ranks, _ = alone(3)
        found = opened(session(ranks, role=role))
        assert isinstance(found, Opened)
        assert (found.sequence, found.step) == (2, 20)
        assert [(one.sequence, one.step) for one in found.skipped] == [(3, 30)]


@pytest.mark.parametrize(
    ("wanted", "sequence"), [({"step": 10}, 1), ({"before": 3}, 2), ({"before": 2, "step": 10}, 1)]
)
def test_a_step_and_an_older_one_can_be_wanted(wanted: dict[str, int], sequence: int) -> None:
    assert opened(alone()[1], **wanted).sequence == sequence


@pytest.mark.parametrize(
    ("wanted", "hint"), [({"step": 99}, "choose one of these steps"), ({"before": 1}, "fresh=True")]
)
def test_none_that_fits_is_an_error_that_names_what_there_is(
    wanted: dict[str, int], hint: str
) -> None:
    with pytest.raises(NoCheckpointError, match=r"durable steps: 30 \(damaged\), 20, 10") as told:
        opened(alone(3)[1], **wanted)
    assert hint in told.value.hint and ("step" in wanted) != ("fresh" in told.value.hint)


def test_empty_means_that_the_volume_was_read_and_holds_nothing() -> None:
    ranks = Ranks(1)
    ranks.connect()
    assert opened(session(ranks)) == Empty([])


def test_only_the_newest_counts_as_restored() -> None:
    """A process that asks for a step by its number only looks."""
    ranks, who = alone()
    followed: list[int] = []
    ranks.job.members.follow = lambda rank, _: followed.append(rank) or 1  # type: ignore[func-returns-value]
    opened(who, step=10)
    assert followed == []
    opened(who)
    assert followed == [0]


def test_what_is_being_written_is_waited_for() -> None:
    ranks, who = alone()
    on_its_way = saving(4, payload_bytes=10)
    ranks.tenants[0].ledger.checkpoints[0] = on_its_way
    ranks.tenants[0].ledger.ends = False
    ranks.tenants[0].binding.port = SimpleNamespace(
        usage=lambda: SimpleNamespace(full_chunks=1), chunk_bytes=5
    )
    assert opened(who) == Writing(4, 1, 10, 5)
    reader = session(ranks, role=Role.READER)
    assert opened(reader).sequence == 3  # a reader does not wait
    assert ranks.tenants[0].calls[-1] == "lease 3"


def test_a_reader_leases_the_parts_of_all_ranks() -> None:
    ranks = Ranks()
    ranks.hold(1, 2)
    ranks.hold(3, ranks=(0,))
    ranks.tenants[1].volumes.held.append(kept(3, world=1))  # of another run: not the same
    reader = session(ranks, role=Role.READER)
    assert opened(reader, step=20).sequence == 2
    assert [one.calls[-1] for one in ranks.tenants] == ["lease 2", "lease 2"]
    assert opened(reader).sequence == 3
    assert [one.calls[-1] for one in ranks.tenants] == ["lease 3", "look"]


def test_parts_of_another_start_with_the_same_number_are_no_parts() -> None:
    """A rank that was away numbered its own."""
    ranks = Ranks()
    ranks.hold(3)
    ranks.tenants[1].volumes.held = [kept(3, run=2, rank=1)]
    found = opened(session(ranks, role=Role.READER))
    assert [part.rank for part in found.parts] == [0]


def test_every_rank_of_a_group_opens_the_common_one_with_the_parts_of_all() -> None:
    ranks = Ranks()
    ranks.hold(1, 2)
    ranks.hold(3, ranks=(0,))
    ranks.connect()
    for rank in (0, 1):
        found = opened(session(ranks, rank))
        assert (found.sequence, found.rank, found.world_size) == (2, rank, 2)
        assert [part.rank for part in found.parts] == [0, 1]


def test_a_rank_of_a_group_never_takes_an_older_one_by_itself() -> None:
    """Its ranks would hold different steps."""
    ranks = Ranks()
    ranks.hold(1, 2)
    ranks.connect()
    with pytest.raises(DamagedError, match="damaged or cannot be read") as refused:
        opened(session(ranks, 0), before=2)
    assert "restart all ranks" in refused.value.hint


def read(who: Session, load: int = 1, *, sequence: int = 3, rank: int | None = None) -> None:
    asyncio.run(recovery.read(who, Memory(), Read(load, sequence, 0, 10, rank)))  # type: ignore[arg-type]


class Memory:
    def wanted_for(self, _: object, payload_bytes: int) -> int:
        return 2 * payload_bytes

    async def claim(self, who: Session, wanted_bytes: int) -> int:
        who.port.grant.nbytes = wanted_bytes  # type: ignore[union-attr]
        return wanted_bytes


class Port:
    def __init__(self, error: Exception | None = None) -> None:
        self.grant = SimpleNamespace(nbytes=0)
        self.error = error
        self.loads: list[tuple[int, bool]] = []

    async def load(self, _: str, sequence: int, *__: int, own: bool) -> None:
        if self.error is not None:
            raise self.error
        self.loads.append((sequence, own))


def test_a_read_has_memory_and_holds_its_volume_until_it_ends() -> None:
    ranks, who = alone()
    port = who.port = Port()  # type: ignore[assignment]
    read(who)
    assert port.loads == [(3, True)] and port.grant.nbytes == 200  # it had not registered
    assert ranks.tenants[0].calls == ["read"]
    with pytest.raises(UsageError, match="in progress"):
        read(who)
    assert ranks.tenants[0].calls == ["read", "read", "read ended"]
    who.end_load(1)
    assert ranks.tenants[0].calls[3:] == ["read ended"]


@pytest.mark.parametrize(
    ("about", "error"),
    [({"sequence": 9}, NoCheckpointError), ({"rank": 5}, NoCheckpointError)],
)
def test_what_is_not_there_cannot_be_read(about: dict[str, int], error: type[Exception]) -> None:
    ranks, who = alone()
    who.port = Port()  # type: ignore[assignment]
    with pytest.raises(error):
        read(who, **about)
    assert ranks.tenants[0].calls in ([], ["read", "read ended"])
    who.port = None
    with pytest.raises(RefusedError, match="the session has ended"):
        read(who)


@pytest.mark.parametrize("error", [DamagedError("bad"), OSError(5, "EIO")])
def test_a_read_that_fails_releases_the_volume_and_flags_damage(error: Exception) -> None:
    ranks, who = alone()
    who.port = Port(error)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        read(who)
    flagged = ["damaged 3"] if isinstance(error, DamagedError) else []
    assert ranks.tenants[0].calls == ["read", "read ended", *flagged]
    assert who.loads == {}
