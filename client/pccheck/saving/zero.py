"""torch's ZeroRedundancyOptimizer: the optimizer of this rank's part, inside of it, is attached.

The groups of both have the same options, such as a learning rate. A scheduler changes the outer
ones, which `step()` copies inward; so the inner ones are saved, and restored, only after a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pccheck.state.attaching import zero_part

_Optimizer = torch.optim.Optimizer


class Options:
    """The outer optimizers; nothing for all others."""

    def __init__(self) -> None:
        self.outer: dict[str, _Optimizer] = {}  #: by name

    def attach(self, things: Mapping[str, object]) -> None:
        for name, thing in things.items():
            self.outer.pop(name, None)
            if isinstance(thing, _Optimizer) and zero_part(thing) is not None:
                self.outer[name] = thing

    def inward(self) -> None:
        """Updates the inner optimizers, before they are saved or restored."""
        for outer in self.outer.values():
            _copy(outer, zero_part(outer))

    def outward(self) -> None:
        """Updates the outer optimizers, after the inner ones were restored."""
        for outer in self.outer.values():
            _copy(zero_part(outer), outer)


def _copy(source: _Optimizer | None, target: _Optimizer | None) -> None:
    if source is None or target is None:
        return
    for one, other in zip(source.param_groups, target.param_groups, strict=False):
        other.update({key: value for key, value in one.items() if key != "params"})
