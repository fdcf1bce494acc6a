"""Which checkpoint a rank of a group restores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from pccheck_wire.errors import DamagedError, NoCheckpointError, UnreadableError
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Open, Role
from pccheckd.jobs import choosing
from pccheckd.jobs.sessions import Session
from tests.support.jobs import Ranks, saving


def connected(world: int = 2) -> Ranks:
    """All of them, in the first start."""
    ranks = Ranks(world)
    ranks.connect()
    return ranks


def choose(ranks: Ranks, rank: int, *, step: int | None = None) -> int | None:
    own = ranks.tenants[rank]
    assert own.seat.owner is not None
    session = Session(
        number=1, token=b"t", role=Role.TRAINER, uid=7, pid=1, kernel_pid=1, connected_ns=0,
        rank=rank, world_size=ranks.world, process=own.seat.owner.process,
    )  # fmt: skip
    found, _ = choosing.choose(session, ranks.job, own, Open(step=step))  # type: ignore[arg-type]
    return found.id.sequence if found is not None else None


def test_a_restore_gets_the_newest_that_all_ranks_have() -> None:
    ranks = Ranks()
    ranks.hold(1, 2)
    ranks.hold(3, ranks=(0,))
    ranks.connect()
    assert [choose(ranks, rank) for rank in (0, 1)] == [2, 2]
    assert choose(ranks, 0, step=10) == 1


def test_nothing_is_found_only_if_every_volume_was_read() -> None:
    """P7: a run does not begin at step 0 because a disk was away."""
    ranks = connected()
    assert choose(ranks, 0) is None
    ranks.tenants[1].volumes.unreadable[Path("v")] = UnreadableError("EIO")
    with pytest.raises(UnreadableError):
        choose(ranks, 0)


def test_a_refusal_says_what_is_missing() -> None:
    ranks = Ranks()
    ranks.hold(1, ranks=(0,))
    ranks.connect()
    with pytest.raises(NoCheckpointError, match="job 'gpt': "):
        choose(ranks, 0)


def test_ranks_of_one_start_never_restore_different_steps() -> None:
    ranks = Ranks()
    ranks.hold(1, 2)
    ranks.connect()
    assert choose(ranks, 0) == 2
    ranks.tenants[1].retention.unreadable.add(2)  # found while rank 1 read it
    with pytest.raises(DamagedError, match="rank 0 of this start restores step 20") as refused:
        choose(ranks, 1)
    assert refused.value.hint == "restart all ranks; they will restore the step before"
    ranks.connect(2)
    assert [choose(ranks, rank) for rank in (0, 1)] == [1, 1]


def test_a_new_start_tries_again_what_could_not_be_read() -> None:
    """Only when nothing else is common: the disk may have been away."""
    ranks = Ranks()
    ranks.hold(1, 2)
    for tenant in ranks.tenants:
        tenant.retention.unreadable.add(2)
    ranks.connect()
    assert ranks.tenants[0].retention.unreadable == {2}  # 1 is left
    for tenant in ranks.tenants:
        tenant.retention.unreadable.add(1)
        tenant.seat.owner = None
    ranks.connect(2, launch="other")
    assert ranks.tenants[0].retention.unreadable == set()


def test_what_is_still_being_written_is_reported_with_its_size() -> None:
    ranks = connected()
    number = ranks.ask(0, 5)[1]
    item = saving(5, number, payload_bytes=64, state=State.COPIED)
    ranks.tenants[0].ledger.checkpoints[number] = item
    ranks.tenants[0].ledger.ends = False
    usage = SimpleNamespace(full_chunks=3)
    ranks.tenants[0].binding.port = SimpleNamespace(usage=lambda: usage, chunk_bytes=16)
    writing = asyncio.run(choosing.settled(ranks.job))
    assert writing is not None
    assert (writing.step, writing.checkpoints) == (5, 1)
    assert (writing.total_bytes, writing.left_bytes) == (64, 48)
    ranks.tenants[0].ledger.ends = True
    assert asyncio.run(choosing.settled(ranks.job)) is None
    assert [tenant.volumes.refreshed for tenant in ranks.tenants] == [1, 1]
