"""A small GPT-2 with Hugging Face's Trainer, with its progress bar and a worker for its data."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.transparent.targets.steps import Log, words

ITEMS, VOCABULARY, LENGTH = 64, 32, 8


class Lines(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = torch.arange(LENGTH).mul(index + 3).add(index) % VOCABULARY
        return {"input_ids": line, "labels": line}


class Told(TrainerCallback):  # type: ignore[misc]
    """Writes every loss."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.log.step(state.global_step, float(logs["loss"]).hex(), logs["learning_rate"])


def main() -> None:
    options = words().parse_args()
    log = Log(options)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=4, logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, seed=7, dataloader_num_workers=1,
        )  # fmt: skip
        torch.manual_seed(7)
        model = GPT2LMHeadModel(config)
        Trainer(model, arguments, train_dataset=Lines(), callbacks=[Told(log)]).train()


if __name__ == "__main__":
    main()
