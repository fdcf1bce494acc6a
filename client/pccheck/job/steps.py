"""Which checkpoint of a step a call of `checkpoint()` is."""

from __future__ import annotations

import os


class Steps:
    """What of a checkpoint's name (`pccheck_native/names.py`) a client knows.

    Ranks that make the same calls of `checkpoint()` get the same values, also where a step is saved
    twice: at its end and at the end of an epoch, or again after a rollback. A call that reaches no
    daemon counts, too. A restore counts by what it restored, and not by how often it was called.
    """

    def __init__(self) -> None:
        #: The sequence that was restored last; 0: none since this process has moved in its start.
        self.base = 0
        self.descents = 0  #: how often the step has gone down since then
        self.row = 0  #: how many calls directly before had the same step
        self.last = -1  #: the step of the last call since a restore; -1 before there was one
        self._turn = 0
        self._has_moved = False
        self._incarnation = 0

    @property
    def turn(self) -> int:
        """Which restore the next one is: it grows when the process has moved since the last."""
        return self._turn + self._has_moved

    def of_start(self, incarnation: int) -> None:
        """The process belongs to this start now, and counts from here, as its other members do."""
        if self._incarnation not in (0, incarnation):
            self.base = self.descents = self._turn = 0
        self._incarnation = incarnation

    def moved(self) -> None:
        """The state is no longer what was restored."""
        self._has_moved = True

    def restored(self, sequence: int) -> None:
        """The attached state is that of `sequence` now, and the daemon knows. What a process
        restores before it moves is what the start began from, the same on all ranks."""
        self._turn, self._has_moved = self.turn, False
        if self._turn:
            self.base = sequence
        self.descents, self.row, self.last = 0, 0, -1

    def called(self, step: int) -> None:
        """`checkpoint()` was called for this step."""
        self.moved()
        self.descents += step < self.last
        self.row = self.row + 1 if step == self.last else 0
        self.last = step


_OF_RANKS: dict[tuple[int, str, int], Steps] = {}


def steps_of(job: str, rank: int, world_size: int) -> Steps:
    """The counts of a client. A rank of a group keeps them for the life of its process: a second
    client in that process continues them."""
    if world_size == 1:
        return Steps()
    return _OF_RANKS.setdefault((os.getpid(), job, rank), Steps())
