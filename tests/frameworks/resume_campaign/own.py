"""Loops of one's own, with the client alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.frameworks.resume_campaign.asked import EVERY, STEPS, Asked
from tests.support.endtraining import (
    WIDTH,
    AveragesForEvaluation,
    Compiled,
    ScheduleFree,
    SkippedSteps,
    Training,
    network,
)

ITEMS, BATCH = 44, 4


class Scaled(SkippedSteps):
    """Two micro-batches in bfloat16 for each step, and a scaler that skips steps."""

    def loss(self) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss() / 2

    def step(self, number: int) -> float:
        first = self.loss()
        self.scaler.scale(first).backward()  # type: ignore[no-untyped-call]
        second = self.loss() * (float("inf") if number in (1, 4, 5, 14, 23) else 1.0)
        self.scaler.scale(second).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return float(first.detach()) + self.scaler.get_scale()


class Adversaries(Training):
    """A GAN: two models and two optimizers, which step in turn; one has a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(1, 64), nn.LeakyReLU(), nn.Linear(64, 1))
        self.makes = torch.optim.Adam(self.model.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.judges = torch.optim.RMSprop(self.critic.parameters(), lr=1e-3)
        self.slower = torch.optim.lr_scheduler.ExponentialLR(self.judges, 0.95)
        self.things |= {"critic": self.critic, "makes": self.makes, "judges": self.judges}
        self.things["slower"] = self.slower

    def step(self, number: int) -> float:
        made = self.model(torch.randn(8, WIDTH))
        real = torch.randn(8, 1) + 3
        judged = self.critic(made.detach()).mean() - self.critic(real).mean()
        self.judges.zero_grad()
        judged.backward()
        self.judges.step()
        self.slower.step()
        if number % 2:
            self.makes.zero_grad()
            (-self.critic(made).mean()).backward()
            self.makes.step()
        return float(judged.detach())


class Closures(Training):
    """LBFGS calls the loss several times in a step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))
        self.gate = lambda: None
        self.optimizer = torch.optim.LBFGS(
            self.model.parameters(), lr=0.5, max_iter=4, history_size=6
        )
        self.things = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> float:
        x = torch.randn(16, WIDTH)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return float(self.optimizer.step(closure))


class Loaded(Training):
    """Draws its batches from a loader, again and again; `epoch` is part of the state."""

    def __init__(self) -> None:
        self.gate = lambda: None
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader = self.make_loader()
        self.progress = {"epoch": 0}
        self.things = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.things["progress"] = self.progress
        self.batches = self.draw()

    def make_loader(self) -> Any:
        items = torch.linspace(-1, 1, ITEMS * WIDTH).reshape(ITEMS, WIDTH) ** 3
        return StatefulDataLoader(items, BATCH, shuffle=True)

    def draw(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader
            self.progress["epoch"] += 1

    def step(self, number: int) -> float:
        x = next(self.batches)
        self.optimizer.zero_grad()
        loss = self.model(x).sub(x.sum(1, keepdim=True) + self.progress["epoch"]).square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


class Workers(Loaded):
    """Two worker processes, which are started for each epoch."""

    def make_loader(self) -> Any:
        items = torch.linspace(-1, 1, ITEMS * WIDTH).reshape(ITEMS, WIDTH) ** 3
        return StatefulDataLoader(items, BATCH, shuffle=True, num_workers=2)


class Packed(IterableDataset[torch.Tensor]):
    """A stream that keeps its place. Texts of different lengths are cut into windows, and the rest
    goes into the next window. Each pass has another order."""

    def __init__(self) -> None:
        self.passes = self.place = 0
        self.rest: list[float] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.passes)).tolist()
        while True:
            while len(self.rest) >= WIDTH:
                window, self.rest = self.rest[:WIDTH], self.rest[WIDTH:]
                yield torch.tensor(window)
            if self.place == ITEMS:
                break
            index, self.place = order[self.place], self.place + 1
            self.rest = self.rest + [(index + 1) / ITEMS] * (16 + 7 * index % 48)
        self.passes, self.place = self.passes + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "place": self.place, "rest": self.rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.place, self.rest = state["passes"], state["place"], state["rest"]


class Stream(Loaded):
    def make_loader(self) -> Any:
        return StatefulDataLoader(Packed(), BATCH, drop_last=True)


class WeightAverage(Loaded):
    """torch's stochastic weight averaging: another schedule from step 12 on, averages, and
    BatchNorm's statistics of the average, with which it is evaluated."""

    START = 12

    def __init__(self) -> None:
        super().__init__()
        self.average = swa_utils.AveragedModel(self.model)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
        self.constant = swa_utils.SWALR(self.optimizer, swa_lr=5e-4, anneal_epochs=5)
        self.things |= {"average": self.average, "schedule": self.schedule}
        self.things["constant"] = self.constant

    def step(self, number: int) -> float:
        loss = super().step(number)
        if number < self.START:
            self.schedule.step()
            return loss
        self.constant.step()
        self.average.update_parameters(self.model)
        if number % 5 == 0:
            data = torch.linspace(-1, 1, 16 * WIDTH).reshape(2, 8, WIDTH)
            swa_utils.update_bn(data, self.average)
            self.average.eval()
            loss += float(self.average(data[0]).sum().detach())
            self.average.train()
        return loss


class Schedules(Training):
    """OneCycleLR moves the momentum, too; ReduceLROnPlateau depends on losses."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 1)
        self.first = torch.optim.AdamW(self.model.parameters())
        self.second = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.cycle = torch.optim.lr_scheduler.OneCycleLR(self.first, 1e-2, total_steps=STEPS + 1)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.second, factor=0.5, patience=1
        )
        self.things |= {"other": self.other, "first": self.first, "second": self.second}
        self.things |= {"cycle": self.cycle, "plateau": self.plateau}

    def step(self, number: int) -> float:
        for each in (self.first, self.second):
            each.zero_grad()
        x = torch.randn(8, WIDTH)
        loss = (self.model(x) + self.other(x)).sub(1).square().mean()
        loss.backward()
        for each in (self.first, self.second):
            each.step()
        self.cycle.step()
        self.plateau.step(loss.detach())
        return float(loss.detach()) + self.second.param_groups[0]["lr"]


class Unfreezing(Training):
    """The first layer is trained from step 14 on."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)  # type: ignore[index]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.things |= {"optimizer": self.optimizer}

    def step(self, number: int) -> float:
        if number == 14:
            self.model[0].requires_grad_(True)  # type: ignore[index]
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())


