"""One job on two nodes: two daemons, each with a storage directory of its own, and the store that
torchrun would bring."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccheck.nodes import voice
from pccheck.saving.saver import Saver
from pccheckd.nodes.carriers.patient import RETRY_S
from tests.support.daemon import Daemon, Start
from tests.support.etcd import server
from tests.support.torchstore import TorchStore
from tests.support.trainer import Commands, Connect, RemoteError, Trainer
from tests.support.waiting import suspend, until
from tests.support.widejob import (
    COUNTS,
    JOB,
    end,
    one_rank,
    ranks,
    refused,
    restored,
    restores,
    save,
)

CARRIED: list[str] = []  # in a trainer: the operations that it has carried out


def test_a_checkpoint_of_two_nodes_becomes_global(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    for step in (1, 2, 3):
        assert save(group) == step


def test_a_first_start_warns_of_nothing(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    assert [found["found"] for found in restores(group)] == [False, False]
    assert save(group) == 1
    assert [trainer.warnings for trainer in group] == [[], []]


def test_steps_in_memory_are_replaced_without_a_warning(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    """Each node decides what it writes of them, so they write different ones."""
    group = ranks(start_trainer, nodes, store, per_node=2, durable_every=3)
    for _ in range(90):
        for trainer in group:
            trainer.step()
        handles = [trainer.checkpoint() for trainer in group]
        for trainer, handle in zip(group, handles, strict=True):
            trainer.wait_copied(handle)
    assert [trainer.wait_global(89) for trainer in group] == ["global"] * 4
    # "skipped" where the other node had replaced the step in its memory before this one knew.
    ends = {"global", "superseded", "durable", "skipped"}
    until(lambda: {state for trainer in group for state in trainer.states()} <= ends)
    assert [trainer.warnings for trainer in group] == [[], [], [], []]


def test_all_ranks_restore_one_step(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    save(group)
    group[0].step()
    group[0].wait_durable(group[0].checkpoint())  # rank 1 ends without it
    end(group)
    again = ranks(start_trainer, nodes, store, run="again")
    assert restored(again) == [2, 2]
    assert save(again) == 3


def test_the_ranks_of_a_node_store_one_replicated_copy(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, per_node=2, replicated=True)
    save(group)
    end(group)
    again = ranks(start_trainer, nodes, store, "again", per_node=2, replicated=True)
    assert restored(again) == [1, 1, 1, 1]
    assert save(again) == 2


def test_records_of_starts_go_when_they_are_needed_no_more(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    for number in range(4):
        group = ranks(start_trainer, nodes, store, f"run-{number}")
        if number:
            assert restored(group) == [3 * number, 3 * number]
        for _ in range(3):  # a volume has five slots
            save(group)
        end(group)
    left = [len(list(node.storage.glob(f"*/{JOB}/start-*.json"))) for node in nodes]
    assert max(left) <= 3, left


def test_a_restore_in_mid_run_is_one_for_all_nodes(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, per_node=2)
    save(group)
    save(group)
    group[3].step()
    group[3].wait_durable(group[3].checkpoint())  # the others have not asked for it
    assert restored(group) == [2, 2, 2, 2]
    assert save(group) == 3
    assert restored(group) == [3, 3, 3, 3]


def test_a_daemon_that_restarts_goes_on_with_its_start(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    for number in (1, 0):
        nodes[number].kill()
        nodes[number].start()
        group[number].connects_again()
        ahead = group[number].step() - group[1 - number].step()
        group[1 - number].step(ahead)
        save(group)


def test_ranks_that_reconnect_one_by_one_save_for_one_start(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, per_node=2)
    save(group)
    nodes[1].kill()
    suspend(group[3].pid)
    nodes[1].start()
    group[2].connects_again()
    os.kill(group[3].pid, signal.SIGCONT)
    group[3].connects_again()
    steps = [trainer.step() for trainer in group]
    for trainer, step in zip(group, steps, strict=True):
        trainer.step(max(steps) - step)
    step = save(group)
    end(group)
    again = ranks(start_trainer, nodes, store, "again", per_node=2)
    assert restored(again) == [step] * 4


def test_saves_go_on_beside_a_store_that_has_stopped(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    store.stop()
    for _ in range(7):  # more than there are slots
        for trainer in group:
            assert trainer.save() == "durable"
    store.go_on()
    assert save(group) == 9
    end(group)
    assert restored(ranks(start_trainer, nodes, store, "again")) == [9, 9]


def test_a_store_that_ends_ends_nothing_else(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    store.kill()
    for _ in range(6):
        for trainer in group:
            assert trainer.save() == "durable"
    for trainer in group:
        trainer.close()
    with TorchStore() as another:
        assert restored(ranks(start_trainer, nodes, another, "again")) == [7, 7]


def test_the_nodes_agree_through_etcd_and_need_no_torch_store(
    start_trainer: Connect, start_daemon: Start, store: TorchStore, tmp_path: Path
) -> None:
    with server(tmp_path) as etcd:
        host, port = etcd.place.hosts[0]
        nodes = [start_daemon("--coordinator", f"etcd://{host}:{port}") for _ in range(2)]
        group = ranks(start_trainer, nodes, store)
        store.kill()
        save(group)
        end(group)
        with TorchStore() as another:
            again = ranks(start_trainer, nodes, another, "again")
            assert restored(again) == [1, 1]
            assert save(again) == 2


def waits_at_the_end(of: Commands, *, fails: bool) -> int:
    """In a trainer: how often the end of a with block waits for the other nodes."""
    waits: list[float] = []

    def flush(_: Saver, limit_s: float, *, everywhere: bool = True) -> None:
        waits.extend([limit_s] * everywhere)

    Saver.flush = flush  # type: ignore[assignment, method-assign]
    with suppress(KeyError), of.client:
        if fails:
            raise KeyError
    return len(waits)


@pytest.mark.parametrize("fails", [True, False])
def test_a_script_that_fails_waits_for_no_other_node(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, fails: bool
) -> None:
    """Its launcher waits for its end, and a new rank would meet the old one."""
    group = ranks(start_trainer, nodes, store)
    save(group)
    assert group[0].evaluate(partial(waits_at_the_end, fails=fails)) == (0 if fails else 1)


def test_a_lost_node_is_named_and_left_out_by_the_users_word(
    start_trainer: Connect, nodes: list[Daemon], start_daemon: Start, store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, replicated=True)
    save(group)
    end(group)
    empty = [start_daemon(), nodes[1]]  # node 1 lost its disk; a new one has its rank
    again = ranks(start_trainer, empty, store, "again", replicated=True)
    for trainer in again:
        trainer.post("restore")
    for trainer in again:
        with pytest.raises(RemoteError, match=r"host .* is not") as caught:
            trainer.answer()
        assert "without=" in str(caught.value)


def test_fresh_begins_without_the_checkpoints_of_all_nodes(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    end(group)
    again = ranks(start_trainer, nodes, store, "again", fresh=True)
    assert save(again) == 1
    end(again)
    assert restored(ranks(start_trainer, nodes, store, "third")) == [1, 1]


def test_fresh_on_one_node_only_is_refused_at_once(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    """Its rank calls neither restore() nor checkpoint(): it waits for the other one."""
    one_rank(start_trainer, nodes, store, "run", 0, fresh=True)
    (reason,) = refused([one_rank(start_trainer, nodes, store, "run", 1)])
    assert "wants restore(fresh=True), and host" in reason and "the same fresh=" in reason


def test_a_job_that_began_fresh_goes_back_to_its_own_checkpoints(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, fresh=True)
    for _ in range(2):
        save(group)
    assert restored(group) == [2, 2]
    assert restored(group, step=1) == [1, 1]


def test_a_daemon_that_restarts_in_a_restore_of_all_takes_part_in_it(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    save(group)
    group[1].post("restore")  # its node promises the round, and waits for the other one
    records = list(nodes[1].storage.glob(f"*/{JOB}/start-*.json"))
    before = [record.read_bytes() for record in records]
    until(lambda: [record.read_bytes() for record in records] != before)
    nodes[1].kill()
    nodes[1].start()
    with pytest.raises(RemoteError):
        group[1].answer()
    group[1].post("restore")
    group[0].post("restore")
    got = [trainer.answer()["step"] for trainer in group]
    assert got == [2, 2], nodes[1].log.read_text()
    assert save(group) == 3


def record_operations(_trainer: Commands) -> None:
    execute = voice._Lane._execute

    def recorded(lane: Any, welcome: Any, operation: Any) -> Any:
        CARRIED.append(str(operation))
        return execute(lane, welcome, operation)

    voice._Lane._execute = recorded  # type: ignore[method-assign]


def recorded_operations(_trainer: Commands) -> list[str]:
    return CARRIED


def test_a_start_carries_nothing_for_the_one_before(
    stack: ExitStack, start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    """Its first process connects, and others are not there yet. What the node waited for in the
    start before would delay for 20 s what it waits for now."""
    group = ranks(start_trainer, nodes, store, per_node=2)
    save(group)
    records = nodes[0].storage.glob(f"*/{JOB}/start-*.json")
    before = {path.stem.removeprefix("start-") for path in records}
    end(group)
    first = stack.enter_context(Trainer(**store.environment("again", 2, 0)))
    first.evaluate(record_operations)
    first.open(COUNTS, socket=str(nodes[0].socket), job=JOB, rank=0, world_size=4)
    time.sleep(2 * RETRY_S)  # in which the start before would ask for it
    later = [one_rank(start_trainer, nodes, store, "again", rank, 2) for rank in (1, 2, 3)]
    again = [first, *later]
    assert restored(again) == [1] * 4
    assert save(again) == 2
    carried = first.evaluate(recorded_operations)
    assert carried and not [one for one in carried for start in before if start in one]


def test_slots_and_keep_may_differ_between_nodes(
    start_trainer: Connect, start_daemon: Start, store: TorchStore
) -> None:
    nodes = [
        start_daemon("--slots", "3", "--keep", "1"),
        start_daemon("--slots", "6", "--keep", "3"),
    ]
    group = ranks(start_trainer, nodes, store)
    for step in range(1, 9):
        assert save(group) == step
    end(group)
    assert restored(ranks(start_trainer, nodes, store, "again")) == [8, 8]
