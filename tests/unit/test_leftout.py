"""State of an optimizer in attributes: what is named, and what is no state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pccheck.saving.leftout import LeftOut
from pccheck.state.attaching import checked

OPTIMIZERS = [
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.ASGD, torch.optim.LBFGS, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
]  # fmt: skip


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.momentum: Any = None

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        self.grads = [p.grad for p in self.all]
        self.total = torch.tensor(1.0)
        self.table = torch.ones(256)


def made(cls: type = Own, **more: Any) -> tuple[LeftOut, Any]:
    model = nn.Linear(2, 3)
    optimizer = cls(model.parameters())
    watched = LeftOut()
    watched.attach(checked({"model": model, "optimizer": optimizer, **more}))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(lambda: torch.ones(()))
    return watched, optimizer


@pytest.mark.parametrize(
    "kind", [lambda pairs: [t for _, t in pairs], dict, lambda pairs: [dict(pairs)]]
)
def test_tensors_beside_each_parameter_are_named_when_they_appear(kind: Any) -> None:
    watched, optimizer = made()
    assert watched.attribute() == ""
    pairs = [(index, torch.zeros_like(p)) for index, p in enumerate(optimizer.all)]
    optimizer.momentum = kind(pairs)
    assert watched.attribute() == "optimizer.momentum"


def test_one_tensor_for_all_parameters_is_named() -> None:
    watched, optimizer = made()
    optimizer.momentum = torch.zeros(9)
    assert watched.attribute() == "optimizer.momentum"


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_optimizers_of_torch_leave_nothing_out(cls: type) -> None:
    watched, optimizer = made(cls)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert watched.attribute() == watched.optimizer() == ""


def test_what_is_saved_in_another_way_is_not_named() -> None:
    beside = torch.zeros(3, 2)
    watched, optimizer = made(beside={"momentum": beside})
    optimizer.momentum = beside
    optimizer.flat = torch.zeros(9)
    for p in optimizer.all:
        optimizer.state[p]["flat"] = optimizer.flat[: p.numel()].view_as(p)
    assert watched.attribute() == ""
