"""A small GPT-2 with Hugging Face's Trainer, which prints every loss and metric bit for bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pccheck import PCcheckClient
from pccheck.integrations.huggingface import PCcheckCallback, pccheck_resume

ITEMS, WORDS, LENGTH = 26, 32, 8


class Lines(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(LENGTH).mul(index + 3).add(index) % WORDS
        return {"input_ids": words, "labels": words}


class Meddler(TrainerCallback):
    """Runs after PCcheck's callback, changes weights at the end of steps, draws random numbers in
    evaluations, and kills the process when step `kill_at` has ended and what was saved before is
    durable."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.saves: PCcheckCallback | None = None
        self.clash = ""
        self.flushes = True

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            model.lm_head.weight.clamp_(-0.05, 0.05)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.rand(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        told = {k: float(v).hex() for k, v in logs.items() if k in ("loss", "eval_loss")}
        for key, value in told.items():
            print(f"{state.global_step} {key} {value} {logs.get('learning_rate')}", flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After PCcheck's callback has taken its checkpoint."""
        if self.clash:
            PCcheckClient("hf", socket=self.clash).close()
            self.clash = ""
        if self.kill_at and state.global_step == self.kill_at:
            assert self.saves is not None and self.saves._client is not None
            if self.flushes:
                self.saves._client.flush(60)
            else:
                self.saves._client.gate()
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    output_dir: str,
    socket: str = "",
    kill_at: int = 0,
    every: int = 2,
    step: int | None = None,
    client: bool = False,
    clash: bool = False,
    patience: int = 0,
    ignored: bool = False,
    runs: int = 1,
    settings: dict[str, Any] | None = None,
    durable_every: int = 1,
) -> None:
    """Without a socket it trains without PCcheck. `runs`: in this process, as the folds of a cross
    validation."""
    args = TrainingArguments(
        output_dir, use_cpu=True, report_to=[], disable_tqdm=True, seed=7,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=3,
        lr_scheduler_type="cosine", warmup_steps=3, logging_steps=1,
        **({"learning_rate": 1e-2, "save_strategy": "no"} | (settings or {})),
    )  # fmt: skip
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1
    )
    meddler = Meddler(kill_at)
    meddler.flushes = durable_every == 1
    callbacks: list[TrainerCallback] = [meddler]
    given = PCcheckClient("hf", socket=socket) if client else None
    if given is not None:
        meddler.saves = PCcheckCallback(every, client=given)
    elif socket:
        meddler.saves = PCcheckCallback(every, "hf", socket=socket, durable_every=durable_every)
    if meddler.saves is not None:
        callbacks.insert(0, meddler.saves)
    if patience:
        callbacks.append(EarlyStoppingCallback(patience))
    trainer = Trainer(
        GPT2LMHeadModel(config), args, train_dataset=Lines(), eval_dataset=Lines(),
        callbacks=callbacks,
    )  # fmt: skip
    path = pccheck_resume(trainer, step) if socket else None
    print("RESUME", path and path.rpartition("/")[2], flush=True)
    meddler.clash = socket if clash else ""
    trainer.train(resume_from_checkpoint=None if ignored else path)
    weights = sum(p.double().sum().item() for p in trainer.model.parameters())
    print(f"END {trainer.state.global_step} {weights.hex()}", flush=True)
    print(f"BEST {trainer.state.best_metric} {trainer.state.best_global_step}", flush=True)
    print("LOGS", [entry.get("loss") for entry in trainer.state.log_history], flush=True)
    if path is not None:
        assert not os.path.exists(path)  # noqa: PTH110
    if given is not None:
        given.close()
    if runs > 1:
        run(output_dir, socket, every=every, runs=runs - 1, settings=settings)
