"""Hugging Face's Trainer, with a small GPT-2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from pccheck.integrations.huggingface import PCcheckCallback, pccheck_resume
from tests.frameworks.hf_training import LENGTH, WORDS, Lines
from tests.frameworks.resume_campaign.asked import EVERY, STEPS, Asked

#: Settings of Trainer. An epoch has 13 batches.
SHAPES: dict[str, dict[str, Any]] = {
    "epochs": {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"},
    "saver-then-swap": {"warmup_steps": 3},
    "swap-then-saver": {"warmup_steps": 3},
    "schedule-free": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
    "stream": {},
}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Has no length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        lines = Lines()
        yield from (lines[index] for index in range(len(lines)))


class Telling(Trainer):
    """Collects the losses of the micro-batches."""

    def compute_loss(self, model: Any, *arguments: Any, **options: Any) -> Any:
        found = super().compute_loss(model, *arguments, **options)
        if model.training:
            self.losses.append(found.detach())
        return found

    losses: list[torch.Tensor]


class Tell(TrainerCallback):
    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.trainer: Telling

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.asked.began(state.global_step)
        self.trainer.losses = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.asked.step(state.global_step, *self.trainer.losses)
        self.trainer.losses = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.asked.step(state.global_step, metrics["eval_loss"], part="evaluation")


class Swap(TrainerCallback):
    """Evaluates rounded weights, and puts those of training back as the next step begins."""

    kept: list[torch.Tensor] | None = None

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step % args.eval_steps == 0:
            self.kept = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())

    @torch.no_grad()
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if self.kept is not None:
            torch._foreach_copy_(list(model.parameters()), self.kept)
        self.kept = None

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.on_step_begin(args, state, control, model)


def settings(shape: str, asked: Asked) -> TrainingArguments:
    own = {"save_strategy": "steps", "save_steps": EVERY, "save_total_limit": 2}
    return TrainingArguments(
        str(asked.folder / "own"), use_cpu=True, report_to=[], disable_tqdm=True, seed=7,
        per_device_train_batch_size=2, max_steps=STEPS, logging_steps=1, learning_rate=1e-2,
        eval_strategy="steps", eval_steps=EVERY,
        **(own if asked.saves == "own" else {"save_strategy": "no"}), **SHAPES[shape],
    )  # fmt: skip


def run(shape: str, saves: str, folder: str, socket: str, kill_at: int) -> None:
    asked = Asked(saves, Path(folder), socket, kill_at)
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1
    )
    callbacks: list[TrainerCallback] = [tell := Tell(asked)]
    saver = [PCcheckCallback(EVERY, **asked.options)] if saves == "pccheck" else []
    swap = [Swap()] if "swap" in shape else []
    callbacks += swap + saver if shape == "swap-then-saver" else saver + swap
    data = Stream() if shape == "stream" else Lines()
    tell.trainer = trainer = Telling(
        GPT2LMHeadModel(config), settings(shape, asked), train_dataset=data,
        eval_dataset=Lines(), callbacks=callbacks,
    )  # fmt: skip
    if saver:
        path = pccheck_resume(trainer)
    else:
        place = asked.folder / "own"
        path = get_last_checkpoint(str(place)) if place.exists() else None
    trainer.train(resume_from_checkpoint=path)
    asked.ended(trainer.model)
