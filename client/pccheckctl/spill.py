"""Memory for a state that may be larger than the machine's: what would take more than half of it
lies in a file without a name, beside what is written. Imports torch."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from pccheck_wire.tree import Extent

from .memory import available
from .output_file import reserve

_ALIGN = 64  # what torch's own memory has at least


class Room:
    """Use it as a context manager."""

    def __init__(self, extents: Sequence[Extent], beside: Path) -> None:
        self._nbytes = sum(_room(extent.lead + extent.nbytes) for extent in extents)
        self._beside = beside
        self._area: mmap.mmap | None = None
        self._taken = 0

    def __enter__(self) -> Self:
        """Raises StorageFullError."""
        if self._nbytes > available()[0] // 2:
            with tempfile.TemporaryFile(dir=self._beside) as file:
                reserve(file.fileno(), self._nbytes, self._beside)
                self._area = mmap.mmap(file.fileno(), self._nbytes)
        return self

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """The next `nbytes`, not cleared."""
        if self._area is None or nbytes == 0:
            return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        at, self._taken = self._taken, self._taken + _room(nbytes)
        made = torch.frombuffer(self._area, dtype=torch.uint8, count=nbytes, offset=at)
        return made.untyped_storage()

    def __exit__(self, *_exception: object) -> None:
        self._area = None  # unmapped, and the file gone, with the last storage on it


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
