"""Ranks that call restore() and recover() unequally, or come late, still have their checkpoints in
common; and no checkpoint is made of two states."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from pccheck import PCcheckClient
from pccheck_native import Volume, catalog
from tests.integration.test_group import COUNTS, ranks, restored, save
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Commands, Connect, RemoteError, Trainer
from tests.support.waiting import until


def go_back_to_1(rank: Commands) -> int:
    done = rank.client.restore(1)
    rank.optimizer.now = done.step
    return int(done.step)


def note_of(rank: Commands) -> Any:
    """The metadata of what restore() gives."""
    return rank.client.restore().metadata


def begin(connect: Connect, daemon: Daemon, launch: str, **options: object) -> list[Trainer]:
    """A start that restores on every rank."""
    group = ranks(connect, daemon, launch, **options)
    restored(group)
    return group


def rank(connect: Connect, daemon: Daemon, number: int) -> Trainer:
    """A new process of one rank of the launch "0"."""
    named = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "0"}
    return connect(
        daemon, COUNTS, rank=number, world_size=2, environment={**named, "LOCAL_WORLD_SIZE": "2"}
    )


def names(daemon: Daemon) -> dict[int, list[tuple[int, int, int, int]]]:
    """By rank, what the manifests of its checkpoints say, oldest first."""
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for one in reversed(catalog.scan(daemon.storage).checkpoints):
        with closing(Volume(one.volume_path, writable=False)) as volume:
            found.setdefault(one.id.rank, []).append(catalog.name_of(volume, one))
    return found


def end(group: list[Trainer]) -> None:
    for trainer in group:
        trainer.kill()


def retry(rank: Trainer, daemon: Daemon) -> None:
    """recover(), an outage, and the script's next try."""
    rank.recover()
    daemon.kill()
    daemon.start()
    rank.recover()


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
@pytest.mark.parametrize("extra", ["recover", "restore", "retry"])
def test_one_rank_restores_more_often(
    daemon: Daemon, start_trainer: Connect, extra: str, on_busy: str
) -> None:
    group = begin(start_trainer, daemon, "0")
    save(group)
    end(group)
    group = ranks(start_trainer, daemon, "1", on_busy=on_busy)
    match extra:
        case "recover":
            group[0].recover()
        case "restore":
            restored(group[:1])
        case "retry":
            retry(group[0], daemon)
    assert restored(group) == [1, 1]
    save(group)
    save(group)
    end(group)
    assert restored(ranks(start_trainer, daemon, "2")) == [3, 3]


def test_the_names_are_on_the_disk(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "7", "--keep", "5")
    group = begin(start_trainer, daemon, "0")
    save(group)
    save(group)
    for trainer in group:
        assert trainer.evaluate(go_back_to_1) == 1
    save(group)
    for _ in range(2):  # the same step once more, and once more
        handles = [trainer.checkpoint() for trainer in group]
        for trainer, handle in zip(group, handles, strict=True):
            trainer.wait_global(handle)
    daemon.stop()
    wanted = [(0, 0, 1, 0), (0, 0, 2, 0), (1, 0, 2, 0), (1, 0, 2, 1), (1, 0, 2, 2)]
    assert names(daemon) == {0: wanted, 1: wanted}


@pytest.mark.parametrize("look", [lambda rank: rank.recover(), lambda rank: rank.evaluate(steps)])
def test_a_look_in_mid_run_changes_nothing(
    daemon: Daemon, start_trainer: Connect, look: Any
) -> None:
    group = begin(start_trainer, daemon, "0")
    save(group)
    look(group[1])
    save(group)


def steps(rank: Commands) -> int:
    return len(rank.client.steps())


def test_all_ranks_go_back_one_of_them_twice(daemon: Daemon, start_trainer: Connect) -> None:
    group = begin(start_trainer, daemon, "0")
    for _ in range(2):
        save(group)
    for rank in (0, 0, 1):
        assert group[rank].evaluate(go_back_to_1) == 1
    save(group)
    end(group)
    assert restored(ranks(start_trainer, daemon, "1")) == [2, 2]


def test_a_restore_by_all_never_mixes_two_states(daemon: Daemon, start_trainer: Connect) -> None:
    """Step 2 is saved before and after the ranks go back to step 1. Rank 0 has restored once more
    in the beginning, and is killed before it saves step 2 again."""
    group = begin(start_trainer, daemon, "0")
    save(group)
    end(group)
    group = ranks(start_trainer, daemon, "1")
    assert restored([group[0], *group]) == [1, 1, 1]
    for rank in (1, 0):
        group[rank].step()
        group[rank].wait_durable(group[rank].checkpoint(metadata={"visit": 1}))
    for trainer in group:
        assert trainer.evaluate(go_back_to_1) == 1
    group[1].step()
    group[1].wait_durable(group[1].checkpoint(metadata={"visit": 2}))
    end(group)
    again = ranks(start_trainer, daemon, "2")
    assert [trainer.evaluate(note_of) for trainer in again] == [{"visit": 1}] * 2


def test_a_rank_that_left_out_a_step_comes_along(daemon: Daemon, start_trainer: Connect) -> None:
    """Rank 1 leaves out step 2, all go back, and rank 1 saves step 2 first."""
    group = begin(start_trainer, daemon, "0")
    save(group)
    for trainer in group:
        trainer.step()
    group[0].wait_durable(group[0].checkpoint(metadata={"visit": 1}))
    for rank in (1, 0):
        assert group[rank].evaluate(go_back_to_1) == 1
    for rank in (1, 0):
        group[rank].step()
        group[rank].wait_durable(group[rank].checkpoint(metadata={"visit": 2}))
    end(group)
    again = ranks(start_trainer, daemon, "1")
    assert [trainer.evaluate(note_of) for trainer in again] == [{"visit": 2}] * 2


