"""A job on several nodes that does not run: any of its nodes says what the nodes hold, and writes
the state of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheckctl.commands.cluster import DEGRADED
from tests.integration.test_travel import LISTEN, damage, peer_server
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect
from tests.support.waiting import until
from tests.support.widejob import COUNTS, JOB, end, ranks, refused, restored, save


@pytest.fixture
def nodes(start_daemon: Callable[..., Daemon]) -> list[Daemon]:
    return [start_daemon(*LISTEN), start_daemon(*LISTEN)]


@pytest.fixture
def run(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> Callable[..., None]:  # fmt: skip
    def run(steps: int = 3, per_node: int = 1, *, replicated: bool = False) -> None:
        """Trains, with another number of values on each rank unless `replicated`. Then all
        processes end, the store too, and the daemons start again."""
        group = [
            start_trainer(
                nodes[rank // per_node], [COUNTS[0] + rank * (not replicated), 11], job=JOB,
                rank=rank, world_size=per_node * len(nodes), replicated=replicated,
                environment=store.environment("run", per_node, rank % per_node),
            )
            for rank in range(per_node * len(nodes))
        ]  # fmt: skip
        for _ in range(steps):
            save(group)
        end(group)
        store.kill()
        for node in nodes:
            node.stop()
            start(node)

    return run


def start(node: Daemon) -> None:
    """Returns when other nodes can ask it."""
    node.start()
    until(lambda: peer_server(node))


def cluster(ctl: Ctl, node: Daemon, code: int = 0) -> tuple[str, dict[str, Any]]:
    """What a node says of the job: the text, and the document of the job."""
    arguments = ("--socket", node.socket, "status", "--cluster")
    said = ctl(None, *arguments)
    (job,) = ctl(None, *arguments, "--json").json["jobs"]
    assert said.code == code, said.out
    return said.out, job


def well(ctl: Ctl, storage: Path | None, *arguments: object) -> str:
    """What a command says that ends well."""
    ran = ctl(storage, *arguments)
    assert ran.code == 0, ran.err
    return ran.out


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_each_node_says_what_all_of_them_hold(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl
) -> None:
    run(per_node=2)
    for node in nodes:
        said, job = cluster(ctl, node)
        assert "job wide: restore() would restore step 3 on 4 ranks" in said
        assert "this node" in said and said.count("yes") == 2
        assert job["step"] == 3 and job["world_size"] == 4 and job["refused"] is None
        assert [one["ranks"] for one in job["nodes"]] == [[0, 1], [2, 3]]
        assert [one["newest_step"] for one in job["nodes"]] == [3, 3]
        assert [one["runs"] for one in job["nodes"]] == [False, False]


def test_a_node_that_does_not_answer_is_named(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl, tmp_path: Path
) -> None:
    run()
    nodes[1].stop()
    said, job = cluster(ctl, nodes[0], DEGRADED)
    assert "restore() would be refused: " in said and "stored the part of rank 1" in said
    assert "no: 127.0.0.1:" in said and "Connection refused" in said
    assert job["step"] is None and not job["nodes"][1]["answered"]
    recover = ("recover", JOB, "--all-ranks", "--output", tmp_path / "state.pt")
    told = ctl(None, "--socket", nodes[0].socket, *recover)
    assert told.code == 13 and "stored the part of rank 1" in told.err
    assert "Connection refused" in told.err and not [*tmp_path.iterdir()]
    start(nodes[1])
    well(ctl, None, "--socket", nodes[0].socket, *recover)


@pytest.mark.parametrize("per_node", [1, 2])
def test_any_node_writes_the_state_of_all_ranks(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl, tmp_path: Path, per_node: int
) -> None:
    run(per_node=per_node)
    for at, node in enumerate(nodes):
        target = tmp_path / f"{at}" / "state.pt"
        target.parent.mkdir()
        well(ctl, None, "--socket", node.socket, "recover", JOB, "--all-ranks", "--output", target)
        for rank in range(2 * per_node):
            alone = tmp_path / f"alone-{at}-{rank}.pt"
            holder = nodes[rank // per_node]
            well(ctl, holder.storage, "recover", JOB, "--rank", rank, "--output", alone)
            assert same(loaded(target.with_name(f"state.rank-{rank}.pt")), loaded(alone))


def test_a_rank_of_another_node_is_written_from_there(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl, tmp_path: Path
) -> None:
    run()
    for at, node in enumerate(nodes):
        for rank in (0, 1):
            target = tmp_path / f"{at}-{rank}.pt"
            well(
                ctl,
                None,
                "--socket",
                node.socket,
                "recover",
                JOB,
                "--rank",
                rank,
                "--output",
                target,
            )
    files = sorted(tmp_path.iterdir())
    assert same(loaded(files[0]), loaded(files[2])) and same(loaded(files[1]), loaded(files[3]))
    assert not same(loaded(files[0]), loaded(files[1]))  # the sizes tell


def test_a_chosen_step_is_written_if_all_nodes_have_it(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl, tmp_path: Path
) -> None:
    run()
    at = ("--socket", nodes[0].socket, "export", JOB, "--all-ranks", "--output")
    said = well(ctl, None, *at, tmp_path / "two.pt", "--step", 2)
    assert said.count("step 2 of job wide") == 2
    assert ctl(None, *at, tmp_path / "nine.pt", "--step", 9).code == 13


def test_damage_is_found_when_it_is_read(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl, tmp_path: Path
) -> None:
    run()
    for node in nodes:
        node.stop()
    damage(nodes[1], rank=1, step=3)
    for node in nodes:
        start(node)
    target = tmp_path / "state.pt"
    recover = ("--socket", nodes[0].socket, "recover", JOB, "--all-ranks", "--output", target)
    told = ctl(None, *recover)
    assert told.code == 14 and "skipped the checkpoint of step 3" in told.err, told.err
    assert "the part of rank 1 of step 3 cannot be read from another node" in told.err
    assert "state.rank-1.pt: step 2 of job wide rank 1" in told.out
    assert "restore() would restore step 2" in cluster(ctl, nodes[0])[0]


def test_replicated_state_needs_one_node_only(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl, tmp_path: Path
) -> None:
    """A rank whose part is lost gets the state of another rank, as in restore()."""
    run(per_node=2, replicated=True)
    nodes[1].stop()
    said, job = cluster(ctl, nodes[0], DEGRADED)
    assert "restore() would restore step 3 on 4 ranks" in said and job["step"] == 3
    recover = ("--socket", nodes[0].socket, "recover", JOB, "--output")
    told = ctl(None, *recover, tmp_path / "all.pt", "--all-ranks")
    assert told.code == 0 and "what only ranks 2, 3 had" in told.err, told.err
    assert "Connection refused" in told.err
    well(ctl, None, *recover, tmp_path / "one.pt")
    every = [loaded(tmp_path / f"all.rank-{rank}.pt") for rank in range(4)]
    assert all(same(one["model"], loaded(tmp_path / "one.pt")["model"]) for one in every)


def test_the_hint_is_for_who_asks(
    nodes: list[Daemon], run: Callable[..., None], ctl: Ctl, tmp_path: Path
) -> None:
    """`recover` says what to type, and names no argument of restore(). A node without --listen
    reads so."""
    run()
    nodes[0].stop()
    (own,) = nodes[1:]
    own.stop()
    own.flags = [flag for flag in own.flags if flag not in LISTEN]
    own.start()
    said, _ = cluster(ctl, own, DEGRADED)
    assert "not all nodes answer: start pccheckd with --listen on host" in said
    assert "fresh=True" not in said and "pccheckd on this node needs --listen" in said
    told = ctl(None, "--socket", own.socket, "recover", JOB, "--all-ranks", "-o", tmp_path / "x.pt")
    assert "hint: start pccheckd with --listen on the nodes that do not answer" in told.err
    assert "fresh=True" not in told.err
    told = ctl(None, "--socket", own.socket, "recover", JOB, "--rank", 1, "-o", tmp_path / "x.pt")
    assert told.code == 0 and "read from this node only" in told.err, told.err


def test_a_job_that_runs_says_so(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    # The node has no rank 0.
    wait = ("--socket", nodes[1].socket, "wait", JOB, "--newest", "--for=global", "--json")
    assert ctl(None, *wait).json["rank"] == 1
    said, job = cluster(ctl, nodes[1])
    assert "restore step 1 on 2 ranks; the job runs" in said and job["nodes"][0]["runs"]
    end(group)


def test_without_listen_this_node_is_read(
    start_trainer: Connect,
    start_daemon: Callable[..., Daemon],
    store: TorchStore,
    ctl: Ctl,
    tmp_path: Path,
) -> None:
    apart = [start_daemon(), start_daemon()]
    group = ranks(start_trainer, apart, store)
    save(group)
    said = ctl(None, "--socket", apart[0].socket, "status", "--cluster")
    assert "not all nodes answer: start pccheckd with --listen on host" in said.out
    target = tmp_path / "state.pt"
    told = ctl(None, "--socket", apart[0].socket, "recover", JOB, "--all-ranks", "-o", target)
    assert told.code == 13 and "there is no step that all 2 ranks" in told.err, told.err
    well(ctl, None, "--socket", apart[0].socket, "recover", JOB, "--rank", 0, "-o", target)
    alone = ctl(None, "--socket", start_daemon().socket, "status", "--cluster")
    assert alone.code == 0 and "no job of this node has run on several nodes" in alone.out


def test_ranks_restore_after_the_secret_was_lost(
    start_trainer: Connect, nodes: list[Daemon], run: Callable[..., None], ctl: Ctl
) -> None:
    """The node has new keys, which the others hear of at the next start."""
    run(replicated=True)
    nodes[1].stop()
    (nodes[1].storage / ".pccheckd.secret").unlink()
    start(nodes[1])
    assert "no: " in cluster(ctl, nodes[0], DEGRADED)[0]
    with TorchStore() as store:
        group = ranks(start_trainer, nodes, store, "again", replicated=True)
        assert restored(group) == [3, 3]
        save(group)
        assert "would restore step 4" in cluster(ctl, nodes[0])[0]
        end(group)


def test_a_job_that_was_dropped_on_one_node_goes_on_without_it(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, ctl: Ctl
) -> None:
    """The error names the node and the two ways on; without= takes the node that is here."""
    group = ranks(start_trainer, nodes, store, replicated=True)
    save(group)
    end(group)
    well(ctl, None, "--socket", nodes[0].socket, "drop", JOB, "--yes")
    again = ranks(start_trainer, nodes, store, "again", replicated=True)
    for error in refused(again):
        assert "ran this job last, and the job is not there any more" in error
        assert "on the other nodes, too" in error and "restore(without=" in error
    end(again)
    node = (nodes[0].storage / ".pccheckd.node").read_text()[:12]
    with TorchStore() as other:
        without = ranks(start_trainer, nodes, other, "without", replicated=True)
        assert restored(without, without=node) == [1, 1]
        save(without)
