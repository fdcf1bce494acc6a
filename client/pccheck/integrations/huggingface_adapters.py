"""Adapters (PEFT) on a base that no checkpoint brings back: only what trains is attached."""

from __future__ import annotations

from typing import Any

import torch

from pccheck.client import PCcheckClient
from pccheck.warn import LOG
from pccheck_wire.errors import UnsupportedStateError, UsageError

_Norm = torch.nn.modules.batchnorm._NormBase


class Adapters:
    """The model of a Trainer as it is attached: whole, or only its adapters when attach() refuses
    the whole and the model has adapters of PEFT."""

    def __init__(self, client: PCcheckClient, model: Any, optimizer: Any) -> None:
        """Raises as PCcheckClient.attach does."""
        self._client, self._model, self._optimizer = client, model, optimizer
        self._chosen: dict[str, torch.Tensor] | None = None  # None: the whole
        try:
            client.attach(model=model)
        except (UnsupportedStateError, UsageError) as error:
            if not getattr(model, "peft_config", None):
                raise
            self._attach(_chosen(model, optimizer))
            log = LOG.warning if client.place[1] == 0 else LOG.info  # of one rank
            log(
                "PCcheck: checkpoints hold the adapters of this model (%s) and what else is "
                "trained, without the base, which the script loads at each start: %s",
                ", ".join(model.peft_config), error.message,
            )  # fmt: skip

    def refresh(self) -> None:
        """Before a checkpoint: an adapter may have been added, or a tensor replaced."""
        if self._chosen is None:
            return
        chosen = _chosen(self._model, self._optimizer)
        same = chosen.keys() == self._chosen.keys()
        if not same or any(chosen[name] is not one for name, one in self._chosen.items()):
            self._attach(chosen)

    def _attach(self, chosen: dict[str, torch.Tensor]) -> None:
        self._client.attach(model=_part(chosen))
        self._chosen = chosen


def _chosen(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """By its name in `model`: what the optimizer trains, what belongs to an adapter (PEFT has the
    adapter's name in each name, also for modules_to_save), also to one that is frozen, and
    statistics of a BatchNorm."""
    adapters: set[str] = set(model.peft_config)  # type: ignore[arg-type]
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        of_adapter = not adapters.isdisjoint(prefix.split("."))
        start = f"{prefix}." if prefix else ""
        for key, p in module._parameters.items():
            if p is not None and (of_adapter or key in adapters or id(p) in trained):
                found[start + key] = p
        for key, buffer in module._buffers.items():
            mine = of_adapter or key in adapters or isinstance(module, _Norm)
            if mine and buffer is not None and key not in module._non_persistent_buffers_set:
                found[start + key] = buffer
    return found


def _part(chosen: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module that has these tensors under the same names."""
    part = torch.nn.Module()
    for name, tensor in chosen.items():
        *path, key = name.split(".")
        place = part
        for step in path:
            place = place._modules.setdefault(step, torch.nn.Module())  # type: ignore[assignment]
        if isinstance(tensor, torch.nn.Parameter):
            place._parameters[key] = tensor
        else:
            place._buffers[key] = tensor
    return part
