"""Which sequence each request of a job's ranks gets. On the loop only; nothing here waits.

A process of an older start is *fenced*: its requests get no sequence. Ranks are *apart* when one
requests a checkpoint that another rank will never request (`names.py` says why)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pccheck_native import names
from pccheck_native._core import SaveRequest
from pccheck_native.names import Name, Numbers

from .starts import Start, Starts

DIVISIONS_KEPT = 256  # no honest rank requests an older one


class Given(NamedTuple):
    """What a request got."""

    sequence: int
    is_first: bool = True  # no other rank has requested it before
    is_passed: bool = False  # this rank has requested it, or a later one, before
    apart: str = ""  # why another rank will never request it
    name: tuple[int, int, int] = (0, 0, 0)  # base, descents, row


class Numbering:
    """Owned by the job's membership."""

    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self._numbers = Numbers()
        self._newest: dict[int, Name] = {}  # by rank: of the checkpoint that it requested last
        #: By sequence: the rank that requested it first, and how that rank divides its state.
        self._divisions: dict[int, tuple[int, int]] = {}
        #: By rank: the newest sequence that its trainer has requested, or that was there when the
        #: trainer came; and the incarnation of the start in which the trainer did so.
        self._asked: dict[int, tuple[int, int]] = {}

    @property
    def last(self) -> int:
        """The newest sequence that any rank has, or that a previous daemon used."""
        return self._numbers.last

    def passed(self, sequence: int) -> None:
        """A volume holds this sequence, or a previous daemon used it."""
        self._numbers.passed(sequence)

    def name_of(self, sequence: int) -> Name | None:
        """Of a sequence that was given out here, if it is remembered."""
        return self._numbers.name_of(sequence)

    def newest(self, rank: int) -> Name | None:
        """What the rank requested last, if its daemon has not restarted since."""
        return self._newest.get(rank)

    def asked(self, rank: int) -> int:
        """The newest sequence that a rank's trainer has requested, or that was there before it."""
        return self._asked.get(rank, (0, 0))[0]

    def joined(self, rank: int) -> None:
        """A process of the rank joins a start: it has requested nothing there."""
        self._asked[rank] = self.asked(rank), 0

    def catch_up(self, processes: Mapping[int, bytes]) -> None:
        """A process that joins the newest start may still save what the others have saved since
        that start began. `processes`: by rank, those that are connected."""
        current = self._starts.current
        if current is None:
            return
        above = current.begins_above(self.last)
        for rank, process in processes.items():
            is_member = self._starts.of(rank, process) is current
            if is_member and self._asked.get(rank, (0, 0))[1] != current.incarnation:
                self._asked[rank] = max(self.asked(rank), above), current.incarnation

    def number(
        self, start: Start, rank: int, process: bytes, asked: SaveRequest, used: int
    ) -> Given:
        """The sequence of a request, equal on all ranks that request the same name. `used`: the
        newest sequence in the volumes of the rank."""
        above = max(self.asked(rank), used)
        who = rank, process
        if start.kind.is_wide:
            member = start.members[rank]
            base, member.moved = member.round, True
        else:
            base = start.bases.of(who, asked.base, asked.turn)
        name = Name(start.incarnation, base, asked.descents, asked.step, asked.row)
        as_stored = base, asked.descents, asked.row
        if (sequence := self._numbers.find(name)) is not None:
            self._newest[rank] = max(name, self._newest.get(rank, name))
            given = Given(sequence, is_first=False, name=as_stored)
            if sequence <= self.asked(rank):
                return given._replace(is_passed=True)
            return self._take(rank, given)
        apart = ""
        if later := names.in_later_line(name, self._newest.items()):
            apart = names.why_apart(name, *later)
            start.bases.missed(who, later[1].base)
        self._newest[rank] = name
        sequence = self._numbers.give(name, above)
        return self._take(rank, Given(sequence, apart=apart, name=as_stored))

    def took(self, rank: int, sequence: int, used: int) -> int:
        """A rank that saves alone has taken a sequence; 0: it gets one."""
        sequence = sequence or max(self.last, self.asked(rank), used) + 1
        self._numbers.passed(sequence)
        return self._take(rank, Given(sequence)).sequence

    def _take(self, rank: int, given: Given) -> Given:
        self._asked[rank] = given.sequence, self._asked.get(rank, (0, 0))[1]
        return given

    def divided_otherwise(self, rank: int, sequence: int, division: int) -> int | None:
        """The first rank that requested a sequence, if that rank divides its replicated state in
        another way: then the ranks together do not store the whole state, though each stores its
        part. None when the two divide alike."""
        first, its = self._divisions.setdefault(sequence, (rank, division))
        trim(self._divisions, DIVISIONS_KEPT)
        return None if its == division else first

    def why_lacking(self, rank: int, sequence: int) -> str:
        """Why a rank that has a process did not request a checkpoint of another rank."""
        name, its = self._numbers.name_of(sequence), self._newest.get(rank)
        if name is not None and its is not None and its.start == name.start:
            return names.why_apart(name, rank, its)
        return f"rank {rank} did not ask for this checkpoint"


def trim(by_sequence: dict[int, Any], kept: int) -> None:
    """Forgets the oldest entries."""
    while len(by_sequence) > kept:
        del by_sequence[next(iter(by_sequence))]
