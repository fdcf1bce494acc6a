"""Optimizers and schedulers that train what is attached, and are not attached: which are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR, StepLR

from pccheck.state.attaching import checked
from pccheck.unsaved.beside import Beside

Things = dict[str, Any]


class Own:
    """An object of a script, whose state nobody knows."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def beside(**things: Any) -> Beside:
    made = Beside()
    made.attach(checked(things))
    return made


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return stepped(torch.optim.Adam(model.parameters()), model)


def test_an_optimizer_that_is_not_attached_is_named() -> None:
    net = nn.Linear(2, 3)
    found, kept = beside(net=net), adam(net)
    assert found.optimizer() == ("Adam", "net") and kept.state


def test_an_optimizer_is_found_when_its_first_step_comes_late() -> None:
    model = nn.Linear(2, 3)
    kept = torch.optim.AdamW(model.parameters())
    found = beside(model=model, progress={"epoch": 1})
    for _ in range(5):
        assert found.optimizer() == ("", "")
    model.load_state_dict(nn.Linear(2, 3).state_dict())  # as restore() does
    assert found.optimizer() == ("", "")
    stepped(kept, model)
    assert found.optimizer() == ("AdamW", "model")


def test_the_optimizer_of_a_second_network_is_named() -> None:
    model, critic = nn.Linear(2, 3), nn.Linear(2, 3)
    found = beside(model=model, critic=critic, optimizer=adam(model))
    kept = adam(critic)
    assert found.optimizer() == ("Adam", "critic") and kept.state


def test_an_optimizer_that_has_trained_before_is_not_named() -> None:
    model = nn.Linear(2, 3)
    kept = adam(model)
    assert beside(model=model).optimizer() == ("", "") and kept.state


def wrapping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Things:
    """An optimizer in an attached one, as SAM has it."""
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer.inner = optimizer  # type: ignore[attr-defined]
    return {"model": model, "optimizer": outer}


@pytest.mark.parametrize(
    "things",
    [
        lambda model, optimizer: {"model": model, "optimizer": optimizer},
        lambda model, optimizer: {"model": model, "trainer": Own()},
        lambda model, optimizer: {"model": model, "own": {"moments": torch.ones(2)}},
        lambda model, optimizer: {"model": nn.Linear(2, 3)},
        lambda model, optimizer: {"optimizer": torch.optim.SGD([torch.ones(2)])},
        wrapping,
    ],
)
def test_an_optimizer_that_loses_nothing_is_not_named(things: Any) -> None:
    model = nn.Linear(2, 3)
    optimizer = adam(model)
    found = beside(**things(model, optimizer))
    stepped(optimizer, model)
    assert found.optimizer() == ("", "")


def test_an_optimizer_of_another_client_is_not_named() -> None:
    model = nn.Linear(2, 3)
    optimizer = adam(model)
    weights, other = beside(weights=model), beside(model=model, optimizer=optimizer)
    stepped(optimizer, model)
    assert weights.optimizer() == other.optimizer() == ("", "")


def test_an_optimizer_without_a_state_is_not_named() -> None:
    model = nn.Linear(2, 3)
    found = beside(model=model)
    kept = stepped(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert found.optimizer() == ("", "") and not kept.state


@pytest.mark.parametrize(
    "make",
    [
        lambda one: StepLR(one, 2),
        lambda one: OneCycleLR(one, 0.1, 10),
        lambda one: SequentialLR(one, [StepLR(one, 1), StepLR(one, 2)], [3]),
        lambda one: ChainedScheduler([StepLR(one, 1), StepLR(one, 2)]),
    ],
)
def test_a_scheduler_that_is_not_attached_is_named(make: Any) -> None:
    model = nn.Linear(2, 3)
    optimizer = adam(model)
    things = {"model": model, "optimizer": optimizer, "progress": {"epoch": 1}}
    found = beside(**things)
    assert found.scheduler() == ""
    scheduler = make(optimizer)
    assert found.scheduler() == "optimizer"
    assert beside(**things, scheduler=scheduler).scheduler() == ""
    assert beside(**things, saved={"scheduler": {"last_epoch": 3}}).scheduler() == ""
    assert beside(**things, trainer=Own()).scheduler() == ""


def test_the_scheduler_of_the_second_optimizer_is_named() -> None:
    first, second = (torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1) for _ in range(2))
    attached, _left_out = StepLR(first, 2), StepLR(second, 2)
    assert beside(first=first, second=second, scheduler=attached).scheduler() == "second"


def test_a_plateau_scheduler_that_is_attached_is_not_named() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert beside(optimizer=optimizer, scheduler=plateau).scheduler() == ""
