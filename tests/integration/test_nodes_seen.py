"""What people see of a job on several nodes: `pccheckctl status`, `list`, `wait` and metrics."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

import pytest

from pccheck import NoCheckpointError, Reader
from pccheckctl import VERSION
from tests.integration.test_memory import samples
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect
from tests.support.waiting import until
from tests.support.widejob import COUNTS, JOB, end, ranks, save


def seen(daemon: Daemon) -> dict[str, Any]:
    """The job in the status of a node."""
    (found,) = daemon.status()["nodes"]
    assert isinstance(found, dict)
    return found


def row(daemon: Daemon, rank: int) -> dict[str, Any]:
    """The node of a rank, as another node's daemon shows it."""
    (found,) = [one for one in seen(daemon)["nodes"] if rank in one["ranks"]]
    assert isinstance(found, dict)
    return found


def test_status_has_a_row_for_each_node(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    save(group)
    for at, daemon in enumerate(nodes):
        found = seen(daemon)
        assert (found["phase"], found["refused"], found["silent_reason"]) == ("running", None, "")
        assert [one["ranks"] for one in found["nodes"]] == [[0], [1]]
        assert [one["here"] for one in found["nodes"]] == [at == 0, at == 1]
        assert {one["host"] for one in found["nodes"]} == {socket.gethostname()}
        assert row(daemon, at)["global_step"] == row(daemon, at)["offered_step"] == 2
        assert found["globals"] == 2 and found["operations_per_global"] > 0
    assert seen(nodes[0])["nodes"][0]["node"] != seen(nodes[0])["nodes"][1]["node"]
    until(lambda: row(nodes[0], 1)["global_step"] == 2)
    text = ctl(None, "--socket", nodes[0].socket, "status").out
    assert f"nodes    {JOB}: running; " in text
    assert re.search(rf"{re.escape(socket.gethostname())}, this node +\w{{8}} +0 ", text)
    found = ctl(None, "--socket", nodes[0].socket, "doctor", "--json").json["findings"]
    told, closed = [one for one in found if one["check"] == "nodes"]
    assert told["level"] == "ok" and "2 nodes agree" in told["found"], told
    assert "nobody can read from host" in closed["found"], closed
    assert {row(daemon, at)["version"] for daemon in nodes for at in (0, 1)} == {VERSION}
    traced = ctl(None, "--socket", nodes[0].socket, "trace", "--last", "60s").json["otherData"]
    assert [one["ranks"] for one in traced["nodes"][0]["nodes"]] == [[0], [1]]


def test_a_checkpoint_that_waits_for_a_node_names_the_node(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    assert row(nodes[0], 1)["waited_step"] is None
    group[0].step()
    group[0].wait_durable(group[0].checkpoint())
    until(lambda: row(nodes[0], 1)["waited_step"] == 2)
    assert row(nodes[0], 0)["waited_step"] is None
    group[1].step()
    group[1].wait_global(group[1].checkpoint())
    until(lambda: row(nodes[0], 1)["waited_step"] is None)


def test_a_node_that_waits_for_another_one_says_so(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    only = start_trainer(
        nodes[0], COUNTS, job=JOB, rank=0, world_size=2, environment=store.environment("run", 1, 0)
    )
    only.post("restore")
    until(lambda: seen(nodes[0])["waits_s"] > 10)
    found = nodes[0].status()
    assert found["daemon"]["state"] == "degraded"
    (warning,) = [text for text in found["warnings"] if "have not agreed" in text]
    assert "start the ranks that are missing" in warning and "rank 1" in warning
    (alone,) = seen(nodes[0])["nodes"]
    assert alone["here"] and alone["ranks"] == [0]
    assert ctl(None, "--socket", nodes[0].socket, "status").code == 3


def test_a_silent_store_is_named_and_the_warning_ends(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    store.stop()
    for trainer in group:
        trainer.step()
        trainer.wait_durable(trainer.checkpoint())
    until(lambda: seen(nodes[1])["silent_s"] > 10)
    found = nodes[1].status()
    assert found["daemon"]["state"] == "degraded"
    (warning,) = [text for text in found["warnings"] if "has not answered" in text]
    assert "this node still saves checkpoints" in warning and "torchrun" in warning
    store.go_on()
    until(lambda: nodes[1].status()["daemon"]["state"] == "ok")
    until(lambda: row(nodes[1], 1)["global_step"] == 2)


def flagged(ctl: Ctl, *place: object) -> dict[int, bool]:
    """By step: whether `list` calls it global."""
    found = ctl(*place, "list", JOB, "--json").json["checkpoints"]
    return {one["step"]: one["global"] for one in found}


def test_the_last_checkpoint_of_a_run_that_ends_is_global(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    """Nobody waits for the checkpoint but close()."""
    group = ranks(start_trainer, nodes, store)
    save(group)
    for trainer in group:
        trainer.step()
        trainer.checkpoint()
        trainer.post("close")
    for trainer in group:
        trainer.answer()
    end(group)
    for node in nodes:
        assert flagged(ctl, None, "--socket", node.socket) == {2: True, 1: True}


def test_a_reader_reads_the_parts_of_one_node(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store, per_node=2)
    save(group)
    with Reader(JOB, socket=nodes[1].socket) as reader:
        with pytest.raises(NoCheckpointError, match=r"missing on ranks \[0, 1\].*partial=True"):
            reader.open()
        opened = reader.open(partial=True)
        assert opened.ranks == (2, 3)
        read = [opened.read("model.parts.0", rank=rank) for rank in opened.ranks]
    assert [one.numel() for one in read] == [COUNTS[0]] * 2


def test_list_and_wait_know_what_all_nodes_have(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    save(group)
    group[1].step()
    group[1].wait_durable(group[1].checkpoint())
    asked = (None, "--socket", nodes[1].socket)
    assert flagged(ctl, *asked) == {3: False, 2: True, 1: True}
    waiting = ("wait", JOB, "--rank", 1, "--for=global", "--timeout")
    assert ctl(*asked, *waiting, "60s", "--step", 2).out == "step 2 is global\n"
    assert ctl(*asked, *waiting, "1ms", "--step", 3).code != 0
    group[0].step()
    group[0].wait_global(group[0].checkpoint())
    assert ctl(*asked, *waiting, "60s", "--step", 3).code == 0
    for daemon in nodes:
        daemon.stop()
    assert flagged(ctl, nodes[1].storage)[2]  # flags are on the disk with the next record
    (shown,) = ctl(nodes[1].storage, "status", "--json").json["groups"]
    assert shown["global"]["step"] in (2, 3) and shown["behind"] == {}


def test_metrics_say_which_node_is_waited_for(
    start_daemon: Start, start_trainer: Connect, store: TorchStore
) -> None:
    nodes = [start_daemon("--metrics", "127.0.0.1:0") for _ in range(2)]
    group = ranks(start_trainer, nodes, store)
    save(group)
    group[0].step()
    group[0].wait_durable(group[0].checkpoint())
    until(lambda: row(nodes[0], 1)["waited_step"] == 2)
    first, second = (metrics(daemon) for daemon in nodes)
    assert first["nodes_agreed"] == second["nodes_agreed"] == [1]
    for found in (first, second):
        assert found["nodes_store_operations_total"][0] > 0
        assert found["nodes_silent_seconds"][0] < 10  # an operation may be on its way
    own, other = first["node_waited_for_seconds"]
    assert own == 0 < other
    assert len(first["node_heard_timestamp_seconds"]) == 2
    assert not second.get("node_waited_for_seconds")  # this node does not hear of the others


def metrics(daemon: Daemon) -> dict[str, list[float]]:
    """The values of each, in the order of the nodes."""
    found: dict[str, list[float]] = {}
    for one in samples(daemon):
        found.setdefault(one.name.removeprefix("pccheck_"), []).append(one.value)
    return found


def test_a_job_that_was_dropped_on_one_node_names_that_node(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    end(group)
    dropped = ctl(None, "--socket", nodes[1].socket, "drop", JOB, "--yes")
    assert dropped.code == 0, dropped.err
    directory = nodes[1].storage / str(os.getuid()) / JOB
    assert not list(directory.glob("*"))  # no volume, and no record of a start
    group = ranks(start_trainer, nodes, store, run="again")
    for trainer in group:
        trainer.post("restore")
    for trainer in group:
        with pytest.raises(Exception, match=r"stored the part of rank 1 and no longer has it"):
            trainer.answer()
    until(lambda: seen(nodes[0])["phase"] == "refused")
    (warning,) = nodes[0].status()["warnings"]
    assert "this start is refused: step 1 is global" in warning and "fresh=True" in warning


def test_a_restore_of_all_in_mid_run_waits_since_it_began(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    save(group)
    assert seen(nodes[0])["waits_s"] == 0
    began_s = time.monotonic()
    group[0].post("restore")  # the other rank trains on
    waited_s = until(lambda: seen(nodes[0])["waits_s"])
    assert waited_s <= time.monotonic() - began_s
    group[1].post("restore")
    for trainer in group:
        assert trainer.answer()["step"] == 2
    assert seen(nodes[0])["waits_s"] == 0
