"""What users read: warnings, once per kind of trouble and not at every checkpoint, and errors."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from pccheck_wire.basics import with_options
from pccheck_wire.errors import PccheckError

LOG = logging.getLogger("pccheck")
#: Where the user's own code is not: torch calls the hooks of an optimizer.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


class PccheckWarning(UserWarning):
    """Training continues, but something about its checkpoints needs attention."""


def warn(text: str) -> None:
    """Python shows a text once for each line of the user's code, unless it gets no registry: the
    second time that the daemon is gone would pass in silence."""
    frame = sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back  # to the user's own code
    warnings.warn_explicit(
        f"PCcheck: {text}", PccheckWarning, frame.f_code.co_filename, frame.f_lineno,
        module=frame.f_globals.get("__name__"),
    )  # fmt: skip


def in_words(error: Exception) -> str:
    """An exception of the user's code, whose own __str__ may raise anything, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class Warner:
    """Warns once per kind of trouble until that kind is over. The commands of pccheckctl in its
    warnings and errors have `options`, so that they ask the daemon of this client."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._warned: set[str] = set()

    def pasteable(self, text: str) -> str:
        """The text, whose commands have the options."""
        return with_options(text, self._options)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Around what users call: makes its errors pasteable."""
        try:
            yield
        except PccheckError as error:
            error.message, error.hint = self.pasteable(error.message), self.pasteable(error.hint)
            raise

    def once(self, kind: str, text: str) -> None:
        if kind in self._warned:
            LOG.debug("%s", text)
            return
        self._warned.add(kind)
        warn(self.pasteable(text))

    def over(self, *kinds: str) -> bool:
        """These troubles have ended; True when the user was warned of one."""
        warned = self._warned.intersection(kinds)
        self._warned -= warned
        return bool(warned)
