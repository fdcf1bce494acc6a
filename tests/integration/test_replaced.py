"""Checkpoints that newer ones replace between two reads: readers read the newest one instead, or
report the replacement. It is never reported as damage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck import NoCheckpointError, PCcheckClient, Reader
from pccheck.restoring.reading import read_newest
from pccheck.restoring.rebuild import state_of_tree
from pccheck_store.directory import Storage
from pccheck_store.filesystem import PCcheckFileSystem
from pccheck_store.reading.errors import RecycledError
from pccheck_store.reading.state_reader import StateReader, open_state
from pccheck_store.remote import DaemonSource
from pccheck_wire import parts, tree
from pccheck_wire.errors import RequestLostError
from pccheck_wire.messages import Opened, Read, ReplyBody, RequestBody
from pccheckctl.commands import verify
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, expected


def save(client: PCcheckClient, *steps: int) -> None:
    for step in steps:
        client.checkpoint({"at": torch.full((9,), step)}, step=step).wait_durable(60)


def test_a_trainer_gets_the_newest_then(daemon: Daemon) -> None:
    opened_steps: list[int] = []
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        connection = client._connection()
        save(client, 1, 2)

        def use(opened: Opened, reader: StateReader, described: tree.Tree) -> Any:
            if not opened_steps:
                save(client, 3, 4)
            opened_steps.append(opened.step)
            return state_of_tree(described, reader.read_into)

        found, _ = read_newest(connection, None, use, job="job")
    assert (opened_steps, found.step, found.skipped) == ([2, 4], 4, [])
    assert found.state["at"].tolist() == [4] * 9


def test_a_read_whose_answer_was_lost_is_begun_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Read] = []
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        save(client, 1)
        connection = client._connection()
        request = connection.request

        def lossy(body: RequestBody, *, timeout_s: float) -> ReplyBody:
            answer = request(body, timeout_s=timeout_s)
            if isinstance(body, Read) and len(lost) < 3:
                lost.append(body)
                raise RequestLostError("its front has ended")
            return answer

        monkeypatch.setattr(connection, "request", lossy)
        assert client.recover().state["at"].tolist() == [1] * 9
    assert [read.load for read in lost] == [1, 2, 3]


@pytest.mark.parametrize("read", ["tree", "read_into"])
def test_a_reader_is_told_so(start_daemon: Start, read: str) -> None:
    """The lease of the reader has ended, because a new checkpoint needed the slot."""
    daemon = start_daemon("--slots", "3")
    source = DaemonSource(str(daemon.socket), daemon.storage)
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        save(client, 1, 2)
        (one,) = (item for item in source.held().checkpoints if item.id.step == 2)
        with contextlib.closing(source.open([one])) as payloads:
            save(client, 3, 4, 5)
            calls: dict[str, Callable[[], object]] = {
                "tree": lambda: payloads.tree(one.id.rank),
                "read_into": lambda: payloads.read_into(one.id.rank, 0, 0, bytes(24)),
            }
            with pytest.raises(RecycledError, match="replaced by a newer one"):
                calls[read]()
        assert verify.check(source, one, None)["result"] == "recycled"


COUNTS = [40_000, 7, 30_001]


class TwoRanks:
    """A job whose ranks store one copy together."""

    def __init__(self, connect: Connect, daemon: Daemon) -> None:
        self.ranks = [
            connect(
                daemon, COUNTS, rank=rank, world_size=2, replicated=True,
                environment={"LOCAL_WORLD_SIZE": "2"},
            )
            for rank in (0, 1)
        ]  # fmt: skip

    def save(self, count: int = 1) -> int:
        """Makes steps, and waits until each is durable on both; returns the last step."""
        for _ in range(count):
            handles = [(rank, rank.step(), rank.checkpoint()) for rank in self.ranks]
            for rank, _, handle in handles:
                assert rank.wait_global(handle) == "global"
        return handles[0][1]


def between_the_ranks(monkeypatch: pytest.MonkeyPatch, save: Callable[[], object]) -> None:
    """Calls `save` once, when a reader has the tree of one rank, and not yet those of others."""
    merge, calls = parts.merge, iter([save])

    def saves_first(*arguments: Any) -> tree.Tree:
        for call in calls:
            call()
        return merge(*arguments)

    monkeypatch.setattr(parts, "merge", saves_first)


def test_a_part_of_another_rank_that_was_replaced_was_not_absent(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--slots", "2", "--keep", "1")
    job = TwoRanks(start_trainer, daemon)
    with Reader("job", socket=daemon.socket) as reader:
        for read in (
            lambda opened: opened.read("model.parts.0"),
            lambda opened: opened.read("model.parts.1", rank=1),
            lambda opened: opened.describe(1),
        ):
            job.save()
            opened = reader.open()
            job.save(4)
            with pytest.raises(RecycledError, match="replaced by a newer one"):
                read(opened)


def test_a_volume_that_is_absent_is_named_as_before(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon()
    job = TwoRanks(start_trainer, daemon)
    job.save()
    (one,) = (c for c in Storage(daemon.storage).held().checkpoints if c.id.rank == 0)
    with (
        open_state(Storage(daemon.storage), one, [one]) as reader,
        pytest.raises(
            NoCheckpointError,
            match="rank 1 stores a part of step 1, and that part is not in this directory",
        ),
    ):
        reader.content()


@pytest.mark.parametrize("through", ["socket", "storage"])
def test_a_file_system_takes_the_newest_when_a_part_is_replaced(
    start_daemon: Start,
    start_trainer: Connect,
    monkeypatch: pytest.MonkeyPatch,
    through: str,
) -> None:
    daemon = start_daemon("--slots", "2", "--keep", "1")
    job = TwoRanks(start_trainer, daemon)
    job.save()
    between_the_ranks(monkeypatch, lambda: job.save(4))
    fs = PCcheckFileSystem(**{through: str(getattr(daemon, through))})
    with fs.open("job/newest/model.safetensors") as file:
        assert file.read().endswith(bytes(expected(5, 2, COUNTS[2]).numpy().data))


@pytest.mark.parametrize("command", ["recover", "export"])
def test_a_file_has_the_newest_when_a_part_is_replaced(
    start_daemon: Start,
    start_trainer: Connect,
    ctl: Ctl,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
) -> None:
    daemon = start_daemon("--slots", "2", "--keep", "1")
    job = TwoRanks(start_trainer, daemon)
    job.save()
    between_the_ranks(monkeypatch, lambda: job.save(4))
    output = tmp_path / "state.pt"
    ran = ctl(daemon.storage, command, "job", "--rank", "0", "--output", output, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["written"][0]["checkpoint"]["step"] == 5
    state = torch.load(output, weights_only=False)
    assert torch.equal(state["model"]["parts.2"], expected(5, 2, COUNTS[2]))
