"""Small trainings with Hugging Face's Trainer, each with something that acts between two steps:
callbacks in both orders, streams, schedule-free optimizers, adapters. Every loss is printed bit for
bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from pccheck.integrations.huggingface import PCcheckCallback, pccheck_resume

WIDTH, ROWS = 6, 20
SEEDS = [1]  # of what differs from process to process


def row(index: int, epoch: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, WIDTH) * (index % 7 + 1) / 7 + epoch / 10}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return row(index)


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Without a length; another order in each pass, and other rows in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in torch.randperm(ROWS).tolist():
            yield row(index, self.epoch)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        out = self.last(self.drop(torch.tanh(self.first(x))))
        return {"loss": (out - x.sum(1, keepdim=True)).square().mean()}


class Swap(TrainerCallback):
    """Other weights from the end of an evaluation until an event puts the trained ones back. None
    of them is in this callback's own state after a restart."""

    def __init__(self, back: str) -> None:
        self._trained: torch.Tensor | None = None
        setattr(self, back, self._put_back)

    @torch.no_grad()
    def on_evaluate(self, *_: Any, model: Any = None, **_more: Any) -> None:
        if self._trained is None:
            self._trained = model.last.weight.detach().clone()
        model.last.weight.zero_()

    @torch.no_grad()
    def _put_back(self, *_: Any, model: Any = None, **_more: Any) -> None:
        if self._trained is not None:
            model.last.weight.copy_(self._trained)
            self._trained = None


class Decay(TrainerCallback):
    """Changes weights in one event, by a random amount, and not in the way that torch counts."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._change)

    def _change(self, *_: Any, model: Any = None, **_more: Any) -> None:
        model.first.weight.data.mul_(1 - torch.rand(()) / 10)


class StopEpochs(TrainerCallback):
    """Ends each epoch early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % 3 == 0


class Merging(nn.Linear):
    """Merges another weight into its own for evaluation, as loralib's layers do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.more = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged == mode:
            with torch.no_grad():
                self.weight += self.more * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = 0 if self.merged else self.more
        return nn.functional.linear(x, self.weight + more, self.bias)


class Packed(nn.Module):
    """A base that cannot be stored, with two adapters of PEFT's shape. One of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.eye(WIDTH).to_sparse())
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(WIDTH, 2), "reference": nn.Linear(WIDTH, 2)})
        self.lora_B = nn.ParameterDict({"mine": torch.zeros(2, WIDTH)})
        self.lora_A["reference"].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.sparse.mm(self.packed, x.T).T + self.lora_A["mine"](x) @ self.lora_B["mine"]
        return out - 0.1 * self.lora_A["reference"](x).mean()


class Adapted(Net):
    """The frozen adapter is drawn anew in each process: it is restored, too."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first = Packed()
        self.last.bias.requires_grad_(True)  # trained beside the adapters
        self.peft_config = {"mine": None, "reference": None}
        nn.init.normal_(
            self.first.lora_A["reference"].weight, generator=torch.Generator().manual_seed(SEEDS[0])
        )


class Projected(torch.optim.SGD):
    """Keeps objects in its state, as GaLore does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"projector": object()}


class MergingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = Merging()


class Watch(TrainerCallback):
    """Prints losses. Kills the process in step `kill_at` + 1, when what was saved is durable."""

    def __init__(self, kill_at: int, saver: PCcheckCallback | None) -> None:
        self._kill_at, self._saver = kill_at, saver

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for key in ("loss", "eval_loss"):
            if key in logs:
                print(f"{state.global_step} {key} {float(logs[key]).hex()}", flush=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._kill_at and state.global_step == self._kill_at:
            assert self._saver is not None and self._saver._client is not None
            self._saver._client.flush(60)
            os.kill(os.getpid(), signal.SIGKILL)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
AT_EPOCHS = {"eval_strategy": "epoch"}
STREAM = {"max_steps": 25, "num_train_epochs": 1}
FREE = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}

#: The callbacks, the arguments of Trainer, its data, and the model of each.
Shape = tuple[Callable[[], list[TrainerCallback]], dict[str, Any], type, Callable[[], nn.Module]]
SHAPES: dict[str, Shape] = {
    "put back as a step begins": (lambda: [Swap("on_step_begin")], EVALUATED, Rows, Net),
    "put back as an epoch begins": (lambda: [Swap("on_epoch_begin")], AT_EPOCHS, Rows, Net),
    "put back as training ends": (
        lambda: [Swap("on_train_end")], EVALUATED | {"eval_steps": 20}, Rows, Net,
    ),
    "changed as a step begins": (lambda: [Decay("on_step_begin")], {}, Rows, Net),
    "changed as an epoch begins": (lambda: [Decay("on_epoch_begin")], {}, Rows, Net),
    "changed before the update": (lambda: [Decay("on_pre_optimizer_step")], {}, Rows, Net),
    "changed as training begins": (lambda: [Decay("on_train_begin")], {}, Rows, Net),
    "accumulation, changed between": (
        lambda: [Decay("on_step_begin"), Decay("on_substep_end")],
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, Rows, Net,
    ),
    "epochs that end early": (lambda: [StopEpochs()], {"num_train_epochs": 6}, Rows, Net),
    "a stream": (list, STREAM, Stream, Net),
    "a stream with accumulation": (
        list, STREAM | {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
        Stream, Net,
    ),
    "a stream with a worker": (list, STREAM | {"dataloader_num_workers": 1}, Stream, Net),
    "schedule-free": (list, EVALUATED | FREE, Rows, Net),
    "schedule-free, evaluated at the start": (
        list, EVALUATED | FREE | {"eval_on_start": True}, Rows, Net,
    ),
    "adapters": (list, {}, Rows, Adapted),
    "layers that merge": (list, EVALUATED, Rows, MergingNet),
}  # fmt: skip


def run(
    output_dir: str, shape: str, socket: str = "", kill_at: int = 0, every: int = 1,
    saver_first: bool = True, odd_optimizer: bool = False, settings: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Without a socket it trains without PCcheck."""
    SEEDS[0] += bool(socket) and not kill_at
    others, chosen, data, make_model = SHAPES[shape]
    args = TrainingArguments(
        output_dir, use_cpu=True, report_to=[], disable_tqdm=True, seed=7, save_strategy="no",
        logging_steps=1,
        **({"num_train_epochs": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 4}
           | chosen | (settings or {})),
    )  # fmt: skip
    torch.manual_seed(3)
    saver = PCcheckCallback(every, "shapes", socket=socket) if socket else None
    callbacks = others()
    if saver is not None:
        callbacks.insert(0 if saver_first else len(callbacks), saver)
    callbacks.append(Watch(kill_at, saver))
    model = make_model()
    more: dict[str, Any] = {}
    if odd_optimizer:
        more["optimizers"] = (Projected(model.parameters(), 0.01), None)
    trainer = Trainer(
        model, args, train_dataset=data(), eval_dataset=Rows(), callbacks=callbacks, **more
    )
    path = pccheck_resume(trainer) if saver is not None else None
    print("RESUME", path and path.rpartition("-")[2], flush=True)
    trainer.train(resume_from_checkpoint=path)
    weights = sum(p.double().sum().item() for p in trainer.model.parameters())
    print(f"END {trainer.state.global_step} {weights.hex()}", flush=True)
