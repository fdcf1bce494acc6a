"""When PCcheckCallback saves in Lightning's loops: after all hooks, and between two batches.

Callbacks cannot do that: Lightning calls the LightningModule's hooks after those of the callbacks,
and has no hook before it fetches a batch. So three calls of Lightning's loops are followed.

| a save             | what of the user's has run        | what runs until the next update     |
|--------------------|-----------------------------------|-------------------------------------|
| `AT_BATCH`: before | all hooks of the batch before, of | fetching the batch, its transfer,   |
| a batch is fetched | callbacks in any order, of the    | `on_train_batch_start`, forward,    |
|                    | module, of loggers; a validation  | backward. A resumed run does all of |
|                    | that was due                      | that again                          |
| `AT_EPOCH`: when   | hooks of the epoch's end and the  | making the loader's iterator, then  |
| the next epoch     | next one's `on_train_epoch_start` | as above. A resumed run also calls  |
| begins             |                                   | `on_train_epoch_start` again        |
| `AT_END`: when     | `on_train_end` of all             | `on_fit_end`, which Lightning calls |
| training ends      |                                   | in a restarted finished run, too    |
| `AFTER_BATCH`:     | all hooks of the batch            | a validation that is due. A resumed |
| SIGTERM, or        |                                   | run begins with it                  |
| `should_stop` or   |                                   |                                     |
| `max_steps` in     |                                   |                                     |
| mid-epoch          |                                   |                                     |
| to a path:         | what the script or ModelCheckpoint| the rest of that hook, and all that |
| `save_checkpoint()`| has done when it calls            | follows                             |

A save also waits for a batch in which `global_step` has risen and after which no optimizer holds
gradients for a later step: gradients are not saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.weak import TensorWeakRef

from pccheck.warn import warn

if TYPE_CHECKING:
    from .lightning import PCcheckCallback

AT_BATCH, AFTER_BATCH, AT_EPOCH, AT_END = "batch", "after_batch", "epoch", "end"
#: A save that is due waits for so many batches at most until no gradient is held.
_PATIENCE = 256


class Moments:
    """Calls `callback.save(trainer, moment)` every `every_n_steps` steps, until `remove()`."""

    def __init__(self, trainer: Trainer, callback: PCcheckCallback) -> None:
        self._trainer, self._callback = trainer, callback
        self._last = trainer.global_step
        self._due = self._clean = False
        self._gradients = _Gradients(trainer)
        self.resumed = ""  #: the moment of the checkpoint with which this run begins
        self.exchanged = False  #: on_train_end has put other weights into the model
        #: Called once, when the first epoch of this run begins.
        self.begin_epoch: Callable[[], None] = lambda: None
        fit: Any = trainer.fit_loop
        batches: Any = fit.epoch_loop
        self._train_batch, self._train_epoch = batches.advance, fit.advance
        self._end_training = fit.on_run_end
        batches.advance = self._batch
        fit.advance, fit.on_run_end = self._epoch, self._on_run_end

    def remove(self) -> None:
        self._gradients.remove()
        fit: Any = self._trainer.fit_loop
        for loop, name in ((fit.epoch_loop, "advance"), (fit, "advance"), (fit, "on_run_end")):
            loop.__dict__.pop(name, None)

    def _applies(self) -> bool:
        """Whether it is the script's training that runs the loops, and not a tuner's."""
        return self._callback in vars(self._trainer)["callbacks"]

    def _epoch(self) -> None:
        """Before the loader's iterator is made, which fetches a batch if it has no length."""
        if self._applies():
            self._save_if_due(AT_EPOCH)
            begin, self.begin_epoch = self.begin_epoch, lambda: None
            begin()
        self._train_epoch()

    def _batch(self, fetcher: Any) -> None:
        if not self._applies():
            self._train_batch(fetcher)
            return
        self._save_if_due(AT_BATCH)
        resumed, self.resumed = self.resumed, ""
        if resumed:
            self._begin()
        if resumed == AFTER_BATCH:
            return
        before = self._trainer.global_step
        self._train_batch(fetcher)
        self._batch_has_ended(self._trainer.global_step > before)

    def _begin(self) -> None:
        """Lightning would look for a validation that was interrupted, count the batch before once
        more, and leave schedulers that follow a metric (ReduceLROnPlateau) out in this epoch."""
        fit = self._trainer.fit_loop
        fit.epoch_loop.restarting = False
        fit._restarting = False  # its setter also sets the loops below

    def _batch_has_ended(self, stepped: bool) -> None:
        trainer, every = self._trainer, self._callback.every_n_steps
        now = trainer.global_step
        self._due |= bool(every) and now // every > self._last // every
        self._clean = stepped and not self._gradients.held(self._due)
        # The last chance: when training ends, Lightning counts the epoch as complete.
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        stops |= 0 <= trainer.max_steps <= now
        if stops and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._due |= bool(every) and now > self._last
            self._save_if_due(AFTER_BATCH)
        elif trainer.received_sigterm:  # Lightning may raise in the validation that follows
            self._save_if_due(AFTER_BATCH)

    def _save_if_due(self, moment: str) -> None:
        if self._due and self._clean:
            self._save_now(moment)

    def _on_run_end(self) -> None:
        trainer, every = self._trainer, self._callback.every_n_steps
        saves = self._applies() and every and trainer.global_step > self._last
        before = _sums(trainer) if saves else []
        self._end_training()
        if saves:
            self.exchanged = _sums(trainer) != before
            self._save_now(AT_END)

    def _save_now(self, moment: str) -> None:
        self._last, self._due = self._trainer.global_step, False
        self._callback.save(self._trainer, moment)


