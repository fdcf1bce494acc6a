"""Ranks that come up elsewhere than where their parts are: the nodes read them from each other."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from pccheck_native import _core
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon
from tests.support.noderank import NodeRank
from tests.support.programs import Program
from tests.support.shardtraining import equal
from tests.support.torchrun import variables
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect, RemoteError
from tests.support.waiting import suspend, until
from tests.support.widejob import COUNTS, JOB, end, ranks, refused, restored, restores, save

RECORD_STRIDE_BYTES = 1 << 20  # the default
LISTEN = ("--listen", "127.0.0.1")


def peer_server(node: Daemon) -> psutil.Process | None:
    for child in psutil.Process(node.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "pccheckd.peer.program" in child.cmdline():
                return child
    return None


def damage(node: Daemon, *, rank: int, step: int) -> None:
    """Changes a byte of a part on the disk."""
    (path,) = node.storage.glob(f"*/{JOB}/rank-{rank}.*.pcc")
    volume = _core.Volume(path, writable=False, allow_buffered=True)
    entry = next(one for one in volume.table() if one.step == step)
    at = 2 * RECORD_STRIDE_BYTES + entry.slot * volume.info().slot_bytes
    volume.close()
    with path.open("r+b") as file:
        file.seek(at + 100)
        byte = file.read(1)
        file.seek(at + 100)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())


def damage_at_rest(nodes: list[Daemon], at: int, *, rank: int, step: int) -> None:
    """The same while no daemon runs, so that none has the bytes in memory."""
    for node in nodes:
        node.stop()
    damage(nodes[at], rank=rank, step=step)
    for node in nodes:
        node.start()


def crossed(nodes: list[Daemon]) -> list[Daemon]:
    """The places of four ranks that were two on each node: ranks 1 and 2 have changed places."""
    return [nodes[0], nodes[1], nodes[0], nodes[1]]


@pytest.fixture
def sharing(start_daemon: Callable[..., Daemon]) -> list[Daemon]:
    """The daemons of two nodes that read from each other."""
    return [start_daemon(*LISTEN), start_daemon(*LISTEN)]


def test_ranks_that_swap_nodes_restore_their_own_parts(
    start_trainer: Connect, sharing: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, sharing, store)
    for _ in range(3):
        save(group)
    end(group)
    swapped = ranks(start_trainer, sharing[::-1], store, "swapped")
    found = restores(swapped)
    assert [(one["step"], one["source"]) for one in found] == [(3, "peer")] * 2
    assert [trainer.check(3) for trainer in swapped] == ["", ""]
    assert [save(swapped) for _ in range(4)] == [4, 5, 6, 7]
    end(swapped)
    again = ranks(start_trainer, sharing[::-1], store, "again")
    found = restores(again)
    assert [one["step"] for one in found] == [7, 7]
    assert "peer" not in {one["source"] for one in found}


def test_a_rank_whose_part_is_here_reads_it_here(
    start_trainer: Connect, sharing: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, sharing, store, per_node=2)
    save(group)
    end(group)
    moved = ranks(start_trainer, crossed(sharing), store, "moved")
    found = restores(moved)
    assert [one["step"] for one in found] == [1] * 4
    assert [one["source"] == "peer" for one in found] == [False, True, True, False]
    assert [trainer.check(1) for trainer in moved] == [""] * 4
    assert save(moved) == 2


def test_an_empty_spare_node_gets_a_copy_of_replicated_state(
    start_trainer: Connect, sharing: list[Daemon], start_daemon: Callable[..., Daemon],
    store: TorchStore,
) -> None:  # fmt: skip
    group = ranks(start_trainer, sharing, store, per_node=2, replicated=True)
    for _ in range(2):
        save(group)
    end(group)
    sharing[1].stop()
    nodes = [sharing[0], start_daemon(*LISTEN)]
    again = ranks(start_trainer, nodes, store, "again", per_node=2, replicated=True)
    assert restored(again) == [2] * 4
    assert [save(again) for _ in range(3)] == [3, 4, 5]


def test_more_ranks_read_replicated_state_of_fewer(
    start_trainer: Connect, sharing: list[Daemon], start_daemon: Callable[..., Daemon],
    store: TorchStore,
) -> None:  # fmt: skip
    group = ranks(start_trainer, sharing, store, replicated=True)
    save(group)
    end(group)
    nodes = [*sharing, start_daemon(*LISTEN)]
    more = ranks(start_trainer, nodes, store, "more", replicated=True)
    assert restored(more) == [1] * 3
    assert save(more) == 2


def test_a_node_without_listen_is_named_with_the_line_to_add(
    start_trainer: Connect, start_daemon: Callable[..., Daemon], store: TorchStore
) -> None:
    nodes = [start_daemon(*LISTEN), start_daemon()]
    group = ranks(start_trainer, nodes, store)
    save(group)
    end(group)
    swapped = ranks(start_trainer, nodes[::-1], store, "swapped")
    for error in refused(swapped):
        assert "start pccheckd with --listen on host " in error


def test_a_part_damaged_elsewhere_is_refused_and_flagged(
    start_trainer: Connect, sharing: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, sharing, store)
    save(group)
    save(group)
    end(group)
    damage(sharing[1], rank=1, step=2)
    swapped = ranks(start_trainer, sharing[::-1], store, "swapped")
    for trainer in swapped:
        trainer.post("restore")
    assert swapped[0].answer()["step"] == 2
    with pytest.raises(RemoteError, match="the part of rank 1 of step 2 cannot be read") as caught:
        swapped[1].answer()
    assert "damaged" in str(caught.value)
    end(swapped)
    again = ranks(start_trainer, sharing[::-1], store, "again")
    for error in refused(again):
        assert "the part of rank 1 is damaged on host" in error
        assert "restore(step=1) goes back to step 1" in error
    end(again)
    back = ranks(start_trainer, sharing[::-1], store, "back")
    assert restored(back, step=1) == [1, 1]


def test_a_peer_server_that_was_killed_comes_back(
    start_trainer: Connect, sharing: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, sharing, store)
    save(group)
    for node in sharing:
        process = until(lambda node=node: peer_server(node))
        process.kill()
        process.wait(60)
    end(group)
    swapped = ranks(start_trainer, sharing[::-1], store, "swapped")
    assert restored(swapped) == [1, 1]


@pytest.mark.long
def test_other_numbers_of_nodes_read_sharded_state(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Two nodes, then three, of which one is empty; then the ranks move on."""
    nodes = [start_daemon(*LISTEN) for _ in range(3)]
    last = ""
    for number, some in enumerate([nodes[:2], nodes, nodes]):
        places = [*some[number:], *some[:number]]  # the ranks move on
        last = trained(places, tmp_path, number, last)


