"""Lightning with PCcheck: run it, stop it with Ctrl-C or kill -9, run it again, and it continues.

pip install '.[lightning]' torchdata
python examples/lightning_module.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from pccheck.integrations.lightning import PCcheckCallback


class Sum(LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 512),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(512, 1),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        loss: torch.Tensor = (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if self.global_step % 50 == 0:
            print(f"step {self.global_step} epoch {self.current_epoch} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    data = TensorDataset(torch.randn(8192, 64, generator=torch.Generator().manual_seed(1)))
    saver = PCcheckCallback(every_n_steps=10, autostart=True, storage="checkpoints")
    trainer = Trainer(
        accelerator="cpu", max_epochs=8, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[saver],
    )  # fmt: skip
    loader = StatefulDataLoader(data, batch_size=64, shuffle=True)
    trainer.fit(Sum(), loader, ckpt_path="pccheck://")


if __name__ == "__main__":
    main()
