"""Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pccheck import capture_rng, restore_rng
from pccheck.integrations.lightning import PCcheckCallback
from tests.frameworks.resume_campaign.asked import EVERY, STEPS, Asked

ITEMS, BATCH, WIDTH = 44, 4, 16  # 11 batches in an epoch


def items() -> torch.Tensor:
    return torch.linspace(-1, 1, ITEMS * WIDTH).reshape(ITEMS, WIDTH) ** 3


class Model(LightningModule):
    """Reports each batch, with the step to which it belongs."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Dropout(0.1))
        self.head = nn.Linear(64, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.head(self.backbone(batch))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).sub(batch.sum(1, keepdim=True)).square().mean()
        self.tell(loss, batch_idx)
        return loss

    def tell(self, loss: torch.Tensor, batch_idx: int) -> None:
        part = f"epoch {self.current_epoch} batch {batch_idx}"
        self.asked.step(self.global_step + 1, loss.detach(), part=part)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.asked.step(self.global_step, self(batch).sum(), part=f"validation {batch_idx}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Adversaries(Model):
    """Manual optimization: two optimizers, each after four batches."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        makes, judges = self.optimizers()  # type: ignore[attr-defined, misc]
        made = self(batch)
        judged = self.critic(made.detach()).mean() - self.critic(batch.sum(1, keepdim=True)).mean()
        self.tell(judged, batch_idx)
        self.manual_backward((judged + self.critic.weight.square().sum()) / 4)
        self.manual_backward(-self.critic(made).mean() / 4, inputs=[*self.backbone.parameters()])
        if (batch_idx + 1) % 4 == 0:
            for each in (makes, judges):
                each.step()
                each.zero_grad()

    def configure_optimizers(self) -> Any:
        makes = torch.optim.Adam(self.backbone.parameters(), lr=1e-2)
        return [makes, torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9)]


class HeadFirst(Model):
    """For BackboneFinetuning, which adds the backbone to the optimizer."""

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


class Swap(Callback):
    """Validates rounded weights, and puts those of training back as the next epoch begins."""

    kept: list[torch.Tensor] | None = None

    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = [parameter.clone() for parameter in pl_module.parameters()]
        for parameter in pl_module.parameters():
            parameter.copy_(parameter.bfloat16())

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.kept is not None:
            torch._foreach_copy_(list(pl_module.parameters()), self.kept)
        self.kept = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)


class Tell(Callback):
    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.asked.began(trainer.global_step)


class Generators(Callback):
    """What Lightning's own checkpoints leave out."""

    state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return capture_rng()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.state is not None:
            restore_rng(self.state)


#: Each checkpoint is due when an epoch ends, before its validation.
SHORT = {"limit_train_batches": EVERY, "max_epochs": 14}
#: Each shape's module, and its options of Trainer.
SHAPES: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "epochs": (Model, {"accumulate_grad_batches": 2, "max_epochs": 7}),
    "average": (Model, {"limit_train_batches": 3 * EVERY, "max_epochs": 5}),
    "saver-then-swap": (Model, SHORT),
    "swap-then-saver": (Model, SHORT),
    "manual": (Adversaries, {"limit_train_batches": 8, "val_check_interval": 4, "max_epochs": 10}),
    "unfreezing": (HeadFirst, {"max_epochs": 4}),
}


def callbacks(shape: str, asked: Asked) -> list[Callback]:
    found: list[Callback] = [Tell(asked)]
    if shape == "average":
        found.append(EMAWeightAveraging(decay=0.9))
    elif shape == "unfreezing":
        found.append(BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3))
    elif "swap" in shape:
        found.append(Swap())
    if asked.saves == "own":
        files = asked.folder / "own"
        found.append(ModelCheckpoint(files, every_n_train_steps=EVERY, save_last=True))
        found.append(Generators())
    elif asked.saves:
        saver = PCcheckCallback(EVERY, **asked.options)
        found.insert(0 if shape == "saver-then-swap" else len(found), saver)
    return found


def run(shape: str, saves: str, folder: str, socket: str, kill_at: int) -> None:
    asked = Asked(saves, Path(folder), socket, kill_at)
    seed_everything(5, verbose=False)
    module, options = SHAPES[shape]
    trainer = Trainer(
        accelerator="cpu", devices=1, callbacks=callbacks(shape, asked), logger=False,
        enable_checkpointing=saves == "own", enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, **options,
    )  # fmt: skip
    model = module(asked)
    loader = StatefulDataLoader(items(), BATCH, shuffle=True)
    last = asked.folder / "own/last.ckpt"
    path: dict[str, Any] = {"ckpt_path": "pccheck://"} if saves == "pccheck" else {}
    if last.exists():
        path = {"ckpt_path": str(last), "weights_only": False}  # for the generators
    trainer.fit(model, loader, DataLoader(items(), BATCH * 4), **path)
    asked.ended(model)
