"""What a file held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

#: Where files keep the number of their step.
STEP_NAMES = ("step", "global_step", "iter_num")


@dataclass(slots=True)
class Imported:
    """A state whose tensors lie in memory, or in a mapping of the file."""

    state: object
    step: int | None = None  #: None: the file does not say
    flat: bool = False  #: the tensors of one thing by name, not several things
    whole_of: str = ""  #: the job that it is the whole state of, in one flat dict
    notes: list[str] = field(default_factory=list)  #: what was left out or changed

    @classmethod
    def of_state(cls, state: object, noted: int | None) -> Imported:
        """A state in the structure that was saved; `noted` is the step that its export noted."""
        items = state if isinstance(state, Mapping) else {}
        tensors = any(isinstance(value, torch.Tensor) for value in items.values())
        flat = tensors and not any(is_part(key, value) for key, value in items.items())
        steps = [items[name] for name in STEP_NAMES if name in items]
        numbers = steps if flat else map(number, steps)  # not a buffer of a module
        known = (step for step in numbers if type(step) is int and step >= 0)
        return cls(state, step=next(known, None) if noted is None else noted, flat=flat)


def is_part(key: object, value: object) -> bool:
    """What a script attaches. A state dict of a module has, beside its tensors, only the extra
    state of submodules, which may be anything."""
    extra = str(key).rpartition(".")[2] == "_extra_state"
    return isinstance(value, (dict, list, tuple)) and not extra


def number(value: object) -> object:
    """Scripts keep a loss or a step in a tensor of one element, too."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
