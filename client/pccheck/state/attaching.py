"""What may be attached: dicts of plain values, and what has a state dict, without wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from pccheck.warn import LOG, in_words
from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError, UsageError

from .flatten import Flattener, require_storable, type_name
from .plan import RNG
from .watch import ModuleWatch, OptimizerWatch, gives_by_name, takes_by_name

_ADAPTERS = (
    "if this is a quantized base, attach the adapters alone (docs/python.md: LoRA and other frozen "
    "bases), and load the base from its original source"
)


class Stateful(Protocol):
    """Anything that returns and loads its state: a scheduler, a data loader, a scaler, a metric."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Values:
    """An attached dict of plain values and tensors; `restoring/values.py` puts them back."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[Any, Any]:
        return dict(self.values)


def checked(things: Mapping[str, object]) -> dict[str, Any]:
    """What to attach, by name. Raises UsageError for what has no state, UnsupportedStateError for a
    state that cannot be stored."""
    return {name: _checked(name, thing) for name, thing in things.items()}


def is_gathered(things: Mapping[str, object]) -> bool:
    """Whether state_dict() of a module gathers it from all ranks (FSDP1)."""
    return any(
        getattr(getattr(part, "_state_dict_type", None), "name", "") == "FULL_STATE_DICT"
        for one in things.values()
        if isinstance(one, torch.nn.Module)
        for part in one.modules()
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(part).__mro__)
    )


def _checked(name: str, thing: object) -> object:
    if name == RNG:
        raise UsageError(
            f"attach({RNG}=...) takes True or False only", hint="attach this under another name"
        )
    if isinstance(thing, torch.nn.Module):
        thing = _inner_module(thing)
        _require_load(name, thing)
        require_resumable(name, thing)
        return thing
    if isinstance(thing, torch.optim.Optimizer):
        return _inner_optimizer(name, thing)
    if name == "scheduler":  # perhaps inside of another one
        inner, base = getattr(thing, "scheduler", None), torch.optim.lr_scheduler.LRScheduler
        thing = inner if isinstance(inner, base) and not isinstance(thing, base) else thing
    if isinstance(thing, dict) and not hasattr(thing, "state_dict"):
        thing = Values(thing)
        _try(name, thing)
        _refuse_optimizer_state(name, thing.values)
        return thing
    if not all(callable(getattr(thing, one, None)) for one in ("state_dict", "load_state_dict")):
        raise UsageError(
            f"attach({name}=...): type {type_name(thing)} has no state_dict, load_state_dict",
            hint="use torchdata's StatefulDataLoader (pip install torchdata): it takes the same "
            "arguments and saves its place in the data"
            if isinstance(thing, torch.utils.data.DataLoader)
            else "attach a dict that has the value, or give the object these two methods",
        )
    _require_load(name, thing)
    _try(name, thing)
    return thing


def _refuse_optimizer_state(path: str, values: dict[Any, Any]) -> None:
    """Raises UsageError. The dict is made by each call of state_dict(): what it has is not what the
    optimizer has later, and what is put back into it reaches no optimizer."""
    if values.keys() == {"state", "param_groups"}:
        raise UsageError(
            f"attach({path}=...): this dict is what an optimizer's state_dict() returned, so "
            "restore() could not put its values back into the optimizer",
            hint="attach the optimizer itself: attach(optimizer=optimizer)",
        )
    for key, value in values.items():
        if isinstance(value, dict):
            _refuse_optimizer_state(f"{path}.{key}", value)


def _try(name: str, thing: Any) -> None:
    """Now, and not at the first checkpoint, perhaps hours later."""
    try:
        state = thing.state_dict()
    except Exception as error:
        raise UsageError(
            f"attach({name}=...): state_dict() of {type(thing).__name__} fails: {in_words(error)}",
            hint="attach an object whose state_dict() works from the start; for a data loader use "
            "torchdata's StatefulDataLoader (in Accelerate: use_stateful_dataloader=True)",
        ) from error
    Flattener().node(state, name)


def require_resumable(name: str, module: torch.nn.Module) -> None:
    """Now, too, and again when something is saved: a model may be quantized in between.

    Raises UnsupportedStateError for a tensor that cannot be stored, unless it gets its memory
    later; and when the module's own load_state_dict() would refuse what its state_dict() gives.
    Nothing is loaded for this, and what customises its state dict as a whole or loads in a way of
    its own is not judged: that may gather tensors from all ranks.
    """
    given: dict[str, Any] = {}
    if ModuleWatch.suits(module):
        given = module.state_dict(keep_vars=True)
    elif not _loads_in_parts(module):
        taken: dict[str, Any] = {}
        unknown: list[str] = []
        try:
            _compare(module, "", given, taken, unknown)
        except NotImplementedError as error:
            raise UnsupportedStateError(
                f"{name}: its state_dict() fails: {in_words(error)}", hint=_ADAPTERS
            ) from error
        except Exception as error:  # of the user's code; it may work when something is saved
            LOG.debug("attach(%s=...): what it saves is not known: %s", name, in_words(error))
            return
        for key in sorted(given.keys() | taken.keys()):
            if key.startswith(tuple(unknown)):
                continue
            if key not in taken:
                raise _not_taken(name, module, key, "this key beside its parameters and buffers")
            if key not in given:
                raise _not_taken(name, module, key, "nothing under this key")
            if isinstance(taken[key], torch.Tensor) and _differs(given[key], taken[key]):
                raise _not_taken(name, module, key, "a value of another shape under this key")
    for key, value in given.items():
        if not isinstance(value, torch.Tensor):
            Flattener().node(value, tree.join(name, key))
        elif not (value.is_meta or is_lazy(value)):
            require_storable(value, tree.join(name, key))


def _loads_in_parts(module: torch.nn.Module) -> bool:
    """Whether Lightning, which loads its modules itself, may leave out what does not fit."""
    change = getattr(type(module), "on_load_checkpoint", None)
    changes = change is not None and not change.__module__.startswith("lightning.")
    return changes or getattr(module, "strict_loading", True) is False


def _compare(
    module: torch.nn.Module,
    prefix: str,
    given: dict[str, Any],
    taken: dict[str, Any],
    unknown: list[str],
) -> None:
    """Adds what torch saves of the module and those below it, the tensors into which torch loads,
    and the prefixes below which both are not known."""
    if not (gives_by_name(module) and takes_by_name(module)):
        unknown.append(prefix)
        return
    module._save_to_state_dict(given, prefix, False)
    skipped = module._non_persistent_buffers_set
    buffers = {key: value for key, value in module._buffers.items() if key not in skipped}
    for key, value in (module._parameters | buffers).items():
        if value is not None:
            taken[prefix + key] = value
    if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
        taken[f"{prefix}_extra_state"] = None
    for key, child in module._modules.items():
        if child is not None:
            _compare(child, f"{prefix}{key}.", given, taken, unknown)


def require_storable_state(name: str, optimizer: torch.optim.Optimizer) -> None:
    """After a step, which has made the state. Raises UnsupportedStateError by path. A state dict of
    its own may gather from all ranks, and is called by the first checkpoint only."""
    if not OptimizerWatch.gives_its_state(optimizer):
        return
    entries, path = optimizer.state_dict()["state"], f"{name}.state"
    try:
        if not OptimizerWatch.suits(optimizer):
            Flattener().node(entries, path)
            return
        for number, entry in entries.items():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    require_storable(value, f"{path}.{number}.{key}")
    except UnsupportedStateError as error:
        raise UnsupportedStateError(
            f"{error.message}, so nothing that this {type(optimizer).__name__} trains can be saved",
            hint="use an optimizer whose state is made of tensors and numbers; or, in a framework, "
            "its own checkpoints instead of PCcheck (Hugging Face Trainer: "
            'save_strategy="steps")',
        ) from error


def _differs(given: object, own: torch.Tensor) -> bool:
    """Whether torch would refuse to copy the value into its own tensor."""
    if not isinstance(given, torch.Tensor):
        return True
    if is_lazy(own) or is_lazy(given):
        return False
    return given.shape != own.shape and not (own.dim() == 0 and given.shape == (1,))


def _not_taken(name: str, module: torch.nn.Module, key: str, what: str) -> UnsupportedStateError:
    names = [n for n, _ in module.named_modules() if not n or key.startswith(f"{n}.")]
    cls = type(module.get_submodule(max(names, key=len))).__name__
    return UnsupportedStateError(
        f"{tree.join(name, key)}: load_state_dict() refuses what state_dict() returns, because "
        f"{cls} saves {what}. No run could resume from its checkpoints",
        hint=f"{_ADAPTERS}; else correct {cls}._save_to_state_dict(), or let "
        f"{cls}._load_from_state_dict() take the same keys",
    )


def _require_load(name: str, thing: Any) -> None:
    """Raises UsageError for a load_state_dict() that cannot be called with a state alone."""
    try:
        inspect.signature(thing.load_state_dict).bind({})
    except ValueError:  # the signature is not known
        return
    except TypeError as error:
        raise UsageError(
            f"attach({name}=...): load_state_dict() of {type(thing).__name__} cannot be called "
            f"with the state alone ({error}), so restore() would fail",
            hint="attach an object whose load_state_dict(state) needs nothing else",
        ) from error


def _inner_module(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside torch.compile and plain data parallelism, which only change the names."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while True:
        if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
            inner = module._modules["_orig_mod"]
        elif isinstance(module, parallel):
            inner = module.module
        else:
            return module
        assert isinstance(inner, torch.nn.Module)
        module = inner


def _inner_optimizer(name: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper that is an Optimizer in name only (of Accelerate, of Fabric),
    and whose step cannot wait; and the one inside torch's ZeRO, whose own state_dict() gathers all
    ranks."""
    while "_optimizer_step_pre_hooks" not in vars(optimizer):  # Fabric's answers with the inner's
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            raise UsageError(
                f"attach({name}=...): {type(optimizer).__name__} did not call "
                "torch.optim.Optimizer.__init__, so its step cannot wait for a copy",
                hint="attach the optimizer that it wraps",
            )
        optimizer = inner
    return zero_part(optimizer) or optimizer


