"""Checkpoints that newer ones replace between two reads: readers read the newest one instead, or
report the replacement. It is never reported as damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pccheck import PCcheckClient
from pccheck.daemon.connection import RequestLostError
from pccheck.restoring.reading import Payload, read_newest
from pccheck.restoring.rebuild import state_of_tree
from pccheck_store.readers import RecycledError
from pccheck_store.remote import DaemonStore
from pccheck_wire import tree
from pccheck_wire.messages import Read, ReplyBody, RequestBody
from pccheckctl.commands import verify
from tests.support.daemon import Daemon, Start


def save(client: PCcheckClient, *steps: int) -> None:
    for step in steps:
        client.checkpoint({"at": torch.full((9,), step)}, step=step).wait_durable(60)


def test_a_trainer_gets_the_newest_then(daemon: Daemon) -> None:
    opened_steps: list[int] = []
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        connection = client._connection()
        save(client, 1, 2)

        def use(payload: Payload, described: tree.Tree) -> Any:
            if not opened_steps:
                save(client, 3, 4)
            opened_steps.append(payload.opened.step)
            return state_of_tree(described, payload.load)

        found, _ = read_newest(connection, None, use)
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


@pytest.mark.parametrize("read", ["read", "read_into"])
def test_a_reader_is_told_so(start_daemon: Start, read: str) -> None:
    """The lease of the reader has ended, because a new checkpoint needed the slot."""
    daemon = start_daemon("--slots", "3")
    store = DaemonStore(str(daemon.socket), daemon.storage)
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        save(client, 1, 2)
        (one,) = (item for item in store.scan().checkpoints if item.step == 2)
        with store.reader(one) as reader:
            save(client, 3, 4, 5)
            calls: dict[str, Callable[[], object]] = {
                "read": lambda: reader.read(*reader.tree_place),
                "read_into": lambda: reader.read_into(bytes(24)),
            }
            with pytest.raises(RecycledError, match="replaced by a newer one"):
                calls[read]()
        assert verify.check(store, one, None)["result"] == "recycled"
