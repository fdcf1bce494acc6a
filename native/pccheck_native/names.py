"""Which checkpoints of a job's ranks are the same one: names, and the numbers of names. Pure: no
I/O, no clock.

**A name** is (start, base, descents, step, row). Each rank makes it by itself, and ranks that make
the same calls make the same names. Equal steps would not do: a step may be saved twice, and by two
runs.

No field counts what one process may do more often than another one: a recover(), a second
restore() before the next checkpoint, or a retry after an outage changes no name. So ranks that
restore the same checkpoint have names in common again, whatever each of them did before.

**The names of a start are ordered** by their fields from left to right, and a rank asks for them in
this order. A late rank finds the numbers of the names that others have asked for.

**Limits.** Ranks that make unequal calls *and* go back without a restore may give one name to two
states: a rank that leaves out step 6, goes back as the others do, and saves step 6 then. And a rank
that restores alone in mid-run, and saves once before all ranks restore the same checkpoint, may
have its checkpoint taken for one of theirs; so may ranks that are not in lockstep, and go back to
one checkpoint twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any, NamedTuple

NEW = -1  # the turn of a process that came from an older start
NOTHING = -1  # the sequence of a process that asked in this start before it restored
KEPT = 256  # the newest names, bases and processes; a rank that is further behind skips


class Name(NamedTuple):
    """Which checkpoint of its job a request is for."""

    start: int  # the incarnation
    base: int  # the restore in this start from which the state comes (`Bases`)
    descents: int  # how often the step has gone down since then, without a restore
    step: int
    row: int  # how often this step was repeated directly

    @property
    def line(self) -> tuple[int, int, int]:
        """Only ranks in one line have names in common: the other fields follow from the calls."""
        return self[:3]


class Bases:
    """The restores of one start. A base is a restore that the ranks make together, and its number:
    0 is what the start began from.

    Ranks restore one after the other, and no rank waits for the others. A process that has moved
    (trained, or requested a checkpoint) and restores takes part in the newest base above its own
    that restored the same checkpoint. If there is none, the process opens a base.
    A process numbers its restores: the number, its `turn`, grows only if the process has moved
    since the last one. So a second restore() in a row changes nothing. What a process restores
    before it moves (turn 0), or to come to this start, is base 0, if the first of the ranks
    restored the same checkpoint.

    A process that requests in its base after another process requested in a later base did not
    restore together with that process, and never takes part in the later base (`missed`).
    """

    def __init__(self) -> None:
        self._began_from = 0  # the sequence of base 0; 0: no process has restored one
        self._last = 0
        self._opened: dict[int, int] = {}  # the newest base that restored a sequence
        self._places: dict[Hashable, _Place] = {}

    def came(self, process: Hashable) -> None:
        """A process of an older start. What it restores next is what this start began from."""
        self._places[process] = _Place(turn=NEW)

    def restored(self, process: Hashable, sequence: int, turn: int) -> None:
        """A process has restored `sequence` in place. Turn 0: it had not moved in this start."""
        place = self._place(process)
        if turn == 0 or place.turn == NEW:
            self._began_from = self._began_from or sequence
            base = 0 if sequence == self._began_from else self._join(sequence, 0)
            self._places[process] = _Place(base, sequence, turn)
        elif turn != place.turn or sequence != place.sequence:
            base = self._join(sequence, max(place.base, place.missed))
            self._places[process] = _Place(base, sequence, turn)

    def missed(self, process: Hashable, base: int) -> None:
        """A process asks for something new in its base, and another one has asked in the later
        `base`."""
        place = self._place(process)
        self._places[process] = place._replace(missed=max(place.missed, base))

    def of(self, process: Hashable, restored: int, turn: int = 0) -> int:
        """The base of what a process asks for now. `restored` and `turn`: what the process says
        that it restored last in this start (0: nothing); for restores that an earlier daemon has
        seen."""
        place = self._place(process)
        if place.turn == NEW:
            self._places[process] = _Place(sequence=NOTHING)
        elif restored and not place.sequence:
            self.restored(process, restored, turn)
        return self._places[process].base

    def _join(self, sequence: int, above: int) -> int:
        base = self._opened.get(sequence, 0)
        if base <= above:
            base = self._last = self._last + 1
            self._opened.pop(sequence, None)  # the new entry comes last
            self._opened[sequence] = base
            _trim(self._opened)
        return base

    def _place(self, process: Hashable) -> _Place:
        place = self._places[process] = self._places.pop(process, _Place())
        _trim(self._places)
        return place


class _Place(NamedTuple):
    """A process among the bases of its start."""

    base: int = 0
    sequence: int = 0  # that was restored; 0: not known here; or NOTHING
    turn: int = 0  # the newest; or NEW
    missed: int = 0  # the newest base that others have, and this process took no part in


class Numbers:
    """Gives out a job's sequences: one for each name."""

    def __init__(self) -> None:
        self.last = 0
        self._given: dict[Name, int] = {}
        self._names: dict[int, Name] = {}

    def passed(self, sequence: int) -> None:
        """A volume holds it, or has given it out before."""
        self.last = max(self.last, sequence)

    def find(self, name: Name) -> int | None:
        """The sequence that another rank got for this name; None: no rank did, or long ago."""
        return self._given.get(name)

    def name_of(self, sequence: int) -> Name | None:
        """The name that has this sequence, if it is remembered."""
        return self._names.get(sequence)

    def give(self, name: Name, above: int) -> int:
        """The next sequence, for a rank that has had sequences up to `above`."""
        self.last = max(self.last, above) + 1
        self._given[name] = self.last
        self._names[self.last] = name
        for gone in _trim(self._names):
            del self._given[gone]
        return self.last


def _trim(found: dict[Any, Any]) -> list[Any]:
    """Forgets the oldest entries above KEPT: a hostile client may make any number."""
    oldest = list(islice(found, max(0, len(found) - KEPT)))
    return [found.pop(key) for key in oldest]


def in_later_line(name: Name, newest: Iterable[tuple[int, Name]]) -> tuple[int, Name] | None:
    """Of `newest` (ranks with their newest names) the one in the last line of the same start, if
    that line is later: this rank will never ask for `name`."""
    later = (one for one in newest if one[1].line > name.line and one[1].start == name.start)
    return max(later, key=lambda one: one[1].line, default=None)


def why_apart(mine: Name, other: int, its: Name) -> str:
    """Why the rank `other`, whose newest name is `its`, will never have the checkpoint `mine`."""
    if its.line[:2] != mine.line[:2]:
        return f"rank {other} does not continue from the same restore() as the rank that saved"
    if its.descents != mine.descents:
        return (
            f"rank {other} has gone back to an earlier step without restore() another number of "
            "times"
        )
    return f"rank {other} did not ask for this checkpoint"


#: What ends a difference that `why_apart` names.
APART_HINT = "call restore() on every rank before going back, or restart all ranks"