@pytest.mark.long
def test_a_whole_replica_survives_the_other_nodes(
    start_daemon: Callable[..., Daemon], tmp_path: Path, ctl: Ctl
) -> None:
    """HSDP with a replica on each node. A node is lost, and the other node goes on. A spare node
    gets a copy from it. Then only the spare node is left."""
    nodes = [start_daemon(*LISTEN) for _ in range(3)]
    words, last = ("--replicated", "--cut"), ""
    last = trained([nodes[0]] * 2 + [nodes[1]] * 2, tmp_path, 0, last, *words, "hsdp", per_node=2)
    exported = []
    for rank, node in ((0, nodes[0]), (3, nodes[1])):
        target = tmp_path / f"{rank}.pt"
        ran = ctl(node.storage, "export", "sharded", "--rank", rank, "--output", target)
        assert ran.code == 0, ran.err
        exported.append(torch.load(target, weights_only=True))
    assert equal(exported[0]["model"], exported[1]["model"])
    nodes[1].stop()
    last = trained([nodes[0]] * 2, tmp_path, 1, last, *words, "fsdp", per_node=2)
    last = trained([nodes[2]] * 2 + [nodes[0]] * 2, tmp_path, 2, last, *words, "hsdp", per_node=2)
    nodes[0].stop()
    trained([nodes[2]] * 2, tmp_path, 3, last, *words, "fsdp", per_node=2)


def trained(
    places: list[Daemon], where: Path, number: int, last: str, *words: object, per_node: int = 1
) -> str:
    """Three more steps of a sharded model: the digest of its state after them. `last`: that of the
    state before, which must be restored; `places`: the node of each rank."""
    digests = where / str(number)
    digests.mkdir()
    with ExitStack() as running:
        store = running.enter_context(TorchStore())  # gloo's keys are used once
        programs = [
            running.enter_context(Program(
                "tests.support.shardtraining", digests, "--steps", 99,
                "--kill-at", 3 * number + 3, "--expect", 3 * number, *words,
                environment=variables(node, "sharded")
                | store.environment(f"r{number}", per_node, rank % per_node)
                | {"RANK": str(rank), "WORLD_SIZE": str(len(places))},
            ))
            for rank, node in enumerate(places)
        ]  # fmt: skip
        said = [program.finish() for program in programs]
    lines = [(digests / str(rank)).read_text().splitlines() for rank in range(len(places))]
    assert len({one[0].rpartition(" ")[0] for one in lines}) == 1, said
    assert number == 0 or lines[0][0].startswith(last), (last, lines[0], said)
    found = lines[0][-1].rpartition(" ")[0]
    assert found.startswith(f"{3 * number + 3} "), said
    return found


def test_a_node_without_listen_says_so_before_it_matters(
    stack: ExitStack, start_daemon: Callable[..., Daemon], store: TorchStore
) -> None:
    nodes = [start_daemon(*LISTEN), start_daemon()]
    group = [stack.enter_context(NodeRank(**store.environment("run", 1, 0))) for _ in nodes]
    for number, (rank, node) in enumerate(zip(group, nodes, strict=True)):
        rank.post("open", COUNTS, job=JOB, rank=number, world_size=2, socket=str(node.socket))
    for rank in group:
        rank.answer()
    for rank in group:
        rank.post("save_step", 60.0)
    assert [rank.answer()[1] for rank in group] == ["global", "global"]
    (said,) = [one for one in nodes[1].status()["notices"] if "--listen" in one]
    assert "a rank that comes up elsewhere cannot read its part" in said
    assert not [one for one in nodes[0].status()["notices"] if "--listen" in one]
    assert said.partition(": ")[2] in group[1].said[0], group[1].said
    assert not [one for one in group[0].said if "--listen" in one]