def _sums(trainer: Trainer) -> list[str]:
    """To see whether the weights change; `_version` does not count changes by `.data`."""
    return [
        str(each.sum(dtype=torch.complex128 if each.is_complex() else torch.float64).item())
        for each in map(torch.Tensor.detach, trainer.lightning_module.parameters())
    ]


class _Gradients:
    """Whether optimizers hold gradients for a later step. With automatic optimization `global_step`
    rises when none is left, unless a module has a step of its own. With manual optimization a
    script may add up the gradients of several batches, for each optimizer of another number.

    An optimizer holds gradients when they have changed since its step. With several optimizers the
    backward pass for one also leaves gradients in others, which their next `zero_grad()` discards:
    what is there at the end of a batch in which an optimizer has stepped does not count.
    """

    def __init__(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        own = not module.automatic_optimization or is_overridden("optimizer_step", module)
        self._optimizers = trainer.optimizers if own else []
        self._used: list[dict[int, tuple[TensorWeakRef, int]]] = [{} for _ in self._optimizers]
        self._stepped: set[int] = set()  # in this batch
        self._waited, self._patience = 0, _PATIENCE
        self._hooks = [
            each.register_step_post_hook(partial(self._has_stepped, index))
            for index, each in enumerate(self._optimizers)
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _has_stepped(self, index: int, *_: Any) -> None:
        self._stepped.add(index)
        self._used[index] = {
            id(each): (TensorWeakRef(each.grad), each.grad._version)
            for each in _with_gradients(self._optimizers[index])
        }

    def held(self, due: bool) -> bool:
        """Called after each batch; `due`: whether a save waits for the answer."""
        if len(self._optimizers) > 1:
            for index in tuple(self._stepped):
                self._has_stepped(index)
        self._stepped.clear()
        if not due or not self._patience:
            return False
        holds = [index for index in range(len(self._optimizers)) if self._holds(index)]
        self._waited = self._waited + 1 if holds else 0
        if self._waited < self._patience:
            return bool(holds)
        self._patience = 0
        warn(
            f"checkpoints are saved while optimizer {holds[0]} holds gradients, and a resumed run "
            f"has none: {_PATIENCE} batches have ended so. Call zero_grad() after step(), and "
            "step() after the last backward() of a batch"
        )
        return False

    def _holds(self, index: int) -> bool:
        for each in _with_gradients(self._optimizers[index]):
            used, version = self._used[index].get(id(each), (None, 0))
            same = used is not None and used() is each.grad and each.grad._version == version
            if not same and bool(each.grad.is_sparse or each.grad.count_nonzero()):
                return True
        return False


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = optimizer.param_groups
    return [each for group in groups for each in group["params"] if each.grad is not None]
