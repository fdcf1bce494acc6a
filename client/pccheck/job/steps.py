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
        self.base = 0  #: the sequence that was restored last in this start; 0: none
        self.descents = 0  #: how often the step has gone down since then
        self.row = 0  #: how many calls directly before had the same step
        self.last = -1  #: the step of the last call since a restore; -1 before there was one
        self._turn = 0
        self._began = 0  # the turn that brought the process to its start
        self._has_moved = False
        self._incarnation = 0

    @property
    def turn(self) -> int:
        """Which restore the next one is: it grows when the process has moved since the last. 0: the
        process has not moved in its start."""
        return self._in_start(self._turn + self._has_moved)

    def next_turn(self, incarnation: int) -> int:
        """As `turn`, of a process that is in this start now. What it restores first in its start is
        what the start began from, whatever the process did in older starts."""
        self._came_to(incarnation, self._turn + self._has_moved)
        return self.turn

    @property
    def base_turn(self) -> int:
        """Which restore `base` was."""
        return self._in_start(self._turn)

    def _in_start(self, turn: int) -> int:
        return 0 if turn == self._began else turn

    def of_start(self, incarnation: int) -> None:
        """The process saves in this start now, and counts from here, as its other members do."""
        self._came_to(incarnation, self._began)

    def _came_to(self, incarnation: int, began: int) -> None:
        if self._incarnation not in (0, incarnation):
            self.base = self.descents = 0
            self._began = began
        self._incarnation = incarnation

    def moved(self) -> None:
        """The state is no longer what was restored."""
        self._has_moved = True

    def restored(self, sequence: int, incarnation: int) -> None:
        """The attached state is that of `sequence`. This may bring the process to this start."""
        self._turn, self._has_moved = self._turn + self._has_moved, False
        self._came_to(incarnation, self._turn)
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
    """The counts of a client. All clients of a group's rank in one process share them."""
    if world_size == 1:
        return Steps()
    return _OF_RANKS.setdefault((os.getpid(), job, rank), Steps())
