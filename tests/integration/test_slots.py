"""Flags and growth never fill a volume for good: a kept slot is freed when its reason ends."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pccheck_wire.errors import NoCheckpointError
from pccheck_wire.messages import CheckpointState, Opened, Restored
from tests.support.daemon import Daemon, Start
from tests.support.rank import Rank, payload_of

SIZE = 300_000
TWO_SLOTS = ("--slots", "2", "--keep", "1")


@contextmanager
def group(daemon: Daemon, launch: str) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Rank(daemon.socket, rank=rank, world_size=2, launch=launch))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.register(SIZE)
        yield ranks


def save_all(ranks: list[Rank], step: int) -> None:
    for rank in ranks:
        rank.save(step, payload_of(step, SIZE))


def common_step(daemon: Daemon, launch: str) -> list[int]:
    with group(daemon, launch) as ranks:
        found = [rank.open() for rank in ranks]
    return [item.step for item in found if isinstance(item, Opened)]


def test_a_slot_that_is_no_longer_protected_comes_back(start_daemon: Start) -> None:
    daemon = start_daemon(*TWO_SLOTS)
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(9, payload_of(9, SIZE))
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        failed = rank.begin(2, payload_of(2, SIZE))
        assert rank.wait(failed).outcome == CheckpointState.FAILED
        assert "restore()" in rank.describe(failed).hint
        rank.ask(Restored(1))
        for step in range(3, 8):
            rank.save(step, payload_of(step, SIZE))


def test_two_ranks_with_two_slots_go_on(start_daemon: Start) -> None:
    daemon = start_daemon(*TWO_SLOTS)
    with group(daemon, "a") as ranks:
        for step in range(1, 9):
            save_all(ranks, step)
    assert common_step(daemon, "b") == [8, 8]


def test_a_rank_alone_gets_the_slot_of_its_group_back(start_daemon: Start) -> None:
    """Once the rank reports that it restores nothing: one rank cannot restore the checkpoints of a
    group."""
    daemon = start_daemon(*TWO_SLOTS)
    with group(daemon, "a") as ranks:
        save_all(ranks, 1)
        save_all(ranks, 2)
    with (
        Rank(daemon.socket) as rank,
        pytest.raises(NoCheckpointError, match="step 2 was saved by 2 ranks, and this start has 1"),
    ):
        rank.open()
    with Rank(daemon.socket, fresh=True) as rank:
        rank.register(SIZE)
        for step in range(3, 8):
            rank.save(step, payload_of(step, SIZE))


@pytest.mark.parametrize("restart", [True, False], ids=["the daemon was killed", "it went on"])
def test_the_step_that_a_group_restored_is_kept(start_daemon: Start, restart: bool) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    with group(daemon, "a") as ranks:
        save_all(ranks, 1)
        save_all(ranks, 2)
        if restart:
            daemon.kill()  # that 2 is global was never written
    if restart:
        daemon.start()
    with group(daemon, "b") as ranks:
        for rank in ranks:
            assert rank.restore()[0].step == 2
        for step in (3, 4, 5):
            ranks[0].save(step, payload_of(step, SIZE))
    assert common_step(daemon, "c") == [2, 2]


def test_what_became_durable_after_the_ranks_had_died_is_kept(start_daemon: Start) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1", "--max-bandwidth", "2MiB")
    with group(daemon, "a") as ranks:
        save_all(ranks, 1)
        for rank in ranks:
            rank.wait(rank.begin(2, payload_of(2, SIZE)), copied=True)
    with group(daemon, "b") as ranks:
        assert [rank.restore()[0].step for rank in ranks] == [2, 2]
        for step in (3, 4, 5):
            ranks[0].save(step, payload_of(step, SIZE))
    assert common_step(daemon, "c") == [2, 2]


def test_growing_again_and_again_before_anything_is_durable(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        for size in range(1, 9):
            rank.register(size * 4_000_000)
        rank.save(1, payload_of(1, 30_000_000))
        assert rank.restore()[0].step == 1
    assert len(list(daemon.storage.glob("*/*/*.pcc"))) == 1


def test_growing_while_the_one_before_is_written(start_daemon: Start) -> None:
    daemon = start_daemon("--max-bandwidth", "20MiB", "--dram", "128MiB")
    with Rank(daemon.socket) as rank:
        snapshots = []
        for step in range(1, 8):
            size = step * 2_500_000
            rank.register(size)
            snapshots.append(rank.begin(step, payload_of(step, size)))
            rank.wait(snapshots[-1], copied=True)
        for snapshot in snapshots:
            assert rank.wait(snapshot).outcome in (
                CheckpointState.DURABLE, CheckpointState.SUPERSEDED,
            )  # fmt: skip
        assert rank.restore()[0].step == 7


def test_a_copy_of_a_volume_gets_the_room_of_all_its_slots(daemon: Daemon) -> None:
    """cp makes holes of what was never written. Before, a disk that became full ended the
    checkpoints of a job whose volume was such a copy."""
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
    daemon.stop()
    [path] = daemon.storage.rglob("*.pcc")
    whole = path.rename(daemon.root / "whole")
    subprocess.run(["cp", "-p", "--sparse=always", whole, path], check=True)
    assert path.stat().st_blocks * 512 < path.stat().st_size
    daemon.start()
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        opened = rank.open()
        assert isinstance(opened, Opened) and opened.step == 1
