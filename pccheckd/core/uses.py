"""Who uses a rank: its trainer, and the processes that read from it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from enum import Enum

from pccheck_wire.errors import PccheckError, RefusedError
from pccheckd.base.logs import LOG
from pccheckd.base.moves import moved

from .port import Owner


class TrainerState(Enum):
    NONE = "none"
    ATTACHED = "attached"
    LEAVING = "leaving"  # it has ended, and what it handed over is being drained
    CLOSED = "closed"  # the rank is being unloaded: no trainer attaches any more


_T = TrainerState
TRAINER_MOVES: dict[TrainerState, frozenset[TrainerState]] = {
    _T.NONE: frozenset({_T.ATTACHED, _T.CLOSED}),
    _T.ATTACHED: frozenset({_T.LEAVING, _T.CLOSED}),
    _T.LEAVING: frozenset({_T.NONE, _T.CLOSED}),
    _T.CLOSED: frozenset(),
}


class Seat:
    """The place of a rank's trainer. Others call its methods and read its attributes."""

    def __init__(self, who: object) -> None:
        self._who = who  # the rank, for the log
        self.state = TrainerState.NONE
        self.owner: Owner | None = None  # while ATTACHED or LEAVING
        #: Why the last trainer got no room to save, until this trainer or a later one has got room,
        #: or has saved what it requested afterwards.
        self.refused: PccheckError | None = None
        self._refused_session = 0
        self._refused_ns = 0
        self.last_used_ns = time.monotonic_ns()  # when its last trainer ended, or it was loaded

    @property
    def is_leaving(self) -> bool:
        return self.state is TrainerState.LEAVING

    @property
    def is_closed(self) -> bool:
        return self.state is TrainerState.CLOSED

    def require_free(self, owner: Owner) -> None:
        """Raises RefusedError, for `owner`, while there is another trainer."""
        if self.owner is not None:
            raise RefusedError(
                f"{self._who} is already served for pid {self.owner.pid}; this is pid {owner.pid}",
                hint="if that process is left over from an earlier start, end it; if both are "
                "ranks of one training, pass rank= and world_size=, or make the client after "
                "init_process_group(); if they are two trainings, give this one its own name "
                "(PCCHECK_JOB, or job=)"
                if self.owner.pid != owner.pid
                else "this process has an earlier client: close() it",
            )

    def take(self, owner: Owner) -> None:
        self._move(TrainerState.ATTACHED)
        self.owner = owner

    def leave(self) -> None:
        """Its trainer has ended."""
        if not self.is_closed:
            self._move(TrainerState.LEAVING)

    def free(self) -> None:
        """What its trainer handed over is drained."""
        self.owner, self.last_used_ns = None, time.monotonic_ns()
        if not self.is_closed:
            self._move(TrainerState.NONE)

    def close(self) -> None:
        if not self.is_closed:
            self._move(TrainerState.CLOSED)

    def _move(self, to: TrainerState) -> None:
        self.state = moved(TRAINER_MOVES, self.state, to, self._who)

    def refuse_room(self, why: PccheckError, session: int) -> None:
        """Its trainer got no room to save: logged once for each trainer."""
        if self.refused is None or self._refused_session != session:
            LOG.warning(
                "%s: checkpoints are NOT saved: %s", self._who, why,
                extra={"fields": {"event": "refused"}},
            )  # fmt: skip
        self.refused, self._refused_session, self._refused_ns = why, session, time.monotonic_ns()

    def give_room(self) -> None:
        """Its trainer has got room to save."""
        if self.refused is not None:
            LOG.warning("%s: checkpoints are saved again", self._who)
        self.refused = None

    def saved(self, requested_ns: int) -> None:
        """A checkpoint is durable. A request from before the refusal says nothing of the room."""
        if requested_ns > self._refused_ns:
            self.give_room()


class Uses:
    """How many others use a rank. Meanwhile it stays loaded."""

    def __init__(self) -> None:
        self.coming = 0  # processes that attach
        self.readers = 0  # sessions that may read
        self.reads = 0  # loads and checks in progress: the volumes stay open
        #: Held while a stopped volume is opened again: no read begins then.
        self.reopening = asyncio.Lock()

    def __bool__(self) -> bool:
        return bool(self.coming or self.readers or self.reads)

    @contextlib.contextmanager
    def come(self) -> Iterator[None]:
        """A process attaches meanwhile."""
        self.coming += 1
        try:
            yield
        finally:
            self.coming -= 1

    def add_reader(self, number: int = 1) -> None:
        """A session that may read has come, or (-1) gone."""
        self.readers += number

    async def begin_read(self) -> None:
        """The volumes stay open until `end_read`. Waits while one is being opened again."""
        async with self.reopening:
            self.reads += 1

    def end_read(self) -> None:
        self.reads -= 1

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        """The volumes stay open meanwhile."""
        await self.begin_read()
        try:
            yield
        finally:
            self.end_read()