def test_a_restore_on_one_rank_is_told_until_all_restore(
    daemon: Daemon, start_trainer: Connect, ctl: Ctl
) -> None:
    group = begin(start_trainer, daemon, "0")
    save(group)
    save(group)
    assert group[0].evaluate(go_back_to_1) == 1
    group[0].step()  # rank 1 continues with the next step instead

    def reasons() -> list[str]:
        for trainer in group:
            trainer.step()
            trainer.checkpoint()
        return [
            next((one for one in trainer.warnings if "the same restore()" in one), "")
            for trainer in group
        ]

    until(lambda: all(reasons()), reasons)
    status = ctl(None, "--socket", daemon.socket, "status")
    assert status.code == 3 and "the same restore()" in status.out
    end(group)
    still = ctl(None, "--socket", daemon.socket, "status")
    assert still.code == 3 and "the same restore()" in still.out
    group = ranks(start_trainer, daemon, "1")
    assert restored(group) == [2, 2]
    save(group)
    assert ctl(None, "--socket", daemon.socket, "status").code == 0


def test_two_ranks_of_one_process_restore_different_steps(daemon: Daemon) -> None:
    """Each rank has its own restores, also where one process has a client for each."""

    def clients() -> list[PCcheckClient]:
        made = [
            PCcheckClient(job="both", rank=rank, world_size=2, socket=daemon.socket)
            for rank in range(2)
        ]
        for client in made:
            client.attach(model=torch.nn.Linear(2, 2))
        return made

    group = clients()
    for step in (1, 2):
        for handle in [client.checkpoint(step=step) for client in group]:
            handle.wait_global(60)
    for client in group:
        client.close()
    again = clients()
    assert [client.restore(step=1 + rank).step for rank, client in enumerate(again)] == [1, 2]
    handles = [client.checkpoint(step=3) for client in again]
    until(lambda: any("the same restore()" in (handle.reason or "") for handle in handles))
    for client in again:
        client.close()


def test_ranks_that_begin_from_different_steps_share_none(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """Both save the same steps afterwards, by a counter of their own."""
    group = begin(start_trainer, daemon, "0")
    save(group)
    save(group)
    end(group)
    group = ranks(start_trainer, daemon, "1")
    assert [group[0].evaluate(go_back_to_1), *restored(group[1:])] == [1, 2]
    group[0].step()
    for _ in range(3):
        for trainer in group:
            trainer.step()
        handles = [trainer.checkpoint() for trainer in group]
        assert "durable" in [t.ended(h) for t, h in zip(group, handles, strict=True)]
    with pytest.raises(RemoteError, match="same restore"):
        group[0].wait_global(0)
    end(group)
    assert restored(ranks(start_trainer, daemon, "2")) == [2, 2]


def test_different_beginnings_stay_apart_with_a_new_daemon(
    daemon: Daemon, start_trainer: Connect
) -> None:
    group = begin(start_trainer, daemon, "0")
    save(group)
    save(group)
    end(group)
    group = ranks(start_trainer, daemon, "1")
    assert [group[0].evaluate(go_back_to_1), *restored(group[1:])] == [1, 2]
    group[0].step()
    daemon.kill()
    daemon.start()
    for trainer in group:
        trainer.step()
        trainer.ended(trainer.checkpoint())
    end(group)
    assert restored(ranks(start_trainer, daemon, "2")) == [2, 2]


@pytest.mark.parametrize("after", ["nothing", "a new daemon", "a look and a new daemon"])
def test_a_rank_that_survived_goes_back_as_the_new_one_does(
    daemon: Daemon, start_trainer: Connect, after: str
) -> None:
    """Rank 1 dies alone and comes back. Its new process counts its restores from 0."""
    group = begin(start_trainer, daemon, "0")
    save(group)
    group[1].kill()
    group[1] = rank(start_trainer, daemon, 1)
    if after == "a look and a new daemon":
        group[0].recover()
    elif after == "a new daemon":
        restored(group[:1])
    if after != "nothing":
        daemon.kill()
        daemon.start()
    assert restored(group) == [1, 1]
    save(group)
    for trainer in group:
        assert trainer.evaluate(go_back_to_1) == 1
    save(group)


def one_late(start: Start, start_trainer: Connect) -> tuple[Daemon, list[Trainer]]:
    """Rank 0 is more checkpoints ahead than it has slots when rank 1 connects."""
    daemon = start("--slots", "4", "--keep", "1")
    (first,) = ranks(start_trainer, daemon, "0", only=1)
    for _ in range(6):
        first.step()
        first.ended(first.checkpoint())
    return daemon, [first, ranks(start_trainer, daemon, "0")[1]]


def test_a_late_rank_finds_the_numbers(start_daemon: Start, start_trainer: Connect) -> None:
    daemon, (first, late) = one_late(start_daemon, start_trainer)
    ends = []
    for _ in range(6):
        late.step()
        ends.append(late.ended(late.checkpoint()))
    assert ends[-1] in ("durable", "global") and ends[0] == "skipped"
    end([first, late])
    assert restored(ranks(start_trainer, daemon, "1")) == [6, 6]


def test_a_late_rank_reads_why_it_skips(start_daemon: Start, start_trainer: Connect) -> None:
    _, (_, late) = one_late(start_daemon, start_trainer)
    late.step()
    handle = late.checkpoint()
    assert late.ended(handle) == "skipped"
    assert "another rank no longer has this checkpoint" in late.reason(handle)
    with pytest.raises(RemoteError, match="no longer has"):
        late.wait_global(handle)
