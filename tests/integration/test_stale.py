"""A script that trains another model or optimizer than the attached ones saves an old state: it is
warned. Other scripts are not warned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import PCcheckClient
from tests.support.daemon import Daemon

Train = Callable[[int], None]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[PCcheckClient]:
    with PCcheckClient(job="job", socket=daemon.socket) as client:
        yield client


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def backward(model: nn.Module) -> None:
    model(torch.randn(8, 4)).square().mean().backward()


def trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    def train(_: int) -> None:
        optimizer.zero_grad()
        backward(model)
        optimizer.step()

    return train


def said(client: PCcheckClient, train: Train, steps: range, every: int = 1) -> list[str]:
    """The warnings that an attached optimizer makes no steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            train(step)
            if step % every == 0:
                client.checkpoint(step=step)
    return [str(one.message) for one in caught if "made no step" in str(one.message)]


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("other_model", [True, False])
def test_an_optimizer_that_trains_no_more_is_named_once(
    client: PCcheckClient, every: int, other_model: bool
) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    client.attach(model=model, optimizer=optimizer)
    assert said(client, trains(model, optimizer), range(1, 2 * every + 1), every) == []
    model = model_of() if other_model else model  # a notebook; the next phase of a fine-tuning
    new = trains(model, optimizer_of(model))
    assert said(client, new, range(2 * every + 1, 5 * every), every) == []
    (told,) = said(client, new, range(5 * every, 9 * every), every)
    assert f"no step since step {2 * every}, and checkpoints hold that state" in told
    assert "client.attach(model=..., optimizer=...)" in told


def test_what_is_attached_again_is_no_such_case(client: PCcheckClient) -> None:
    model = model_of()
    for first in (1, 11):
        optimizer = optimizer_of(model)
        client.attach(model=model, optimizer=optimizer)
        assert said(client, trains(model, optimizer), range(first, first + 10)) == []


def accumulates(client: PCcheckClient) -> Train:
    """The steps are micro-batches; later updates have twice as many of them."""
    model = model_of()
    optimizer = optimizer_of(model)
    client.attach(model=model, optimizer=optimizer)

    def train(step: int) -> None:
        backward(model)
        if step % (8 if step < 32 else 16) == 0:
            optimizer.step()
            optimizer.zero_grad()

    return train


def alternates(client: PCcheckClient) -> Train:
    """A GAN whose generator makes few steps."""
    models = [model_of(), model_of()]
    optimizers = [optimizer_of(model) for model in models]
    client.attach(generator=models[0], critic=models[1], g=optimizers[0], c=optimizers[1])
    pairs = [trains(*pair) for pair in zip(models, optimizers, strict=True)]
    return lambda step: pairs[step % 20 != 0](step)


def by_hand(client: PCcheckClient) -> Train:
    """The attached optimizer never steps: an update by hand uses its state."""
    model = model_of()
    client.attach(model=model, optimizer=optimizer_of(model))

    def train(_: int) -> None:
        backward(model)
        client.gate()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * (parameter.grad if parameter.grad is not None else 0))

    return train


@pytest.mark.parametrize("kind", [accumulates, alternates, by_hand])
def test_loops_with_checkpoints_between_two_steps_are_no_such_case(
    client: PCcheckClient, kind: Any
) -> None:
    assert said(client, kind(client), range(1, 65)) == []
