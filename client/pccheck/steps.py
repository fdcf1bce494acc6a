"""Which checkpoint of a step a call asks for."""

from __future__ import annotations

import os


class Steps:
    """Counts the calls of `checkpoint()`, also those that reach no daemon.

    Ranks that call alike count alike, so that the daemon knows which of their checkpoints belong
    together even where a step is saved twice: at its end and at the end of an epoch, or again after
    a rollback.
    """

    def __init__(self) -> None:
        self.branch = 0  #: how often a step was lower than the one before
        self.repeat = 0  #: how many calls directly before named this very step
        self._last = -1

    def called(self, step: int) -> None:
        """`checkpoint()` was called for this step."""
        self.branch += step < self._last
        self.repeat = self.repeat + 1 if step == self._last else 0
        self._last = step


_OF_RANKS: dict[tuple[int, str, int], Steps] = {}


def steps_of(job: str, rank: int, world_size: int) -> Steps:
    """Those of a client. A rank of a group keeps them for the life of its process, as it keeps its
    place among the ranks: a client that is made anew in one of them counts on."""
    if world_size == 1:
        return Steps()
    return _OF_RANKS.setdefault((os.getpid(), job, rank), Steps())
