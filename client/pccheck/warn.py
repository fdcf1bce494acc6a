"""Warnings: once per kind of trouble, and not at every checkpoint."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import torch

from pccheck_wire.basics import with_options

LOG = logging.getLogger("pccheck")
#: Where the user's own code is not: torch calls the hooks of an optimizer.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


class PccheckWarning(UserWarning):
    """Training continues, but something about its checkpoints needs attention."""


def _depth() -> int:
    """How many frames up the user's own code is."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        depth, frame = depth + 1, frame.f_back
    return depth


def warn(text: str) -> None:
    warnings.warn(f"PCcheck: {text}", PccheckWarning, stacklevel=_depth())


class Warner:
    """Warns once per kind of trouble until that kind is over."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self.options: tuple[str, ...] = ()  #: of the commands of pccheckctl in warnings

    def once(self, kind: str, text: str) -> None:
        if kind in self._warned:
            LOG.debug("%s", text)
            return
        self._warned.add(kind)
        warn(with_options(text, self.options))

    def over(self, kind: str) -> bool:
        """The trouble has ended; True when the user was warned of it."""
        warned = kind in self._warned
        self._warned.discard(kind)
        return warned
