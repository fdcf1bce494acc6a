"""Trainings with Lightning whose hooks and optimizers do more than one step a batch: weights that
are exchanged for a validation, manual optimization, tuners. `lightningrun` runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import schedulefree
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import lr_finder
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

Tensors = list[torch.Tensor]

# The finder leaves its progress bar open, and another thread may end the bar within a line.
lr_finder.tqdm = functools.partial(lr_finder.tqdm, disable=True)


@dataclass
class Shape:
    model: LightningModule
    callbacks: list[Callback] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)  # options of Trainer
    loads: bool = False  # the model makes its loader


def hexadecimal(tensor: torch.Tensor) -> str:
    return str(tensor.double().sum().item().hex())


class Plain(LightningModule):
    """Prints what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss_of(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean() + self.net(batch).mean()
        place = f"epoch {self.current_epoch} batch {batch_idx}"
        logged = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        rates = [group["lr"] for each in self.trainer.optimizers for group in each.param_groups]
        told = f"{hexadecimal(loss)} {hexadecimal(batch)} lr {rates} logged {logged}"
        print(f"STEP {self.global_step} {place} {told}", flush=True)
        return loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        return self.loss_of(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        value = self.net(batch).square().mean()
        self.log("checked", value)
        print(f"VALIDATION {self.global_step} {hexadecimal(value)}", flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        print(f"END {self.global_step} {' '.join(map(hexadecimal, self.parameters()))}", flush=True)


class Exchange:
    """Other weights in the model, until the script puts its own back. `state_dict()` of a callback
    does not have them."""

    def __init__(self) -> None:
        self.own: Tensors | None = None

    @torch.no_grad()
    def put(self, model: LightningModule) -> None:
        self.own = [each.detach().clone() for each in model.parameters()]
        for each in model.parameters():
            each.mul_(0.5)

    @torch.no_grad()
    def take(self, model: LightningModule) -> None:
        if self.own is not None:
            for each, own in zip(model.parameters(), self.own, strict=True):
                each.copy_(own)
        self.own = None


class Swap(Callback):
    """... for a validation, until the next epoch begins or training ends."""

    def __init__(self) -> None:
        self.weights = Exchange()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights.put(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights.take(pl_module)

    on_train_end = on_train_epoch_start


class SwapMidEpoch(Swap):
    """... until the validation ends."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights.take(pl_module)


class SwapAtEnd(Callback):
    """Other weights in the model that `fit()` leaves."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Exchange().put(pl_module)
        values = " ".join(map(hexadecimal, pl_module.parameters()))
        print(f"LEFT {trainer.global_step} {values}", flush=True)


class SwapsItself(Plain):
    """The module's own hooks come after those of all callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = Exchange()

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.weights.put(self)

    def on_train_epoch_start(self) -> None:
        self.weights.take(self)

    def on_train_end(self) -> None:
        self.weights.take(self)
        super().on_train_end()


class Clips(Plain):
    """Changes weights in its own hooks after a batch and at an epoch's start."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for each in self.parameters():
            each.clamp_(-0.1, 0.1)

    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        for each in self.parameters():
            each.add_(torch.rand_like(each) / 100)


class Perturbs(Plain):
    """Changes weights before it trains, with random numbers. A resumed run does that again."""

    @torch.no_grad()
    def on_train_start(self) -> None:
        for each in self.parameters():
            each.add_(torch.rand_like(each) / 100)


class StepsItself(Plain):
    """Automatic optimization that steps after every second batch only."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        if batch_idx % 2:
            optimizer.step(closure)
        else:
            closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Anneals(Plain):
    """Sets at an epoch's start what no checkpoint has."""

    def on_train_epoch_start(self) -> None:
        self.scale = 1 / (self.current_epoch + 1)

    def loss_of(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.scale * super().loss_of(batch, batch_idx)


class Plateau(Plain):
    """Its scheduler follows a metric of the validation, at the end of each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        make = torch.optim.lr_scheduler.ReduceLROnPlateau
        scheduler = make(optimizer, patience=0, factor=0.5, threshold=1e9, threshold_mode="abs")
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "checked"},
        }


class Manual(Plain):
    """Adds up the gradients of `count` batches; some batches are left out."""

    def __init__(self, count: int = 4, skip: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.count, self.skip = count, skip

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = self.loss_of(batch, batch_idx)
        if self.skip and batch_idx % self.skip == 0:
            return
        self.manual_backward(loss / self.count)
        if (batch_idx + 1) % self.count == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Two(Plain):
    """Two optimizers: the second one steps after `count` batches, the first one after each."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(16, 1)
        self.count = count

    def configure_optimizers(self) -> Any:
        parts = self.net, self.other
        return [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in parts], []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        self.manual_backward(self.loss_of(batch, batch_idx))
        first.step()
        # Its backward pass leaves gradients in the first part, too.
        loss = (self.net(batch) * self.other(batch)).square().mean()
        self.manual_backward(loss / self.count)
        print(f"STEP {self.global_step} other {hexadecimal(loss)}", flush=True)
        if (batch_idx + 1) % self.count == 0:
            second.step()
            second.zero_grad()


class Turns(Two):
    """Two optimizers that take turns. Their gradients stay until their next turn."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        other = (self.net(batch) * self.other(batch)).square().mean()
        self.manual_backward(self.loss_of(batch, batch_idx) + other)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


class Tuned(Plain):
    """Makes its own loader, with a batch size that may be set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-2, 8

    def train_dataloader(self) -> Any:
        print(f"LOADER {self.current_epoch} {self.batch_size}", flush=True)
        items = [torch.linspace(0, 1, 16) * index / 48 for index in range(48)]
        return StatefulDataLoader(items, self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Stream(IterableDataset[torch.Tensor]):
    """Without a length: Lightning fetches a batch in advance."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(48):
            yield torch.linspace(0, 1, 16) * index / 48 + torch.rand(()) / 100


class Streams(Plain):
    def train_dataloader(self) -> Any:
        return StatefulDataLoader(Stream(), 8)


class Sized(Stream):
    """With a length, and without a state: torchdata skips the batches of a resumed run."""

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(48):
            yield torch.linspace(0, 1, 16) * index / 48


class SizedStreams(Plain):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(Sized(), 8, num_workers=self.workers)


class Unfreezes(BackboneFinetuning):
    """As the page says: `requires_grad` is in no checkpoint."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch >= self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)


class Backbone(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[0]

    def configure_optimizers(self) -> Any:
        trained = filter(lambda each: each.requires_grad, self.parameters())
        return torch.optim.AdamW(trained, lr=1e-2)


class ScheduleFree(Plain):
    """Its optimizer moves the weights for a validation, and back when the next batch begins."""

    def configure_optimizers(self) -> Any:
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, *_: Any) -> None:
        self.trainer.optimizers[0].train()

    def on_validation_start(self) -> None:
        self.trainer.optimizers[0].eval()


class Searches(Callback):
    """A tuner of the script's own, which sets the counters to 0 after its trial steps."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        lr_finder._lr_find(trainer, pl_module, num_training=6)


HALF = {"val_check_interval": 0.5}
SHAPES: dict[str, Callable[[], Shape]] = {
    "swap": lambda: Shape(Plain(), [Swap()]),
    "swap-mid-epoch": lambda: Shape(Plain(), [SwapMidEpoch()], HALF),
    "swap-at-end": lambda: Shape(Plain(), [SwapAtEnd()]),
    "swaps-itself": lambda: Shape(SwapsItself()),
    "average": lambda: Shape(Plain(), [EMAWeightAveraging(decay=0.5)], HALF),
    "clips": lambda: Shape(Clips()),
    "perturbs": lambda: Shape(Perturbs()),
    "steps-itself": lambda: Shape(StepsItself()),
    "anneals": lambda: Shape(Anneals()),
    "plateau": lambda: Shape(Plateau()),
    "plateau-early": lambda: Shape(Plateau(), [], {"val_check_interval": 4}),
    "manual": lambda: Shape(Manual(2), [], {"val_check_interval": 4}),
    "manual-skips": lambda: Shape(Manual(2, skip=5), [], {"val_check_interval": 3}),
    "two": lambda: Shape(Two(3), [], HALF),
    "turns": lambda: Shape(Turns(), [], HALF),
    "rate": lambda: Shape(Tuned(), [LearningRateFinder(num_training_steps=20)], loads=True),
    "stream": lambda: Shape(Streams(), loads=True),
    "sized": lambda: Shape(SizedStreams(), loads=True),
    "sized-worker": lambda: Shape(SizedStreams(1), loads=True),
    "swa": lambda: Shape(
        Plain(), [StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=1)]
    ),
    "unfreezes": lambda: Shape(Backbone(), [Unfreezes(unfreeze_backbone_at_epoch=1)]),
    "schedule-free": lambda: Shape(ScheduleFree(), [], HALF),
    "searches": lambda: Shape(Tuned(), [Searches()], loads=True),
    "size": lambda: Shape(Tuned(), [BatchSizeFinder(init_val=2, max_trials=1)], loads=True),
    "reloads": lambda: Shape(Tuned(), [], {"reload_dataloaders_every_n_epochs": 2}, loads=True),
}
