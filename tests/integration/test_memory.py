"""Checkpoints of level memory: newer ones replace them, and they are written when a trainer ends,
when the daemon stops, when they are wanted, and when the disk is idle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pccheck_native import LEVEL_MEMORY, catalog
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Goodbye
from tests.conftest import SMALL
from tests.integration.test_observability import base, get
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.manager import ServedDaemon
from tests.support.rank import Rank, payload_of
from tests.support.waiting import until

SIZE = 2 << 20
#: One checkpoint takes minutes: what is being written stays so.
STUCK = ("--max-bandwidth", "64KiB")
Members = Callable[..., list[Rank]]


@pytest.fixture
def members(stack: ExitStack) -> Members:
    """Ranks of one start, ready to save."""

    def make(daemon: Daemon, world: int = 1, size: int = SIZE, **options: Any) -> list[Rank]:
        made = [
            stack.enter_context(Rank(daemon.socket, rank=rank, world_size=world, **options))
            for rank in range(world)
        ]
        for rank in made:
            rank.register(size + (rank.rank << 12), memory=True)
        return made

    return make


def park(group: list[Rank], step: int) -> list[int]:
    """Every rank copies the step to memory; the snapshots."""
    snapshots = begin(group, step)
    for rank, snapshot in zip(group, snapshots, strict=True):
        assert rank.wait(snapshot, copied=True).outcome < State.SUPERSEDED
    return snapshots


def occupy_disk(group: list[Rank]) -> list[int]:
    """Every rank copies step 1, and writes it: what comes later stays in memory. Without the wait
    a later step takes its place, and is the one that is written."""
    snapshots = park(group, 1)
    pairs = list(zip(group, snapshots, strict=True))
    until(lambda: all(rank.native.state(one).outcome == State.WRITING for rank, one in pairs))
    return snapshots


def begin(group: list[Rank], step: int) -> list[int]:
    return [
        rank.begin(step, data_of(rank.rank, step), level=LEVEL_MEMORY, row=step) for rank in group
    ]


def data_of(rank: int, step: int) -> bytes:
    return payload_of(step * 16 + rank, SIZE + (rank << 12))


def ended(rank: Rank, snapshot: int) -> State:
    def outcome() -> State | None:
        state = rank.native.state(snapshot)
        found = State(state.outcome) if state is not None else State.REQUESTED
        return found if found > State.DURABLE or found is State.DURABLE else None

    found = until(outcome, lambda: rank.native.state(snapshot))
    assert found is not None
    return found


def restored(group: list[Rank]) -> int:
    """All ranks restore; the step, which is equal on all."""
    steps = set()
    for rank in group:
        opened, data = rank.restore()
        assert data == data_of(rank.rank, opened.step)
        steps.add(opened.step)
    assert len(steps) == 1, steps
    return steps.pop()


def newest_on_disk(daemon: Daemon) -> int:
    return max(found.id.step for found in catalog.scan(daemon.storage).checkpoints)


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_trainer_loses_nothing(start_daemon: Start, members: Members, world: int) -> None:
    daemon = start_daemon(*SMALL)
    group = members(daemon, world, launch="a")
    for step in range(1, 6):
        park(group, step)
    for rank in group:
        rank.close()

    assert restored(members(daemon, world, launch="b")) == 5


def test_a_newer_one_replaces_an_older_one(start_daemon: Start, members: Members) -> None:
    daemon = start_daemon(*SMALL, *STUCK)
    (rank,) = members(daemon)
    (first,) = occupy_disk([rank])
    others = [park([rank], step)[0] for step in range(2, 7)]
    assert [ended(rank, one) for one in others[:-1]] == [State.SUPERSEDED] * 4
    told = rank.describe(others[0])
    reason = "a newer checkpoint, step 3, is in memory on all ranks"
    assert (told.newer_step, told.reason) == (3, reason)
    assert rank.native.state(first).outcome == State.WRITING
    assert rank.native.state(others[-1]).outcome == State.COPIED
    (row,) = daemon.status()["ranks"]
    assert row["chunks"]["full"] == 2 * SIZE // row_chunk(daemon)


def row_chunk(daemon: Daemon) -> int:
    return daemon.status()["daemon"]["chunk_bytes"]


def test_a_daemon_that_stops_writes_what_is_in_memory(
    start_daemon: Start, members: Members
) -> None:
    daemon = start_daemon(*SMALL)
    group = members(daemon, 2)
    for step in range(1, 4):
        park(group, step)
    assert daemon.stop() == 0
    assert newest_on_disk(daemon) == 3


def test_what_one_rank_lacks_is_not_restored(start_daemon: Start, members: Members) -> None:
    daemon = start_daemon(*SMALL)
    group = members(daemon, 2, launch="a")
    for step in range(1, 4):
        park(group, step)
    park(group[:1], 4)
    for rank in group:
        rank.close()
    assert restored(members(daemon, 2, launch="b")) == 3


def test_a_wanted_one_is_written_on_every_rank(start_daemon: Start, members: Members) -> None:
    daemon = start_daemon(*SMALL)
    group = members(daemon, 2)
    snapshots = park(group, 1)
    group[1].native.write(snapshots[1])
    assert [ended(rank, one) for rank, one in zip(group, snapshots, strict=True)] <= [
        State.GLOBAL
    ] * 2


def test_goodbye_writes_what_is_in_memory(start_daemon: Start, members: Members) -> None:
    daemon = start_daemon(*SMALL)
    (rank,) = members(daemon)
    park([rank], 1)
    park([rank], 2)
    rank.ask(Goodbye())
    assert newest_on_disk(daemon) == 2


def test_the_disk_is_used_when_it_is_idle(start_daemon: Start, members: Members) -> None:
    daemon = start_daemon(*SMALL)
    (rank,) = members(daemon)
    (snapshot,) = park([rank], 1)
    assert ended(rank, snapshot) is State.DURABLE


def test_a_killed_daemon_finds_it_in_the_store(stack: ExitStack, members: Members) -> None:
    daemon = stack.enter_context(ServedDaemon(*SMALL, *STUCK)).start()
    group = members(daemon, 2, launch="a")
    for step in range(1, 5):
        park(group, step)
    daemon.kill()
    daemon.flags = SMALL
    daemon.start()
    for rank in group:
        rank.close()
    assert restored(members(daemon, 2, launch="b")) == 4


def test_what_has_no_room_in_memory_is_skipped(start_daemon: Start, members: Members) -> None:
    """Room for two states: beside one that is written and one that is safe there is no third."""
    daemon = start_daemon(*SMALL, *STUCK, "--dram", "4MiB")
    (rank,) = members(daemon)
    (first,) = occupy_disk([rank])
    (second,), (third,) = park([rank], 2), begin([rank], 3)
    assert ended(rank, third) is State.SKIPPED
    assert "--dram" in rank.describe(third).hint
    assert rank.native.state(first).outcome == State.WRITING
    assert rank.native.state(second).outcome == State.COPIED


def test_status_and_list_say_what_is_in_memory(
    start_daemon: Start, members: Members, ctl: Ctl
) -> None:
    daemon = start_daemon(*SMALL, *STUCK)
    group = members(daemon, 2)
    occupy_disk(group)
    for step in range(2, 4):
        park(group, step)
    park(group[:1], 4)
    (cost,) = daemon.status()["memory"]
    assert (cost["process"]["step"], cost["process"]["lost_steps"]) == (3, 1)
    assert (cost["node"]["step"], cost["node"]["lost_steps"]) == (None, None)
    assert cost["node"]["lost_s"] > cost["process"]["lost_s"] > 0

    said = ctl(None, "status", "--socket", daemon.socket).out
    assert "memory   job: step 3 in memory; a dead process costs 1 step (" in said
    assert "a dead node all steps (" in said
    listed = ctl(None, "list", "job", "--socket", daemon.socket).out.splitlines()
    in_memory = [line for line in listed if "in memory" in line]
    assert len(in_memory) == 3 and all(" ago " in line for line in in_memory)  # 4 on rank 0 only


def test_metrics_say_what_is_in_memory(start_daemon: Start, members: Members) -> None:
    daemon = start_daemon(*SMALL, *STUCK, "--metrics", "127.0.0.1:0")
    group = members(daemon, 2)
    occupy_disk(group)
    for step in range(2, 4):
        park(group, step)
    park(group[:1], 4)
    found = {
        name: {
            (one.labels["job_name"], one.labels.get("rank") or one.labels["dies"]): one.value
            for one in samples(daemon)
            if one.name == f"pccheck_{name}"
        }
        for name in ("death_cost_steps", "death_cost_seconds", "in_memory", "memory_step",
                     "copied_bytes_total")
    }  # fmt: skip
    assert found["death_cost_steps"] == {("job", "process"): 1}  # the node: all
    lost_s = found["death_cost_seconds"]
    assert lost_s["job", "node"] > lost_s["job", "process"] > 0
    assert found["memory_step"] == {("job", "0"): 4, ("job", "1"): 3}
    assert found["in_memory"] == {("job", "0"): 2, ("job", "1"): 1}
    assert found["copied_bytes_total"]["job", "1"] > SIZE  # step 2 was replaced


def samples(daemon: Daemon) -> list[Any]:
    families = text_string_to_metric_families(get(f"{base(daemon)}/metrics")[1])
    return [one for family in families for one in family.samples]
