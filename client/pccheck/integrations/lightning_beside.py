"""What a resumed run of Lightning needs, and Lightning's own checkpoints do not have: metrics that
schedulers and callbacks follow, the epoch in which loaders were made, what tuners have found."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr

from pccheck.warn import LOG, warn


def beside(trainer: Trainer) -> dict[str, Any]:
    """For the checkpoint."""
    metrics = trainer._logger_connector._callback_metrics
    return {
        "metrics": {name: value.detach().clone() for name, value in metrics.items()},
        "loaders_made": trainer.fit_loop._last_train_dl_reload_epoch,
        "validation_loaders_made": trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
        "tuned": {
            name: lightning_getattr(trainer.lightning_module, name) for name in _tuned(trainer)
        },
    }


def restore(trainer: Trainer, found: dict[str, Any]) -> None:
    """When training begins. `found`: what `beside()` has returned, or an empty dict. May warn."""
    trainer._logger_connector._callback_metrics.update(found.get("metrics", {}))
    warnings = [_loaders_again(trainer, found)]
    if found.get("exchanged"):
        warnings.append(
            "on_train_end put other weights into the model that was saved when training ended, and "
            "these epochs begin with them. To continue with the weights that were trained, load "
            'an earlier step: fit(ckpt_path="pccheck://JOB/STEP")'
        )
    for each in vars(trainer)["callbacks"]:
        if isinstance(each, StochasticWeightAveraging) and each._scheduler_state is not None:
            # It makes its scheduler when an epoch begins, and this epoch has begun.
            each.on_train_epoch_start(trainer, trainer.lightning_module)
    for text in filter(None, warnings if trainer.is_global_zero else []):
        warn(text)


def _loaders_again(trainer: Trainer, found: dict[str, Any]) -> str:
    """Keeps the epochs of the next reloads. Returns a warning, or an empty text."""
    loop = trainer.fit_loop
    made = found.get("loaders_made", trainer.current_epoch)
    every = getattr(trainer, "reload_dataloaders_every_n_epochs", 0)
    if not every or made == trainer.current_epoch:
        return ""
    loop._last_train_dl_reload_epoch = made
    loop.epoch_loop.val_loop._last_val_dl_reload_epoch = found["validation_loaders_made"]
    return (
        f"train_dataloader() was called in epoch {made}, and for this resumed run in epoch "
        f"{trainer.current_epoch}. If its data depend on the epoch, other data come until "
        "reload_dataloaders_every_n_epochs calls it again"
    )


def _tuned(trainer: Trainer) -> list[str]:
    """The attributes that tuners set."""
    names = []
    for each in vars(trainer)["callbacks"]:
        if isinstance(each, BatchSizeFinder):
            names.append(each._batch_arg_name)
        elif isinstance(each, LearningRateFinder) and each._update_attr:
            names.append(_determine_lr_attr_name(trainer.lightning_module, each._attr_name))
    return names


class Tuners:
    """A tuner begins fit() with trial steps, and sets all counters to 0 after them. A run that
    continues from a checkpoint has the values in it, and needs no trials."""

    def __init__(self) -> None:
        self._skipped: list[Callback] = []

    def skip(self, trainer: Trainer, found: dict[str, Any]) -> None:
        """Until `call_again()`; `found` as for `restore()`."""
        for each in vars(trainer)["callbacks"]:
            if isinstance(each, (BatchSizeFinder, LearningRateFinder)):
                what = "scale_batch_size" if isinstance(each, BatchSizeFinder) else "lr_find"
                vars(each)[what] = lambda *_: None
                self._skipped.append(each)
        values = found.get("tuned", {})
        for name, value in values.items():
            lightning_setattr(trainer.lightning_module, name, value)
        if self._skipped and trainer.is_global_zero:
            skipped = ", ".join(type(each).__name__ for each in self._skipped)
            LOG.warning("PCcheck: %s: skipped, the checkpoint has %s", skipped, values)

    def call_again(self) -> None:
        for each in self._skipped:
            vars(each).pop("scale_batch_size", None)
            vars(each).pop("lr_find", None)
        self._skipped.clear()
