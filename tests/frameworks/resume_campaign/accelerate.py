"""Loops with Accelerate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pccheck import PCcheckClient
from pccheck.integrations.accelerate import attach, skip_first_batches
from tests.frameworks.resume_campaign.asked import EVERY, STEPS, Asked

ITEMS, WIDTH, ACCUMULATION = 26, 8, 2
PER_EPOCH = 7  # steps: 13 batches


class Average:
    """A moving average by hand, registered for checkpoints, in place of which the model is
    evaluated."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        now = list(self.model.parameters())
        torch._foreach_lerp_(list(self.average.parameters()), now, 0.2)

    @torch.no_grad()
    def evaluate(self, data: torch.Tensor) -> torch.Tensor:
        own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.average.state_dict())
        found: torch.Tensor = self.model(data).square().mean()
        self.model.load_state_dict(own)
        return found

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


class Loop:
    """`shape` is "stateful" (loaders that keep their place, and a moving average) or "skipping"."""

    def __init__(self, shape: str, asked: Asked) -> None:
        self.asked, self.stateful = asked, shape == "stateful"
        torch.manual_seed(5)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATION,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=self.stateful),
            project_config=ProjectConfiguration(
                str(asked.folder / "own"), automatic_checkpoint_naming=True, total_limit=2
            ),
        )  # fmt: skip
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.LayerNorm(64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        data = torch.linspace(-1, 1, ITEMS * WIDTH).reshape(ITEMS, WIDTH) ** 3
        loader = DataLoader(TensorDataset(data), batch_size=2, shuffle=True)
        made = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = made
        self.average = Average(self.model)
        self.accelerator.register_for_checkpointing(self.average)
        torch.manual_seed(100)

    def run(self, client: PCcheckClient | None) -> None:
        step, rest = self.restored(client)
        self.asked.began(step)
        while True:
            losses = []
            for (batch,) in rest or self.loader:
                losses.append(self.train(batch))
                if not self.accelerator.sync_gradients:
                    continue
                step += 1
                self.asked.step(step, *losses)
                losses = []
                self.average.update()
                if step % EVERY == 0:
                    if client:
                        client.gate()
                    self.asked.step(step, self.average.evaluate(batch), part="evaluation")
                if step % EVERY == 0:
                    self.save(client, step)
                if step == STEPS:
                    return
            rest = None

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def restored(self, client: PCcheckClient | None) -> tuple[int, Any]:
        """The step, and a loader for the rest of its epoch."""
        folder = self.asked.folder / "own/checkpoints"
        if client:
            attach(client, self.accelerator)
            step = client.restore().step
            skip = skip_first_batches
        elif folder.exists():
            self.accelerator.load_state()
            newest = max(int(path.name.split("_")[1]) for path in folder.iterdir())
            step = EVERY * (newest + 1)
            self.accelerator.project_configuration.iteration = newest + 1
            skip = self.accelerator.skip_first_batches
        else:
            return 0, None
        return step, None if self.stateful else skip(self.loader, step % PER_EPOCH * ACCUMULATION)

    def save(self, client: PCcheckClient | None, step: int) -> None:
        if client:
            client.checkpoint(step=step)
        elif self.asked.saves == "own":
            self.accelerator.save_state()


def run(shape: str, saves: str, folder: str, socket: str, kill_at: int) -> None:
    asked = Asked(saves, Path(folder), socket, kill_at)
    loop = Loop(shape, asked)
    if saves == "pccheck":
        with PCcheckClient(**asked.options) as client:
            loop.run(client)
    else:
        loop.run(None)
    asked.ended(loop.model, loop.average.average)
