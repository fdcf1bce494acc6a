"""Hugging Face's Trainer with PCcheck: a small GPT-2 on the text of Python's own documentation.

    pip install '.[huggingface]'
    export PCCHECK_STORAGE=checkpoints
    python examples/hf_trainer.py --autostart

Kill it whenever you like and start it again: it continues in the middle of the epoch, with the
losses of a run that was never stopped. It needs neither a GPU nor the network. Where a pccheckd
serves the node, leave PCCHECK_STORAGE and --autostart out.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from pccheck.integrations.huggingface import PCcheckCallback, pccheck_resume

WINDOW = 32


def windows(length: int) -> list[dict[str, Tensor]]:
    """The beginning of the text as bytes, in windows."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()[:length]
    tokens = torch.tensor(list(text))
    pieces = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


class AllDigits(TrainerCallback):  # type: ignore[misc]
    """Prints each loss with all digits, so that two runs can be compared bit for bit."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if state.global_step:
            print(f"resumed at step {state.global_step}", flush=True)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **_more: Any
    ) -> None:
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps; 0 = no checkpoints at all")
    parser.add_argument("--autostart", action="store_true", help="a private daemon")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=256, n_positions=WINDOW, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        "hf-output", max_steps=options.steps, per_device_train_batch_size=8, learning_rate=3e-3,
        gradient_accumulation_steps=2, lr_scheduler_type="cosine", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=windows(30_000), callbacks=[AllDigits()]
    )
    trainer.remove_callback(PrinterCallback)
    if options.every:
        trainer.add_callback(PCcheckCallback(options.every, autostart=options.autostart))
    trainer.train(resume_from_checkpoint=pccheck_resume(trainer) if options.every else None)


if __name__ == "__main__":
    main()
