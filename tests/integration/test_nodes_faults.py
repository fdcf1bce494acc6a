"""What ends, and is lost, while a job on two nodes runs."""

from __future__ import annotations

import psutil
import pytest

from pccheck_native import catalog
from tests.support import live
from tests.support.daemon import Daemon, Start
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect, RemoteError, Trainer
from tests.support.widejob import COUNTS, JOB, end, one_rank, ranks, refused, restored, save


def test_offers_of_an_ended_start_leave_room(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    """Node 0 has promised slots to checkpoints that rank 1 never asked for."""
    group = ranks(start_trainer, nodes, store)
    save(group)
    for _ in range(6):
        group[0].save()
    end(group)
    again = ranks(start_trainer, nodes, store, run="again")
    assert restored(again) == [1, 1]
    assert [again[0].save() for _ in range(6)] == ["durable"] * 6


def lose_disk(start_trainer: Connect, nodes: list[Daemon], store: TorchStore) -> None:
    """All nodes had a checkpoint, and node 1 comes back with an empty disk."""
    group = ranks(start_trainer, nodes, store)
    save(group)
    end(group)
    nodes[1].kill()
    live.remove(nodes[1].storage)
    nodes[1].storage.mkdir()
    nodes[1].start()


def test_a_start_without_a_disk_is_refused_once(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    lose_disk(start_trainer, nodes, store)
    group = ranks(start_trainer, nodes, store, run="again")
    assert all("stored the part of rank 1 and is not here" in one for one in refused(group))
    for daemon in nodes:
        assert "ERROR" not in daemon.log.read_text().replace("ERROR job 0/wide: step 1", "")


def test_a_fresh_start_needs_no_lost_disk(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    lose_disk(start_trainer, nodes, store)
    group = ranks(start_trainer, nodes, store, run="again", fresh=True)
    assert [save(group), save(group)] == [1, 2]


def test_what_was_restored_stays_until_newer_ones_are_global(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    for _ in range(4):
        save(group)
    assert restored(group, step=2) == [2, 2]
    for _ in range(6):  # in each slot that may be replaced
        group[0].save()
    end(group)
    assert restored(ranks(start_trainer, nodes, store, run="again")) == [2, 2]


def test_a_checkpoint_without_the_other_rank_of_its_node_is_skipped(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    alone = start_trainer(
        nodes[0], COUNTS, job=JOB, rank=0, world_size=4, environment=store.environment("run", 2, 0)
    )
    alone.step()
    handle = alone.checkpoint()
    assert alone.ended(handle) == "skipped"
    assert "rank 1" in alone.reason(handle)


@pytest.mark.parametrize("lacks", [0, 1])
def test_what_one_node_will_never_have_names_that_node(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, lacks: int
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    saves, skips = group[1 - lacks], group[lacks]
    handle = (saves.step(), saves.checkpoint())[1]
    saves.wait_durable(handle)
    skips.step(2)  # the checkpoint of the first one is left out
    skips.wait_durable(skips.checkpoint())
    with pytest.raises(RemoteError, match=rf"host .* \(rank {lacks}\) will never have this"):
        saves.wait_global(handle)


@pytest.mark.parametrize("restarts", [(), (1,), (1, 0)])
def test_a_failed_copy_is_destroyed_before_it_is_given_up(
    start_trainer: Connect, start_daemon: Start, store: TorchStore, restarts: tuple[int, ...]
) -> None:
    """Else its node's next daemon would find it in the volume, and offer it to the others."""
    nodes = [start_daemon(), start_daemon(shim="late:record-a:1")]
    group = ranks(start_trainer, nodes, store)
    handles = _late_record(group, nodes[1])
    with pytest.raises(RemoteError, match=r"\(rank 1\) will never have this checkpoint"):
        group[0].wait_global(handles[0])
    assert _newest_step(nodes[1]) == 3
    nodes[1].shim = ""
    for number in restarts:
        nodes[number].kill()
        nodes[number].start()
        group[number].connects_again()
    assert group[0].state(handles[0]) == "durable"  # of this start it is not global any more
    end(group)
    for daemon in nodes:
        daemon.kill()
        daemon.start()
    group = ranks(start_trainer, nodes, store, "again")
    assert restored(group) == [3, 3]
    assert save(group) == 4


def test_a_failed_copy_that_cannot_be_destroyed_yet_is_not_given_up(
    start_trainer: Connect, start_daemon: Start, store: TorchStore
) -> None:
    nodes = [start_daemon(), start_daemon(shim="last:record-a:1")]
    group = ranks(start_trainer, nodes, store)
    handles = _late_record(group, nodes[1])
    later = _saved(group)
    assert group[1].ended(later[1]) == "failed"  # the volume cannot be opened
    with pytest.raises(RemoteError, match=r"\(rank 1\) will never have this checkpoint"):
        group[0].wait_global(later[0])
    with pytest.raises(RemoteError, match="WaitTimeoutError"):
        group[0].wait_global(handles[0], timeout=0.1)
    assert _newest_step(nodes[1]) == 4
    nodes[1].kill()
    nodes[1].shim = ""
    nodes[1].start()
    group[1].connects_again()
    assert group[0].wait_global(handles[0]) == "global"
    end(group)
    assert restored(ranks(start_trainer, nodes, store, "again")) == [4, 4]


def test_words_of_restore_that_are_none(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    (alone,) = ranks(start_trainer, nodes[:1], store)
    for words, text in (
        ({"start": 7}, "start=7 is not text"),
        ({"without": 5}, "without=5 is not a name"),
        ({"without": [5]}, "is not a name or a list of names"),
    ):
        with pytest.raises(RemoteError, match=text) as caught:
            alone.restore(**words)
        assert caught.value.kind == "UsageError"


def test_a_failed_copy_is_not_restored_before_it_is_destroyed(
    start_trainer: Connect, start_daemon: Start, store: TorchStore
) -> None:
    """Its volume can be read and not be written: the copy was restored, and destroyed later."""
    nodes = [start_daemon(), start_daemon(shim="last:record-a:1")]
    group = ranks(start_trainer, nodes, store)
    _late_record(group, nodes[1])
    assert restored(group) == [3, 3]
    nodes[1].armed.unlink()
    assert group[1].save() == "durable"
    end(group)
    assert restored(ranks(start_trainer, nodes, store, "again")) == [3, 3]
    assert "Traceback" not in nodes[1].log.read_text()


def _late_record(group: list[Trainer], faulty: Daemon) -> list[int]:
    """After three global checkpoints, one whose record is on rank 1's disk although it failed."""
    for _ in range(3):  # the volume has the promise by then, which is a record, too
        save(group)
    faulty.armed.touch()
    handles = _saved(group)
    assert group[1].ended(handles[1]) == "failed"
    return handles


def _saved(group: list[Trainer]) -> list[int]:
    for trainer in group:
        trainer.step()
    return [trainer.checkpoint() for trainer in group]


def _newest_step(node: Daemon) -> int:
    return max(one.id.step for one in catalog.scan(node.storage).checkpoints)


def test_a_rank_that_comes_first_is_not_refused_for_the_start_before(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, per_node=2)
    save(group)
    end(group)
    group = ranks(start_trainer, nodes, store, "refused", per_node=2)
    assert all("names no start" in one for one in refused(group, start="ff"))
    end(group)
    first = one_rank(start_trainer, nodes, store, "again", 0, per_node=2)
    first.post("restore")
    more = [one_rank(start_trainer, nodes, store, "again", at, per_node=2) for at in (1, 2, 3)]
    for trainer in more:
        trainer.post("restore")
    assert [trainer.answer()["step"] for trainer in (first, *more)] == [1] * 4


def test_a_record_that_cannot_be_written_refuses_all_ranks(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    assert [save(group), save(group)] == [1, 2]
    (record,) = nodes[1].storage.glob(f"*/{JOB}/start-*.json")
    record.rename(record.with_suffix(".away"))
    found = refused(group)
    assert all("does not exist" in one for one in found), found
    record.with_suffix(".away").rename(record)
    end(group)
    assert restored(ranks(start_trainer, nodes, store, "again")) == [2, 2]


def test_ranks_of_a_node_that_restore_different_steps_are_refused(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, per_node=2)
    assert [save(group), save(group)] == [1, 2]
    for trainer, step in zip(group, (1, 2, 1, 1), strict=True):
        trainer.post("restore", step=step)
    found = []
    for trainer in group[:2]:
        try:
            trainer.answer()
        except RemoteError as error:
            found.append(error.message)
    assert any("of this node gave restore() different arguments" in one for one in found), found


def test_two_nodes_keep_the_same_checkpoints_of_an_older_start(
    start_trainer: Connect, start_daemon: Start, store: TorchStore
) -> None:
    nodes = [start_daemon("--keep", "2", "--slots", "5") for _ in range(2)]
    group = ranks(start_trainer, nodes, store)
    for _ in range(4):
        save(group)
    end(group)
    again = ranks(start_trainer, nodes, store, "again")
    assert restored(again) == [4, 4]
    for trainer, first in zip(again, (1, 100), strict=True):  # no step of both: none is global
        trainer.step(first)
        assert [trainer.save() for _ in range(8)] == ["durable"] * 8
    for node in nodes:
        kept = {one.id.step for one in catalog.scan(node.storage).checkpoints}
        assert {3, 4} <= kept and not {1, 2} & kept


def test_a_restore_that_waits_behind_a_refused_start_takes_no_cpu(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    """It turned in a loop, and every user of the daemon waited."""
    group = ranks(start_trainer, nodes, store)
    save(group)
    end(group)
    wrong = ranks(start_trainer, nodes, store, run="refused")
    assert all("start='ff' names no start" in one for one in refused(wrong, start="ff"))
    end(wrong)
    again = ranks(start_trainer, nodes, store, run="again")
    daemon = psutil.Process(nodes[0].pid)
    again[0].post("restore")
    before = daemon.cpu_times()
    for _ in range(3):
        nodes[0].status()
    after = daemon.cpu_times()
    assert after.user - before.user < 1.0
    again[1].post("restore")
    assert [trainer.answer()["step"] for trainer in again] == [1, 1]
