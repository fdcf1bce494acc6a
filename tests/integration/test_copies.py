"""Copies of a client and its handles are refused in one sentence, and end nothing."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pccheck import PCcheckClient
from tests.support.daemon import Daemon

WAYS: dict[str, Callable[[Any], object]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.fixture
def client(daemon: Daemon) -> Iterator[PCcheckClient]:
    with PCcheckClient(job="job", socket=daemon.socket) as made:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        made.attach(model=model, optimizer=optimizer)
        optimizer.step()
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_client_is_refused_and_closes_nothing(client: PCcheckClient, way: str) -> None:
    hooks = client._planner.hooks
    with pytest.raises(TypeError, match=r"PCcheckClient cannot be copied.*leave the client out"):
        WAYS[way](client)
    gc.collect()
    assert client.connected and not client.closed and hooks
    client.checkpoint(step=1).wait_durable(30)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_handle_is_refused_and_costs_nothing(client: PCcheckClient, way: str) -> None:
    handle = client.checkpoint(step=1)
    with pytest.raises(TypeError, match=r"Checkpoint cannot be copied.*pass on handle\.step"):
        WAYS[way](handle)
    assert pickle.loads(pickle.dumps(handle.wait_durable(30))).step == 1


def test_a_deep_copy_of_what_has_a_client_is_refused_too(client: PCcheckClient) -> None:
    """A shallow copy shares the client, and ends nothing either."""
    trainer = SimpleNamespace(client=client, last=client.checkpoint(step=1))
    for inside in (trainer, [client], {"last": trainer.last}):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(inside)
    del copy.copy(trainer).client
    gc.collect()
    assert client.connected and not client.closed


def test_what_is_attached_can_still_be_copied(client: PCcheckClient) -> None:
    """The hooks of an optimizer, and a model, refer to no client."""
    optimizer = client._planner.attached["optimizer"]
    model = client._planner.attached["model"]
    for way in WAYS.values():
        way(model)
    pickle.loads(pickle.dumps(optimizer.state_dict()))
    copy.deepcopy(optimizer)
