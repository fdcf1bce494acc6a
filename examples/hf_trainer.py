"""Hugging Face's Trainer with PCcheck: a small GPT-2 on the text of Python's own documentation.

    pip install '.[huggingface]'
    python examples/hf_trainer.py

Kill it whenever you like and start it again: it continues in the middle of the epoch, with the
losses of a run that was never stopped. It needs neither a GPU nor the network. Without `autostart`
and `storage` it would use the pccheckd of this node.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from pccheck.integrations.huggingface import PCcheckCallback, pccheck_resume

WINDOW = 32


def windows(length: int) -> list[dict[str, Tensor]]:
    """The beginning of the text as bytes, in windows."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()[:length]
    tokens = torch.tensor(list(text))
    pieces = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps from checkpoint to checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=256, n_positions=WINDOW, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        "hf-output", max_steps=options.steps, per_device_train_batch_size=8, learning_rate=3e-3,
        gradient_accumulation_steps=2, lr_scheduler_type="cosine", logging_steps=10,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=windows(30_000),
        callbacks=[
            PCcheckCallback(options.every, "hf-trainer", autostart=True, storage="checkpoints")
        ],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=pccheck_resume(trainer))


if __name__ == "__main__":
    main()
