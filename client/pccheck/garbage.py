"""Python's garbage collector and large states."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """For work that makes many objects and no cycles, until most of these are gone. The collector
    runs after every few hundred new objects, and again and again looks at all there are: with some
    10,000 tensors that takes longer than the work."""
    collects = gc.isenabled()
    try:
        gc.disable()  # in here: Ctrl-C may come as it returns
        yield
    finally:
        if collects:
            gc.enable()
