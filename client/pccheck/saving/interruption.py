"""Calls that come in the middle of others: signal handlers, and state that is asked for, run in the
very thread that is at work, and locks do not keep a thread from itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pccheck.warn import Warner
from pccheck_wire.errors import CheckpointFailedError

from .hooks import StepHooks


class Alone:
    """Used under the client's lock: only one thread is in here."""

    def __init__(self, hooks: StepHooks, warner: Warner) -> None:
        self._hooks = hooks
        self._warner = warner
        self._busy = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One that no checkpoint may come in the middle of."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def require(self) -> None:
        """Raises CheckpointFailedError where what is attached is no state to save: half updated,
        half restored, or half described."""
        if self._busy or self._hooks.stepping:
            where = "another call of the client" if self._busy else "a step of an optimizer"
            error = CheckpointFailedError(
                f"checkpoint() was called in the middle of {where}",
                hint="have signal handlers set a flag, and look at it between two steps",
            )
            self._warner.once("middle", f"{error}; this one is skipped")
            raise error