class Quantized(nn.Module):
    """A linear layer whose weights are packed by fours in bytes, and a trained LoRA beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        codes = torch.randint(0, 4, (outputs, inputs // 4, 4), dtype=torch.uint8)
        packed = (codes << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)).sum(-1)
        self.register_buffer("packed", packed.to(torch.uint8))
        self.register_buffer("scale", torch.rand(outputs, 1) / math.sqrt(inputs))
        self.down = nn.Parameter(torch.randn(4, inputs) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.packed[..., None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
        weight = (codes.flatten(1).float() - 1.5) * self.scale
        return x @ weight.T + (x @ self.down.T) @ self.up.T


class QuantizedBase(Training):
    """Adapters are trained over a frozen base in packed bytes."""

    def __init__(self) -> None:
        self.gate = lambda: None
        self.model = nn.Sequential(
            Quantized(WIDTH, 128), nn.ReLU(), nn.Dropout(0.1), Quantized(128, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.things = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())


class Plain(QuantizedBase):
    """Saved whenever `should_checkpoint()` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.things = {"model": self.model, "optimizer": self.optimizer}


SHAPES: dict[str, Callable[[], Training]] = {
    "swapped": AveragesForEvaluation,
    "schedule-free": ScheduleFree,
    "scaler": Scaled,
    "gan": Adversaries,
    "lbfgs": Closures,
    "swa": WeightAverage,
    "schedules": Schedules,
    "workers": Workers,
    "stream": Stream,
    "unfreezing": Unfreezing,
    "quantized": QuantizedBase,
    "compiled": Compiled,
    "interval": Plain,
}


def run(shape: str, saves: str, folder: str, socket: str, kill_at: int) -> None:
    asked = Asked(saves, Path(folder), socket, kill_at)
    torch.manual_seed(7)
    training = SHAPES[shape]()
    with asked.saver() as saver:
        training.gate = saver.gate
        saver.attach(rng=True, **training.things)
        first = saver.restore().step + 1
        asked.began(first - 1)
        for step in range(first, STEPS + 1):
            asked.step(step, training.step(step))
            due = saver.should_checkpoint(step) if shape == "interval" else step % EVERY == 0
            if due:
                saver.checkpoint(step=step)
    models = (thing for thing in training.things.values() if isinstance(thing, nn.Module))
    asked.ended(*models)
