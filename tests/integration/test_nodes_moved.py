"""Ranks that run on other nodes than before, with a copy of the state on each node."""

from __future__ import annotations

import os

from tests.support.daemon import Daemon
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect
from tests.support.waiting import until
from tests.support.widejob import JOB, end, ranks, restored, restores, save


def volumes(node: Daemon) -> list[str]:
    return sorted(path.name for path in node.storage.glob(f"*/{JOB}/*.pcc"))


def wait_for(node: Daemon, *names: str) -> None:
    """The file of a volume goes before the daemon has forgotten the volume's rank."""
    ranks_left = [int(name.removeprefix("rank-").partition(".")[0]) for name in names]
    until(lambda: volumes(node) == [*names], lambda: volumes(node))
    until(lambda: known(node) == ranks_left, lambda: known(node))


def known(node: Daemon) -> list[int]:
    return sorted(one["rank"] for one in node.status()["ranks"])


def test_a_moved_ranks_volume_goes_when_keep_newer_ones_are_global(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, replicated=True)
    for _ in range(3):
        save(group)
    end(group)
    nodes[1].stop()  # it knows the volume from the disk only
    nodes[1].start()
    swapped = ranks(start_trainer, nodes[::-1], store, "swapped", replicated=True)
    assert restored(swapped) == [3, 3]
    save(swapped)
    for rank, node in enumerate(nodes):
        assert volumes(node) == ["rank-0.0.pcc", "rank-1.0.pcc"]
        (said,) = [one for one in node.status()["notices"] if "another node" in one]
        assert said == (
            f"job 'wide' of uid {os.getuid()}: rank {rank} runs on another node now: its volume "
            "here (24.0 MiB) is deleted when 2 newer checkpoints are global"
        )
    save(swapped)
    for rank, node in enumerate(nodes):
        wait_for(node, f"rank-{1 - rank}.0.pcc")
        assert not any("another node" in one for one in node.status()["notices"])
    assert save(swapped) == 6
    end(swapped)
    back = ranks(start_trainer, nodes, store, "back", replicated=True)
    assert restored(back) == [6, 6]
    assert [save(back) for _ in range(3)] == [7, 8, 9]
    for rank, node in enumerate(nodes):
        wait_for(node, f"rank-{rank}.0.pcc")


def test_what_is_offered_stays_where_another_rank_was_before(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    """The volume that the other rank has left says nothing of what it saves elsewhere now."""
    group = ranks(start_trainer, nodes, store, replicated=True)
    save(group)
    end(group)
    swapped = ranks(start_trainer, nodes[::-1], store, "swapped", replicated=True)
    assert restored(swapped) == [1, 1]
    save(swapped)
    swapped[1].step()
    swapped[1].wait_durable(swapped[1].checkpoint())
    for _ in range(6):
        swapped[1].save()
    swapped[0].step()
    assert swapped[0].wait_global(swapped[0].checkpoint()) == "global"


def test_a_rank_with_the_copy_of_another_keeps_its_own_generators(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    """Two ranks would draw the same random numbers from then on."""
    group = ranks(start_trainer, nodes, store, replicated=True, rng=True)
    save(group)
    end(group)
    swapped = ranks(start_trainer, nodes[::-1], store, "swapped", replicated=True, rng=True)
    assert restored(swapped) == [1, 1]
    for rank, trainer in enumerate(swapped):
        (said,) = trainer.warnings
        assert (
            f"step 1 was saved by rank {1 - rank}, and the part of rank {rank} is not among" in said
        )
        assert "its generators (rng) are not restored" in said


def test_a_moved_ranks_pinned_checkpoint_stays(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, replicated=True)
    save(group)
    group[0].pin(1)
    save(group)
    end(group)
    swapped = ranks(start_trainer, nodes[::-1], store, "swapped", replicated=True)
    restored(swapped)
    for _ in range(4):
        save(swapped)
    wait_for(nodes[1], "rank-0.0.pcc")
    wait_for(nodes[0], "rank-0.0.pcc", "rank-1.0.pcc")


def test_a_fresh_start_keeps_a_moved_ranks_volume_as_long(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    restores(group)
    group[0].step()
    group[0].wait_durable(group[0].checkpoint())  # never global: nothing but the count keeps it
    end(group)
    swapped = ranks(start_trainer, nodes[::-1], store, "swapped", fresh=True)
    save(swapped)
    save(swapped)
    wait_for(nodes[0], "rank-1.0.pcc")
    nodes[0].logs("deleted ")
    log = nodes[0].log.read_text()
    assert log.index("step 2 is durable") < log.index("deleted ")