def zero_part(optimizer: object) -> torch.optim.Optimizer | None:
    """The optimizer inside torch's ZeroRedundancyOptimizer; None for other optimizers, and for the
    functional one that overlap_with_ddp=True makes later."""
    is_zero = any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)
    part = getattr(optimizer, "optim", None) if is_zero else None
    return part if isinstance(part, torch.optim.Optimizer) else None


class ZeroOptions:
    """torch's ZeroRedundancyOptimizer and the optimizer of this rank's part inside it, which is
    attached, have groups with the same options. A scheduler changes the outer ones, and `step()`
    copies these inward: so the inner ones are saved, and restored, only after a copy."""

    def __init__(self) -> None:
        self.outer: dict[str, torch.optim.Optimizer] = {}  #: by name

    def attach(self, things: Mapping[str, object]) -> None:
        for name, thing in things.items():
            self.outer.pop(name, None)
            if isinstance(thing, torch.optim.Optimizer) and zero_part(thing) is not None:
                self.outer[name] = thing

    def inward(self) -> None:
        """Updates the inner optimizers, before they are saved or restored."""
        for outer in self.outer.values():
            _copy_options(outer, zero_part(outer))

    def outward(self) -> None:
        """Updates the outer optimizers, after the inner ones were restored."""
        for outer in self.outer.values():
            _copy_options(zero_part(outer), outer)


def _copy_options(source: Any, target: Any) -> None:
    if source is None or target is None:
        return
    for one, other in zip(source.param_groups, target.param_groups, strict=False):
        other.update({key: value for key, value in one.items() if key != "params"})
