"""A training process whose model is mostly frozen: adapters on a base, by commands."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from pccheck import PCcheckClient

from .trainer import Commands, Trainer

LAYERS = 6
FROZEN = 24 << 20
ADAPTERS = 512 << 10
#: Adapters, as many bytes of momentum, and the tree; a block at each end of them; the manifest.
CHANGED = 2 * ADAPTERS + (64 << 10)


def frozen(number: int, nbytes: int = FROZEN) -> torch.Tensor:
    """Frozen parameter `number`."""
    return torch.arange(nbytes // 4 // LAYERS, dtype=torch.float32) + number


class Lora(torch.nn.Module):
    """Frozen and trained parameters in turn, as adapters lie in a model."""

    def __init__(self, nbytes: int = FROZEN) -> None:
        super().__init__()
        for number in range(LAYERS):
            base = torch.nn.Parameter(frozen(number, nbytes), requires_grad=False)
            self.register_parameter(f"base{number}", base)
            adapter = torch.zeros(ADAPTERS // 4 // LAYERS)
            self.register_parameter(f"adapter{number}", torch.nn.Parameter(adapter))


class LoraCommands(Commands):
    def open(self, counts: list[int], **options: Any) -> int:
        """`counts`: the number of frozen bytes, by default FROZEN."""
        model = self.lora = Lora(*counts)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.sgd = torch.optim.SGD(trained, lr=0.5, momentum=0.9)
        self.client = PCcheckClient(**options)
        self.client.attach(model=model, optimizer=self.sgd)
        return 0

    def save(self, step: int) -> int:
        """Makes a step and a checkpoint; returns its handle."""
        for parameter in self.lora.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, float(step))
        self.sgd.step()
        self.handles.append(self.client.checkpoint(step=step))
        return len(self.handles) - 1

    def train(self, step: int) -> None:
        """Makes a step, and waits until its checkpoint is durable."""
        self.handles[self.save(step)].wait_durable(60)

    def merge(self) -> None:
        """Changes frozen parameters through `.data`, which torch does not count."""
        self.lora.base0.data.add_(1)
        self.lora.base1.data.mul_(2)

    def digest(self) -> str:
        found = hashlib.sha256()
        state = [*self.lora.state_dict().values()]
        state += [entry["momentum_buffer"] for entry in self.sgd.state.values()]
        for tensor in state:
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    def resume(self) -> int | None:
        step: int | None = self.client.restore().step
        return step


class LoraTrainer(Trainer):
    commands = LoraCommands
