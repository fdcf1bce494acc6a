"""What the ranks of this node ask for by restore(), and what the rounds of their start answered."""

from __future__ import annotations

import asyncio
import contextlib
import time

from pccheck_native.group import Held
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.offers import StartRecord, Word
from pccheck_wire.errors import DamagedError, RefusedError
from pccheck_wire.messages import Open
from pccheckd.group.job import Job
from pccheckd.group.starts import Start

from .names import Names


class Restoring:
    """Owned by the wide job. Of the start that it follows."""

    def __init__(self, job: Job, names: Names) -> None:
        self._job, self._names = job, names
        self.is_fresh = False  #: the clients are
        self.is_ready = False  #: what this node knows of the start is in memory
        self.answers: dict[int, FullName | None] = {}  #: by round
        self.wanted = asyncio.Event()  #: a rank restores or saves ...
        self.wanted_s = 0.0  #: ... since when (time.monotonic) ...
        self._wanted_in: Start | None = None  # ... and in which start
        self._words: dict[int, dict[int, Word]] = {}  # by round and rank
        self._answered = asyncio.Event()

    def begin(self, start: Start) -> None:
        """The processes of a start have come."""
        self.answers, self._words, self.is_ready = {}, {}, False
        if self._wanted_in is not start:
            self.wanted.clear()

    def know(self, record: StartRecord) -> None:
        """The answers that are on the disk."""
        self.answers = dict(record.restored)

    def want(self) -> None:
        """A rank restores or saves."""
        start = self._job.members.starts.current
        if not self.wanted.is_set() or self._wanted_in is not start:
            self._wanted_in, self.wanted_s = start, time.monotonic()
            self.wanted.set()

    def wake(self) -> None:
        """Restores that wait look again."""
        self._answered.set()
        self._answered = asyncio.Event()

    async def awake(self, deadline_s: float) -> None:
        """Until then, or until `deadline_s` (time.monotonic)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await self._answered.wait()

    def round_of(self, start: Start, rank: int, asked: Open) -> int:
        """The round in which a process restores now; -1: none. Raises RefusedError."""
        member = start.members[rank]
        has_begun = 0 in self.answers
        word = Word(asked.step, asked.start, tuple(asked.without), self.is_fresh and not has_begun)
        if has_begun:
            if not asked.together:
                return -1 if member.moved else member.round
            before = self._words.get(member.round, {}).get(rank, word)
            if member.moved or word != before:
                member.round, member.moved = member.round + 1, False
        said = self._words.setdefault(member.round, {})
        if any(other != word for who, other in said.items() if who != rank):
            raise RefusedError(
                "the ranks of this node gave restore() different arguments",
                hint="give restore() the same arguments on all ranks",
            )
        said[rank] = word
        return member.round

    def word(self, round_: int) -> Word:
        """The words of restore() in a round. Without a restore, round 0 is as fresh as the clients
        are. A later round is not: the start has checkpoints of its own to go back to."""
        said = self._words.get(round_, {}).values()
        return next(iter(said), Word(fresh=self.is_fresh and round_ == 0))

    def found(self, full: FullName | None) -> Held | None:
        """What a rank here restores by an answer. Raises DamagedError."""
        found = None if full is None else self.held(full)
        if full is not None and found is None:
            raise DamagedError(
                f"job {self._job.name!r}: step {full.name.step}, which all nodes restore, is "
                "damaged or cannot be read on this node",
                hint="restart all ranks; they will restore the step before",
            )
        return found

    def held(self, full: FullName) -> Held | None:
        """What this node has of a checkpoint; None: not all of its ranks have it."""
        sequence = self._names.sequence(full)
        for found in self._job.members.common():
            if found.sequence == sequence:
                return found
        return None
