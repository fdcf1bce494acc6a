"""Counts of in-place changes: which tensors of a snapshot were changed since it was asked for.

torch counts the in-place changes of every tensor (`_version`), when the operation has ended."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from pccheck_native import integers

from .extents import View

_COUNT = inspect.getattr_static(Tensor, "_version")


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that was changed without a gate."""

    path: str
    loose: str  #: the attached thing that has it as a frozen parameter; "" when it is trained


class Tensors:
    """Those of a plan whose changes torch counts: not the inference tensors."""

    def __init__(self, views: Iterable[View]) -> None:
        both = [(view.tensor, view) for view in views if view.tensor is not None]
        read = [(tensor, view) for tensor, view in both if not tensor.is_inference()]
        self._tensors: list[Tensor] = [tensor for tensor, _ in read]
        self._views = [view for _, view in read]

    def counts(self) -> bytes:
        """How often each was changed in place."""
        return integers(_COUNT, self._tensors)

    def moved(self, then: bytes) -> Moved | None:
        """The first tensor whose count has changed."""
        now = self.counts()
        if now == then:
            return None
        both = zip(memoryview(now).cast("q"), memoryview(then).cast("q"), strict=True)
        at = next(i for i, (new, old) in enumerate(both) if new != old)
        return Moved(self._views[at].path, self._views[at].loose)


class Reading:
    """The tensors that one snapshot reads, and their counts when it was asked for: now."""

    def __init__(self, parts: Iterable[Tensors]) -> None:
        self._parts = [(tensors, tensors.counts()) for tensors in parts]

    def moved(self) -> Moved | None:
        """The first tensor that was changed since."""
        found = (tensors.moved(then) for tensors, then in self._parts)
        return next((moved for moved in found if moved is not None), None)
