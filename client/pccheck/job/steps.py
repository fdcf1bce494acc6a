"""Which checkpoint of a step a call of `checkpoint()` is."""

from __future__ import annotations

import os


class Steps:
    """Counts the calls of `checkpoint()`, including those that reach no daemon.

    Ranks that make the same calls count the same, so that the daemon knows which of their
    checkpoints belong together, even where a step is saved twice: at its end and at the end of an
    epoch, or again after a rollback.
    """

    def __init__(self) -> None:
        self.repeat = 0  #: how many calls directly before had the same step
        self._back = 0
        self._base = 0
        self._begun = False  # has restored, or asked for a checkpoint
        self.last = -1  #: the step of the last call since a restore; -1 before there was one
        self._incarnation = 0

    @property
    def branch(self) -> int:
        """How often this process went back in this start of the job: by restore(), or by a step
        lower than the one before."""
        return self._back - self._base

    def of_start(self, incarnation: int) -> None:
        """The process belongs to this start now, and counts from here: in an earlier start it may
        have gone back more often than the other members."""
        if self._incarnation not in (0, incarnation):
            self._base = self._back
        self._incarnation = incarnation

    def restored(self) -> None:
        """The state is another one from here on, and so is the next checkpoint. The first restore
        of a process is its beginning, the same on all ranks."""
        self._back += self._begun
        self.repeat, self.last, self._begun = 0, -1, True

    def fresh(self) -> None:
        """A client began without a checkpoint. In a process that had begun already it is a second
        client, and the counts continue as on the other ranks."""
        if not self._begun:
            self.restored()

    def called(self, step: int) -> None:
        """`checkpoint()` was called for this step."""
        self._begun = True
        self._back += step < self.last
        self.repeat = self.repeat + 1 if step == self.last else 0
        self.last = step


_OF_RANKS: dict[tuple[int, str, int], Steps] = {}


def steps_of(job: str, rank: int, world_size: int) -> Steps:
    """The counts of a client. A rank of a group keeps them for the life of its process: a second
    client in that process continues them."""
    if world_size == 1:
        return Steps()
    return _OF_RANKS.setdefault((os.getpid(), job, rank), Steps())
