"""Volumes that a user copies back from a backup: with the daemon stopped all is right; otherwise a
restore may fail, and never returns what was not saved."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from pccheck_store.directory import Storage
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, RemoteError, Trainer

COUNTS = [30_000, 7]
Group = list[Trainer]


def ranks(connect: Connect, daemon: Daemon, world_size: int) -> Group:
    return [
        connect(
            daemon, COUNTS, rank=rank, world_size=world_size,
            environment={"LOCAL_WORLD_SIZE": str(world_size)},
        )
        for rank in range(world_size)
    ]  # fmt: skip


def save(group: Group, to: int, run: str = "") -> None:
    """Trains up to a step, and waits until all ranks have its checkpoint. `run` is its metadata."""
    for trainer in group:
        while trainer.step() < to:
            pass
    handles = [(trainer, trainer.checkpoint(metadata=run)) for trainer in group]
    for trainer, handle in handles:
        assert trainer.wait_global(handle) in ("global", "durable")


def run(
    connect: Connect, daemon: Daemon, world_size: int, to: tuple[int, ...], name: str = ""
) -> None:
    """One run of a job: it restores, saves these steps, and ends; then the daemon is stopped."""
    daemon.start()
    group = ranks(connect, daemon, world_size)
    for trainer in group:
        trainer.restore()
    for step in to:
        save(group, step, name)
    for trainer in group:
        trainer.close()
    assert daemon.stop() == 0


def copy(of: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(of, to)


def over(backup: Path, storage: Path) -> None:
    """As `cp` does: the files in the directory stay the same files."""
    for file in backup.rglob("*"):
        if file.is_file() and file.suffix:
            shutil.copyfile(file, storage / file.relative_to(backup))


def volume_of(storage: Path, rank: int) -> Path:
    (volume,) = {c.volume_path for c in Storage(storage).held().checkpoints if c.id.rank == rank}
    return volume


def runs_of(storage: Path, step: int) -> list[object]:
    """The metadata that each rank's part of a step has."""
    store = Storage(storage)
    found = [one for one in store.held().checkpoints if one.id.step == step]
    made: list[object] = []
    for one in sorted(found, key=lambda one: one.id.rank):
        with contextlib.closing(store.open([one])) as payloads:
            made.append(payloads.tree(one.id.rank).metadata)
    return made


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backup_copied_back_without_a_daemon_is_restored(
    start_daemon: Start, start_trainer: Connect, tmp_path: Path, world_size: int
) -> None:
    daemon = start_daemon()
    assert daemon.stop() == 0
    run(start_trainer, daemon, world_size, (1, 2))
    backup = copy(daemon.storage, tmp_path / "backup")
    run(start_trainer, daemon, world_size, (3, 4, 5))
    over(backup, daemon.storage)
    daemon.start()
    group = ranks(start_trainer, daemon, world_size)
    assert [trainer.restore()["step"] for trainer in group] == [2] * world_size
    assert [trainer.check(2) for trainer in group] == [""] * world_size
    save(group, 3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backup_copied_over_open_volumes_gives_no_wrong_data(
    start_daemon: Start, start_trainer: Connect, tmp_path: Path, world_size: int
) -> None:
    daemon = start_daemon()
    assert daemon.stop() == 0
    run(start_trainer, daemon, world_size, (1, 2))
    backup = copy(daemon.storage, tmp_path / "backup")
    daemon.start()
    group = ranks(start_trainer, daemon, world_size)
    for trainer in group:
        trainer.restore()
    save(group, 4)
    over(backup, daemon.storage)
    for trainer in group:  # the daemon's next records go into the file
        trainer.step()
    for trainer, handle in [(trainer, trainer.checkpoint()) for trainer in group]:
        trainer.ended(handle)
    for trainer in group:
        trainer.kill()
    daemon.kill()
    daemon.start()
    for trainer in ranks(start_trainer, daemon, world_size):
        try:
            restored = trainer.restore()
        except RemoteError as error:
            assert error.kind in ("DamagedError", "NoCheckpointError"), error
        else:
            assert restored["step"] in (1, 2, 4, 5)
            assert trainer.check(restored["step"]) == ""


def test_limit_parts_of_two_runs_of_one_backup_pass_for_one(
    start_daemon: Start, start_trainer: Connect, tmp_path: Path
) -> None:
    """The records of both runs say the same start, step and sequence, so nothing tells the parts
    apart. docs/ranks.md asks to copy back the volumes of all ranks from one backup."""
    daemon = start_daemon()
    assert daemon.stop() == 0
    run(start_trainer, daemon, 2, (1, 2))
    backup = copy(daemon.storage, tmp_path / "backup")
    run(start_trainer, daemon, 2, (3, 4), "first")
    first = copy(daemon.storage, tmp_path / "first")
    copy(backup, daemon.storage)
    run(start_trainer, daemon, 2, (3, 4), "second")
    assert runs_of(daemon.storage, 4) == ["second", "second"]
    shutil.copyfile(volume_of(first, 1), volume_of(daemon.storage, 1))
    assert runs_of(daemon.storage, 4) == ["second", "first"]
    daemon.start()
    group = ranks(start_trainer, daemon, 2)
    assert [trainer.restore()["step"] for trainer in group] == [4, 4]


def test_ranks_of_two_runs_that_saved_other_steps_are_not_mixed(
    start_daemon: Start, start_trainer: Connect, tmp_path: Path
) -> None:
    daemon = start_daemon("--keep", "2")
    assert daemon.stop() == 0
    run(start_trainer, daemon, 2, (1, 2))
    backup = copy(daemon.storage, tmp_path / "backup")
    run(start_trainer, daemon, 2, (3,), "first")
    first = copy(daemon.storage, tmp_path / "first")
    copy(backup, daemon.storage)
    run(start_trainer, daemon, 2, (4,), "second")
    shutil.copyfile(volume_of(first, 1), volume_of(daemon.storage, 1))
    daemon.start()
    group = ranks(start_trainer, daemon, 2)
    assert [trainer.restore()["step"] for trainer in group] == [2, 2]
    assert [trainer.check(2) for trainer in group] == ["", ""]
