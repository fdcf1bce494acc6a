"""State of an optimizer in attributes: what is named, and what is no state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pccheck.saving.leftout import LeftOut
from pccheck.state.attaching import checked

OPTIMIZERS = [
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.ASGD, torch.optim.LBFGS, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
]  # fmt: skip

MODEL = nn.Linear(2, 3)


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


Things = dict[str, Any]


class Copies:
    """Its state dict returns copies, as those of frameworks may."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


class Sub(nn.Linear):
    def state_dict(self, *args: Any, **more: Any) -> Any:
        return {"weight": self.weight.detach().clone()}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad])


def weightless(**things: Any) -> str:
    watched = LeftOut()
    watched.attach(checked(things))
    found = watched.weights()
    assert watched.weights() == found
    return found


def of_others() -> Things:
    """Attached objects that cannot hold parameters."""
    other = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    return {
        "scheduler": torch.optim.lr_scheduler.StepLR(other, 1),
        "scaler": torch.amp.GradScaler(enabled=False),
        "progress": {"epoch": 1, "losses": [0.5, None], "name": "x"},
        "loader": type("Loader", (Copies,), {"__module__": "torchdata.x"})(nn.Linear(2, 3)),
    }


def redefined(**options: Any) -> Things:
    return {"model": nn.Linear(2, 3, **options), "optimizer": adam(nn.Linear(2, 3))}


@pytest.mark.parametrize(
    "things",
    [
        lambda: {"optimizer": adam(nn.Linear(2, 3))},
        lambda: {"optimizer": adam(nn.Linear(2, 3)), **of_others()},
        redefined,
        lambda: {**redefined(), "model": nn.Linear(2, 4)},
        lambda: {**redefined(), "model": nn.BatchNorm1d(8)},
    ],
)
def test_an_optimizer_without_its_parameters_is_named(things: Any) -> None:
    assert weightless(**things()) == "optimizer"


def test_the_optimizer_of_another_model_is_named() -> None:
    model = nn.Linear(2, 3)
    more = {"late": adam(nn.Linear(2, 3)), "last": adam(nn.Linear(2, 3))}
    assert weightless(model=model, optimizer=adam(model), **more) == "late"


def with_model(change: Any = lambda model: model, **more: Any) -> Things:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return {"model": change(model), "optimizer": adam(model), **more}


def lora(kind: Any) -> Things:
    base = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))
    trained = {name: p for name, p in base.named_parameters() if p.requires_grad}
    return {"adapters": kind(base, trained), "optimizer": adam(base)}


def masters() -> Things:
    model = nn.Sequential(nn.Linear(2, 3).bfloat16(), nn.LayerNorm(3))
    copies = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    return {"model": model, "optimizer": torch.optim.Adam(copies)}


def flat_masters() -> Things:
    flat = torch.zeros(9, requires_grad=True)
    return {"model": nn.Linear(2, 3).bfloat16(), "optimizer": torch.optim.Adam([flat])}


def views_of_one() -> Things:
    model, flat = nn.Linear(2, 3), torch.zeros(9, requires_grad=True)
    model.weight.data, model.bias.data = flat.data[:6].view(3, 2), flat.data[6:]
    return {"model": model, "optimizer": torch.optim.Adam([flat])}


def frozen_all() -> Things:
    return {"optimizer": torch.optim.Adam(nn.Linear(2, 3).requires_grad_(False).parameters())}


@pytest.mark.parametrize(
    "things",
    [
        with_model,
        lambda: with_model(torch.compile),
        lambda: with_model(nn.DataParallel),
        lambda: with_model(ema=AveragedModel(nn.Linear(2, 3))),
        lambda: with_model(lambda model: model[0].requires_grad_(False) and model),
        lambda: lora(lambda _base, trained: trained),
        lambda: lora(lambda _base, trained: {"clones": [p.clone() for p in trained.values()]}),
        lambda: lora(lambda _base, trained: {"packed": b"bytes"}),
        lambda: lora(lambda base, _trained: base[1]),
        lambda: lora(lambda base, _trained: Copies(base[1])),
        lambda: {"model": Sub(2, 3), "optimizer": adam(nn.Linear(2, 3))},
        masters,
        flat_masters,
        views_of_one,
        frozen_all,
        lambda: {"model": nn.Linear(2, 3)},
    ],
)
def test_parameters_that_may_be_saved_are_no_trouble(things: Any) -> None:
    assert weightless(**things()) == ""


class Layerwise(torch.optim.SGD):
    """As Trainer's GaLore: a dummy, beside an optimizer for each parameter."""

    def __init__(self, parts: Any) -> None:
        super().__init__([torch.zeros(1)], lr=0.1)
        self.parts = parts


def each(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]


@pytest.mark.parametrize(
    ("keep", "path"),
    [
        (lambda parts: dict(zip(MODEL.parameters(), parts, strict=True)), "parts.0"),
        (lambda parts: {"first": parts[0], "second": parts[1]}, "parts.first"),
        (list, "parts.0"),
        (lambda parts: {"all": tuple(parts)}, "parts.all.0"),
    ],
)
def test_optimizers_in_dicts_and_lists_are_named(keep: Any, path: str) -> None:
    parts, watched = each(MODEL), LeftOut()
    attached = {"model": MODEL, "optimizer": Layerwise(keep(parts))}
    watched.attach(checked(attached))
    assert watched.optimizer() == ""  # without a state
    MODEL(torch.ones(1, 2)).sum().backward()
    for part in parts:
        part.step()
    assert watched.optimizer() == f"optimizer.{path}"
    watched.attach(checked(attached | {"a": parts[0], "b": parts[1]}))
    assert watched.optimizer() == ""
