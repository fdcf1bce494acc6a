"""State of an optimizer in attributes: what is named, and what is no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pccheck.state.attaching import checked
from pccheck.unsaved.leftout import LeftOut

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


def weightless(all_of: bool = True, /, **things: Any) -> str:
    watched = LeftOut()
    watched.attach(checked(things))
    found, lost, trained = watched.weights()
    assert watched.weights() == (found, lost, trained) and (lost == trained) is all_of
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


def criterion() -> Things:
    model, loss = nn.Linear(2, 3), nn.Linear(3, 3)
    return {"model": model, "optimizer": torch.optim.Adam([*model.parameters(), loss.weight])}


def listed() -> Things:
    """Named as tensors of the model."""
    model = nn.Linear(2, 3)
    model.more = [nn.Linear(3, 3)]
    parameters = [*model.parameters(), *model.more[0].parameters()]
    return {"model": model, "optimizer": torch.optim.Adam(parameters)}


def test_an_optimizer_with_some_unsaved_parameters_is_named() -> None:
    assert weightless(False, **criterion()) == "optimizer"
    assert weightless(**listed()) == ""


class Keeps(nn.Module):
    """With a tensor in a plain attribute, or where `keep` puts it."""

    def __init__(self, keep: Any = lambda tensor: tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = keep(torch.zeros(2))


def hidden(model: nn.Module, change: Callable[[Any], object], **more: Any) -> list[str]:
    """What is named after a change of the model, and not before it."""
    watched = LeftOut()
    watched.attach(checked({"model": model, **more}))
    assert watched.tensors() == []
    change(model)
    watched.tensors()
    return watched.tensors()


def unregistered(tensor: torch.Tensor) -> Any:
    module = nn.BatchNorm1d(2)
    return [module, tensor]


def assign(value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.kept = value(model.kept)

    return change


CHANGED = [
    (lambda t: t, lambda m: m.kept.add_(1), "model.kept"),
    (lambda t: t, assign(lambda t: t * 0.9 + 1), "model.kept"),
    (lambda t: [0.5, t], lambda m: m.kept[1].mul_(2), "model.kept.1"),
    (lambda t: {"name": "x", "bank": t}, lambda m: m.kept["bank"].fill_(1), "model.kept.bank"),
    (lambda t: {"bank": t}, assign(lambda kept: {"bank": kept["bank"] + 1}), "model.kept.bank"),
    (lambda t: [[t]], lambda m: m.kept[0][0].add_(1), "model.kept.0.0"),
    (lambda t: [nn.Parameter(t)], lambda m: m.kept[0].detach().add_(1), "model.kept.0"),
    (unregistered, lambda m: m.kept[0].weight.detach().add_(1), "model.kept.0.weight"),
    (unregistered, lambda m: m.kept[0](torch.randn(4, 2)), "model.kept.0.num_batches_tracked"),
    (lambda t: {"ema": nn.Sequential(nn.Linear(2, 2))},
     lambda m: m.kept["ema"][0].bias.detach().add_(1), "model.kept.ema.0.bias"),
]  # fmt: skip


@pytest.mark.parametrize(("keep", "change", "path"), CHANGED)
def test_a_tensor_that_a_module_hides_is_named_when_it_changes(
    keep: Any, change: Any, path: str
) -> None:
    assert hidden(Keeps(keep), change)[0] == path
    assert hidden(nn.Sequential(Keeps(keep)), lambda m: change(m[0]))[0] == path.replace(
        "model", "model.0", 1
    )


class Rotary(Keeps):
    """As in transformers: a buffer that is not persistent, and the same tensor as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.kept = self.table


class OfItsOwn(Keeps):
    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def cached(model: Any) -> None:
    model.cache = torch.ones(2)
    model.attention = [model.linear(torch.ones(1, 2))]
    model.kept = model.linear(torch.ones(2))  # with a gradient function


def tied() -> Keeps:
    model = Keeps(lambda _: [])
    model.kept += [model.linear, model, model.linear.weight]
    return model


UNCHANGED = [
    (Keeps, lambda m: m.linear(torch.ones(2))),
    (Keeps, cached),
    (Keeps, assign(torch.clone)),  # a cache that is made again
    (Keeps, assign(lambda t: torch.ones(5))),  # for another size
    (Keeps, assign(lambda t: (t + 1).double())),
    (Keeps, assign(lambda _: None)),
    (lambda: Keeps(lambda _: list(range(1000))), assign(lambda _: [torch.ones(2)])),
    (lambda: Keeps(lambda t: {"a": t}), assign(lambda _: {})),
    (Rotary, lambda m: m.kept.add_(1)),
    (OfItsOwn, lambda m: m.kept.add_(1)),
    (lambda: nn.Sequential(OfItsOwn()), lambda m: m[0].kept.add_(1)),
    (tied, lambda m: m.linear.weight.detach().add_(1)),
    (lambda: nn.LSTM(2, 2, 2), lambda m: m.flatten_parameters() or m.weight_ih_l0.detach().add_(1)),
    (lambda: nn.utils.spectral_norm(nn.Linear(2, 2)), lambda m: m(torch.ones(1, 2))),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
     lambda m: m(torch.ones(1, 2))),
    (lambda: AveragedModel(nn.Linear(2, 2)), lambda m: m.update_parameters(nn.Linear(2, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("make", "change"), UNCHANGED)
def test_what_a_module_makes_again_or_saves_is_not_named(make: Any, change: Any) -> None:
    assert hidden(make(), change) == []


def test_a_hidden_tensor_that_something_else_saves_is_not_named() -> None:
    class Saver:
        def __init__(self, state: Callable[[], Any]) -> None:
            self.state_dict = state

        def load_state_dict(self, state: Any) -> None:
            pass

    def grow(model: Any) -> None:
        model.kept.add_(1)

    model = Keeps()
    assert hidden(model, grow, extra={"kept": model.kept}) == []
    assert hidden(model, grow, extra=Saver(lambda: {"deep": [model.kept.clone()]})) == []
    assert hidden(model, grow, extra=Saver(lambda: {"other": torch.zeros(2)})) == ["model.kept"]
