"""A job on two nodes whose nodes go on without each other: nothing is mixed or lost unasked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest

from tests.support import live
from tests.support.daemon import Daemon, Start
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect, Trainer
from tests.support.widejob import end, ranks, refused, restored, save

Launch = Callable[[list[Daemon]], list[Trainer]]


@pytest.fixture
def launch(start_trainer: Connect) -> Iterator[Launch]:
    """Begins a start with a store of its own, as torchrun does."""
    with contextlib.ExitStack() as stores:

        def begin(nodes: list[Daemon]) -> list[Trainer]:
            store = stores.enter_context(TorchStore())
            return ranks(start_trainer, nodes, store, f"run-{store.port}", replicated=True)

        yield begin


def why_refused(group: list[Trainer], **options: object) -> str:
    """All ranks are refused for one reason."""
    (found,) = set(refused(group, **options))
    end(group)
    return found


def node_of(daemon: Daemon) -> str:
    return (daemon.storage / ".pccheckd.node").read_text()[:8]


def go_on(launch: Launch, node: Daemon, found: int, saves: int, **options: object) -> None:
    """The job on one node only, with the copy of that node."""
    alone = launch([node])
    assert restored(alone, **options) == [found]
    for _ in range(saves):
        assert alone[0].save() == "durable"
    end(alone)


@pytest.mark.parametrize("replicated", [False, True])
def test_a_job_of_one_node_does_not_begin_again_on_two(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, replicated: bool
) -> None:
    group = ranks(start_trainer, nodes[:1], store, per_node=2, replicated=replicated)
    assert [save(group), save(group)] == [1, 2]
    end(group)
    both = ranks(start_trainer, nodes, store, "both", replicated=replicated)
    found = why_refused(both)
    assert ("has no copy" if replicated else "the part of rank 1 is on host") in found
    back = ranks(start_trainer, nodes[:1], store, "back", per_node=2, replicated=replicated)
    assert restored(back) == [2, 2]
    assert save(back) == 3


@pytest.fixture
def apart(launch: Launch, nodes: list[Daemon]) -> list[Daemon]:
    """Both nodes have step 2; then node 0 has saved 3 and 4 alone, and node 1 has saved 3."""
    group = launch(nodes)
    save(group)
    save(group)
    end(group)
    go_on(launch, nodes[0], 2, saves=2)
    # Half of the nodes are enough only with the first one.
    without = node_of(nodes[0])
    alone = launch(nodes[1:])
    reason = why_refused(alone)
    assert "1 of the 2 nodes that ran this job last are here" in reason and "without=" in reason
    go_on(launch, nodes[1], 2, saves=1, without=without)
    return nodes


def test_starts_that_ran_apart_are_named_and_not_mixed(launch: Launch, apart: list[Daemon]) -> None:
    group = launch(apart)
    reason = why_refused(group)
    found = re.findall(r"(\w{12}) \(host [^:]+: steps? ([0-9, and]+)\)", reason)
    starts = {steps: start for start, steps in found}
    assert starts.keys() == {"4 and 3", "3"} and "ran apart" in reason, reason
    first = starts["4 and 3"]
    assert f"restore(start='{first}')" in reason
    # Without --listen bytes do not travel: node 1 has no copy of step 4.
    group = launch(apart)
    reason = why_refused(group, start=first)
    assert "step 4 is global" in reason and "has no copy of it" in reason
    assert f"restore(step=2, start='{first}') goes back to step 2" in reason
    group = launch(apart)
    assert restored(group, step=2, start=first) == [2, 2]
    for step in range(3, 11):  # more than there are slots
        assert save(group) == step
    end(group)
    group = launch(apart)
    assert restored(group) == [10, 10]


def test_each_node_goes_on_alone_after_they_were_refused_together(
    launch: Launch, apart: list[Daemon]
) -> None:
    why_refused(launch(apart))
    for daemon, step in zip(apart, (4, 3), strict=True):
        daemon.kill()
        daemon.start()
        go_on(launch, daemon, step, saves=1)


def test_what_one_node_saved_alone_is_not_passed_over(launch: Launch, nodes: list[Daemon]) -> None:
    group = launch(nodes)
    save(group)
    end(group)
    go_on(launch, nodes[0], 1, saves=1)
    reason = why_refused(launch(nodes))
    assert "step 2 is global" in reason and "has no copy of it" in reason
    group = launch(nodes)
    assert restored(group, step=1) == [1, 1]


@pytest.mark.parametrize("step", [None, 1])
def test_what_a_survivor_has_beyond_the_last_global_one_counts(
    launch: Launch, nodes: list[Daemon], step: int | None
) -> None:
    """Its copy is whole, and the lost node can save nothing anymore."""
    group = launch(nodes)
    save(group)
    group[1].step()
    group[1].wait_durable(group[1].checkpoint())
    end(group)
    go_on(launch, nodes[1], step or 2, saves=2, without=node_of(nodes[0]), step=step)
    go_on(launch, nodes[1], (step or 2) + 2, saves=6)


def starts_of(node: Daemon) -> set[str]:
    return {path.stem.removeprefix("start-")[:12] for path in node.storage.glob("*/*/start-*.json")}


def test_a_word_of_restore_holds_on_one_node_and_again(launch: Launch, apart: list[Daemon]) -> None:
    """The start that both nodes have seen is chosen, and not what node 0 has saved alone since."""
    (first,) = set.intersection(*map(starts_of, apart))
    go_on(launch, apart[0], 2, saves=1, start=first)
    go_on(launch, apart[0], 3, saves=1, start=first)


@pytest.mark.parametrize("survivors", [1, 2])
def test_half_a_checkpoint_of_one_node_alone_is_passed_over(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, survivors: int
) -> None:
    group = ranks(start_trainer, nodes, store, per_node=2, replicated=True)
    save(group)
    end(group)
    alone = ranks(start_trainer, nodes[:1], store, "alone", per_node=2, replicated=True)
    assert restored(alone) == [1, 1]
    alone[0].step()
    alone[0].wait_durable(alone[0].checkpoint())
    end(alone)
    later = nodes[:survivors]
    again = ranks(start_trainer, later, store, "again", per_node=2, replicated=True)
    assert restored(again) == [1, 1] * survivors
    assert save(again) == 2


def test_a_job_goes_on_without_a_node_whose_disk_is_gone(
    launch: Launch, start_daemon: Start
) -> None:
    nodes = [start_daemon() for _ in range(4)]
    group = launch(nodes)
    save(group)
    end(group)
    lost, left = [*map(node_of, nodes[:2])], nodes[2:]
    for daemon in nodes[:2]:
        daemon.kill()
        live.remove(daemon.storage)
    reason = why_refused(launch(left))
    assert "2 of the 4 nodes that ran this job last are here" in reason
    group = launch(left)
    assert restored(group, without=[*lost, "nobody"]) == [1, 1]
    for trainer in group:
        assert sum("without='nobody' names no node of this job" in w for w in trainer.warnings) == 1
    assert save(group) == 2
    end(group)
    group = launch(left)
    assert restored(group) == [2, 2]
