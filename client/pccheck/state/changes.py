"""Which tensors of a snapshot were changed, freed or moved since it was asked for.

torch counts the in-place changes of every tensor (`_version`), when the operation has ended. It
does not count that a storage gets other memory, and the storage object, which the plan keeps, does
not keep the memory: so addresses and sizes are compared, too."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, UntypedStorage

from pccheck_native import integers

from .extents import View

_COUNT = inspect.getattr_static(Tensor, "_version")
_ADDRESS, _NBYTES = UntypedStorage.data_ptr, UntypedStorage.nbytes
CHANGED = "was changed"
FREED = (
    "was freed or moved to other memory "
    "(resize_(), share_memory_() and torch.multiprocessing do so)"
)
#: Nothing has changed, and no call of gate() would help.
LOST = "cannot be read: its memory was unmapped, or the file that it maps was cut short"


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that was changed without a gate, or is not where it was."""

    path: str
    loose: str  #: the attached thing that has it as a frozen parameter; "" when it is trained
    what: str = CHANGED


class Tensors:
    """Those of a plan. torch counts no changes of inference tensors."""

    def __init__(self, views: Iterable[View]) -> None:
        self._views = list(views)
        both = [(view, view.tensor) for view in self._views]
        self._counted = [view for view, one in both if one is not None and not one.is_inference()]
        self._tensors: list[Any] = [view.tensor for view in self._counted]
        held = {id(view.owner): view for view in self._views}.values()  # one for each storage
        self._arrays = [view for view in held if isinstance(view.owner, np.ndarray)]
        self._others = [view for view in held if not isinstance(view.owner, np.ndarray)]
        self._storages: list[Any] = [view.owner for view in self._others]
        self._places = self._now()

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
        return Moved(self._counted[at].path, self._counted[at].loose)

    def freed(self) -> Moved | None:
        """The first tensor whose storage has another address or size than in the plan."""
        now = self._now()
        if now == self._places:
            return None
        views = [*self._others, *self._others, *self._arrays]
        both = zip(now, self._places, views, strict=True)
        view = next(view for new, old, view in both if new != old)
        return Moved(view.path, view.loose, FREED)

    def _now(self) -> list[Any]:
        owners: Any = (view.owner for view in self._arrays)
        arrays = [(one.ctypes.data, one.nbytes) for one in owners]
        return [*map(_ADDRESS, self._storages), *map(_NBYTES, self._storages), *arrays]

    def at(self, address: int) -> Moved | None:
        """The tensor that had this byte."""
        paths = (v.path for v in self._views if 0 <= address - v.address < v.nbytes)
        path = next(paths, "")
        return Moved(path, "", LOST) if path else None


class Reading:
    """The tensors that one snapshot reads, and their counts when it was asked for: now."""

    def __init__(self, parts: Iterable[Tensors]) -> None:
        self._parts = [(tensors, tensors.counts()) for tensors in parts]

    def moved(self) -> Moved | None:
        """The first tensor that was freed, moved or changed since."""
        found = (tensors.freed() or tensors.moved(then) for tensors, then in self._parts)
        return next((moved for moved in found if moved is not None), None)

    def lost(self, address: int) -> Moved:
        """Why a byte could not be read."""
        freed = (tensors.freed() for tensors, _ in self._parts)
        there = (tensors.at(address) for tensors, _ in self._parts)
        found = next(filter(None, (*freed, *there)), None)
        return found or Moved("a tensor of the state", "", LOST)
