"""A log that grows between checkpoints, as Hugging Face's Trainer has one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pccheck import PCcheckClient
from pccheck.integrations import growing
from pccheck.integrations.growing import GrowingLog, text_of
from tests.support.daemon import Daemon


class Counters:
    def __init__(self) -> None:
        self.fields: dict[str, Any] = {"step": 0, "log": [], "name": "run"}
        self.log = GrowingLog("log")

    def grow(self, step: int, count: int) -> None:
        self.fields["step"] = step
        self.fields["log"] += [{"loss": step / 7, "at": i, "text": "ö" * i} for i in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.log.encoded(self.fields)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fields = json.loads(text_of(state["state"]))


class OlderCounters(Counters):
    def state_dict(self) -> dict[str, Any]:
        return {"state": json.dumps(self.fields)}


def attach(client: PCcheckClient, counters: Counters, *, model: torch.nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    client.attach(model=model, optimizer=optimizer, trainer=counters)
    return optimizer


def update(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("custom", [False, True], ids=["plain model", "its own state_dict()"])
def test_a_log_in_many_checkpoints_is_restored_as_it_was(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, custom: bool
) -> None:
    monkeypatch.setattr(growing, "PIECE_ENTRIES", 50)
    model = torch.nn.Linear(16, 16)
    if custom:
        model.register_state_dict_post_hook(lambda *_: None)
    counters = Counters()
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        optimizer = attach(client, counters, model=model)
        for step in range(1, 8):
            update(model, optimizer)
            counters.grow(step, 23 * step)
            if step == 5:
                counters.fields["log"].pop(3)
            client.checkpoint(step=step)
            update(model, optimizer)
            if step % 3 == 0:
                client.flush()
        wanted = counters.fields
    restored = Counters()
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        optimizer = attach(client, restored, model=torch.nn.Linear(16, 16))
        assert client.restore().step == 7
        assert restored.fields == wanted
        restored.grow(8, 400)
        client.checkpoint(step=8).wait_durable(60)
        again = Counters()
        client.attach(trainer=again)
        client.restore()
        assert again.fields == restored.fields


def test_a_checkpoint_of_before_the_pieces_is_restored(daemon: Daemon) -> None:
    older = OlderCounters()
    older.grow(1, 30)
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        client.attach(trainer=older)
        client.checkpoint(step=1).wait_durable(60)
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        counters = Counters()
        client.attach(trainer=counters)
        assert client.restore().step == 1
        assert counters.fields == older.fields
        counters.grow(2, 10)
        client.checkpoint(step=2).wait_durable(60)
        assert text_of(client.recover().state["trainer"]["state"])