def test_doctor_tries_to_reach_the_other_nodes(
    start_trainer: Connect, sharing: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    group = ranks(start_trainer, sharing, store)
    save(group)
    told = ctl(None, "--socket", sharing[0].socket, "doctor").out
    assert "job wide: this node reaches the 1 other node that it may read from" in told
    sharing[1].stop()  # and its peer server with it
    told = ctl(None, "--socket", sharing[0].socket, "doctor").out
    assert "job wide: this node cannot read from host" in told and "Connection refused" in told
    assert "let pccheckd on host" in told


def test_doctor_lets_every_node_try_every_other_one(
    start_trainer: Connect, start_daemon: Callable[..., Daemon], store: TorchStore, ctl: Ctl
) -> None:
    nodes = [start_daemon(*LISTEN) for _ in range(3)]
    group = ranks(start_trainer, nodes, store)
    save(group)
    end(group)
    doctor = ("--socket", nodes[0].socket, "doctor", "--peers")
    assert "of 6 pairs of nodes each reader reaches the other node" in ctl(None, *doctor).out
    server = peer_server(nodes[2])
    assert server is not None
    suspend(server.pid)  # the kernel accepts for it, and it says nothing
    told = ctl(None, *doctor).out
    os.kill(server.pid, signal.SIGCONT)
    assert told.count("cannot read from host") == 2 and "no answer in time" in told
    assert "does not answer: " in told and "a rank that comes up on host" in told
    nodes[2].stop()
    told = ctl(None, *doctor).out
    assert told.count("cannot read from host") == 2 and "Connection refused" in told


def test_doctor_names_the_node_that_nobody_can_read_from(
    start_trainer: Connect, start_daemon: Callable[..., Daemon], store: TorchStore, ctl: Ctl
) -> None:
    nodes = [start_daemon(*LISTEN), start_daemon()]
    group = ranks(start_trainer, nodes, store)
    save(group)
    told = ctl(None, "--socket", nodes[0].socket, "doctor").out
    assert "nobody can read from host" in told and "--listen INTERFACE" in told


def test_another_copy_is_read_when_the_first_cannot_be_reached(
    start_trainer: Connect, start_daemon: Callable[..., Daemon], store: TorchStore
) -> None:
    """The spare node may read either of two copies. The server of the first copy stands still."""
    old = [start_daemon(*LISTEN) for _ in range(2)]
    group = ranks(start_trainer, old, store, replicated=True)
    save(group)
    end(group)
    new = [*old, start_daemon(*LISTEN)]
    again = ranks(start_trainer, new, store, "again", replicated=True)
    for trainer in again[:2]:
        trainer.post("restore")
    process = until(lambda: peer_server(old[0]))
    suspend(process.pid)
    again[2].post("restore")
    assert [trainer.answer()["step"] for trainer in again] == [1, 1, 1]
    assert [trainer.check(1) for trainer in again] == ["", "", ""]
    assert "another copy is read" in str(again[2].warnings)
    os.kill(process.pid, signal.SIGCONT)


def test_a_rank_never_gets_the_state_of_another_rank(
    start_trainer: Connect, sharing: list[Daemon], store: TorchStore
) -> None:
    """Two ranks change places, and the part of a rank that stays is damaged."""
    group = ranks(start_trainer, sharing, store, per_node=2)
    save(group)
    end(group)
    damage_at_rest(sharing, 1, rank=3, step=1)
    moved = ranks(start_trainer, crossed(sharing), store, "moved")
    for _ in range(2):
        for trainer in moved:
            trainer.post("restore")
        for trainer in moved[:3]:
            with contextlib.suppress(RemoteError):
                assert trainer.answer()["step"] == 1
        with pytest.raises(RemoteError, match="damaged"):
            moved[3].answer()
    end(moved)
    for error in refused(ranks(start_trainer, crossed(sharing), store, "again")):
        assert "the part of rank 3 is damaged on host" in error


def test_a_copy_that_proves_damaged_is_read_elsewhere(
    start_trainer: Connect, sharing: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, sharing, store, replicated=True)
    save(group)
    end(group)
    damage_at_rest(sharing, 1, rank=1, step=1)
    again = ranks(start_trainer, sharing, store, "again", replicated=True)
    found = restores(again)
    assert [one["step"] for one in found] == [1, 1] and found[1]["source"] == "peer"
    (said,) = again[1].warnings
    assert "the copy of step 1 on this node was skipped" in str(said)
    assert [trainer.check(1) for trainer in again] == ["", ""]
    assert save(again) == 2
