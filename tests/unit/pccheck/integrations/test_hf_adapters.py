"""Which tensors of a model with adapters are attached when its base is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pccheck.integrations.huggingface_adapters import Adapters
from pccheck_wire.errors import UnsupportedStateError


class Client:
    """Refuses one module, and keeps what was attached."""

    def __init__(self, refused: nn.Module) -> None:
        self._refused = refused
        self.place = "job", 0, "socket"
        self.attached: list[nn.Module] = []

    def attach(self, *, model: nn.Module) -> None:
        if model is self._refused:
            raise UnsupportedStateError("model.base.weight cannot be stored")
        self.attached.append(model)


class Base(nn.Module):
    """In PEFT's shape: the name of an adapter is a part of each name, or the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.norm, self.bias = nn.BatchNorm1d(4), nn.Parameter(torch.zeros(4))
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(4, 2), "reference": nn.Linear(4, 2)})
        self.lora_B = nn.ParameterDict({"mine": torch.zeros(2, 4)})
        self.head = nn.Module()
        self.head.original_module = nn.Linear(4, 1)
        self.head.modules_to_save = nn.ModuleDict({"mine": nn.Linear(4, 1)})
        self.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))
        self.lora_A["mine"].register_buffer("scratch", torch.zeros(1), persistent=False)
        self.peft_config: dict[str, Any] = {"mine": None, "reference": None}


@pytest.fixture
def model() -> Base:
    return Base()


def optimizer_of(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_all_adapters_are_attached_and_what_is_trained(model: Base) -> None:
    client = Client(model)
    Adapters(client, model, optimizer_of(model.bias))  # type: ignore[arg-type]
    (part,) = client.attached
    assert part.state_dict().keys() == {
        "bias", "lora_A.mine.weight", "lora_A.mine.bias", "lora_A.reference.weight",
        "lora_A.reference.bias", "lora_B.mine", "head.modules_to_save.mine.weight",
        "head.modules_to_save.mine.bias", "norm.running_mean", "norm.running_var",
        "norm.num_batches_tracked",
    }  # fmt: skip
    assert dict(part.named_parameters())["bias"] is model.bias


def test_a_model_without_adapters_stays_refused(model: Base) -> None:
    model.peft_config = {}
    with pytest.raises(UnsupportedStateError, match=r"^model\.base\.weight cannot be stored"):
        Adapters(Client(model), model, optimizer_of(model.bias))  # type: ignore[arg-type]


def test_a_model_that_can_be_stored_is_attached_whole(model: Base) -> None:
    client = Client(nn.Linear(1, 1))
    adapters = Adapters(client, model, optimizer_of(model.bias))  # type: ignore[arg-type]
    adapters.refresh()
    assert client.attached == [model]


def test_a_new_adapter_and_a_replaced_tensor_are_attached_next(model: Base) -> None:
    client = Client(model)
    adapters = Adapters(client, model, optimizer_of(model.bias))  # type: ignore[arg-type]
    adapters.refresh()
    assert len(client.attached) == 1
    model.lora_B["mine"] = nn.Parameter(torch.ones(2, 4))
    adapters.refresh()
    assert client.attached[1].state_dict()["lora_B.mine"].sum() == 8
    model.peft_config["more"] = None
    model.lora_A["more"] = nn.Linear(4, 2)
    adapters.refresh()
    adapters.refresh()
    assert len(client.attached) == 3
    assert "lora_A.more.weight" in client.attached[2].state_dict()
