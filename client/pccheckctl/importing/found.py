"""What a file held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Where files keep the number of their step.
STEP_NAMES = ("step", "global_step")


@dataclass(slots=True)
class Found:
    """A state whose tensors lie in memory, or in a mapping of the file."""

    state: object
    step: int = 0  #: 0: the file does not say
    flat: bool = False  #: the tensors of one thing by name, not several things
    whole_of: str = ""  #: the job that it is the whole state of, in one flat dict
    notes: list[str] = field(default_factory=list)  #: what was left out or changed

    @classmethod
    def of_state(cls, state: object, noted: int) -> Found:
        """A state in the structure that was saved; `noted` is the step that its export noted."""
        import torch

        items = state if isinstance(state, Mapping) else {}
        steps = [items[name] for name in STEP_NAMES if name in items]
        known = [step for step in steps if type(step) is int and step >= 0]
        flat = any(isinstance(value, torch.Tensor) for value in items.values())
        return cls(state, step=noted or next(iter(known), 0), flat=flat)
