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
        self.repeat = 0  #: how many calls directly before named this very step
        self._back = 0
        self._base = 0
        self._begun = False  # has restored, or asked for a checkpoint
        self._last = -1
        self._incarnation = 0

    @property
    def branch(self) -> int:
        """How often this process went back in this start of the job: by restore(), or by a step
        that was lower than the one before."""
        return self._back - self._base

    @property
    def last(self) -> int:
        """The step of the last call since the last restore; -1 before there was one."""
        return self._last

    def of_start(self, incarnation: int) -> None:
        """The process belongs to this start now. In an earlier one it may have gone back more often
        than the other members, so that it counts from here."""
        if self._incarnation not in (0, incarnation):
            self._base = self._back
        self._incarnation = incarnation

    def restored(self) -> None:
        """The state is another one from here on: what is asked for next is not what was asked for
        before. The first restore of a process is its beginning, on all ranks alike."""
        self._back += self._begun
        self.repeat, self._last, self._begun = 0, -1, True

    def fresh(self) -> None:
        """A client began without a checkpoint. Where the process had begun already, it made its
        client again, and the other ranks, which did not, count on."""
        if not self._begun:
            self.restored()

    def called(self, step: int) -> None:
        """`checkpoint()` was called for this step."""
        self._begun = True
        self._back += step < self._last
        self.repeat = self.repeat + 1 if step == self._last else 0
        self._last = step


_OF_RANKS: dict[tuple[int, str, int], Steps] = {}


def steps_of(job: str, rank: int, world_size: int) -> Steps:
    """Those of a client. A rank of a group keeps them for the life of its process, as it keeps its
    place among the ranks: a second client in that process goes on counting."""
    if world_size == 1:
        return Steps()
    return _OF_RANKS.setdefault((os.getpid(), job, rank), Steps())
