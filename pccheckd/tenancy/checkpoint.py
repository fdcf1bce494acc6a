"""One checkpoint: its states, the moves between them, and the one description of it (`Record`) that
status, metrics, trace and log render. A move that is not listed raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pccheck_native import _core
from pccheck_native.identity import CheckpointId
from pccheck_wire.ends import OF_THE_GROUP, Cause, Sentence, Why, sentence
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.moves import UnlistedMoveError, moved

#: From each state to those that may follow. Writing starts during the copy (chunks are pipelined),
#: but WRITING as a state comes after COPIED: only the disk is waited for.
MOVES: dict[State, frozenset[State]] = {
    State.REQUESTED: frozenset({State.COPYING, State.SKIPPED, State.FAILED}),
    State.COPYING: frozenset({State.COPIED, State.SUPERSEDED, State.SKIPPED, State.FAILED}),
    State.COPIED: frozenset({State.WRITING, State.SUPERSEDED, State.SKIPPED, State.FAILED}),
    State.WRITING: frozenset({State.DURABLE, State.SUPERSEDED, State.SKIPPED, State.FAILED}),
    State.DURABLE: frozenset({State.GLOBAL, State.SUPERSEDED}),
    **dict.fromkeys((State.GLOBAL, State.SUPERSEDED, State.SKIPPED, State.FAILED), frozenset()),
}

#: States in which a checkpoint occupies a lane or waits for one.
LIVE = frozenset({State.REQUESTED, State.COPYING, State.COPIED, State.WRITING})

_PATH = (State.REQUESTED, State.COPYING, State.COPIED, State.WRITING, State.DURABLE)
#: The parts of a checkpoint's time: from which moment of its `Record` until which.
_PARTS = {
    "waited": ("requested", "begin"),  # until it had a lane and a slot
    "copied": ("begin", "sealed"),  # until the snapshot was complete in the daemon's memory
    "written": ("first_write", "written"),  # overlaps the copy: chunks are pipelined
    "flushed": ("written", "flushed"),
    "published": ("flushed", "durable"),  # the commit record
    "durable": ("requested", "durable"),
}


class End(NamedTuple):
    """How a checkpoint ends that is not copied."""

    to: State
    why: Why


def failed(cause: Cause, argument: float = 0) -> End:
    return End(State.FAILED, Why(cause, argument))


BROKEN = failed(Cause.INTERNAL)


class Record(NamedTuple):
    """All that is known of one checkpoint at one moment. Times are CLOCK_MONOTONIC ns; 0 = not
    reached."""

    id: CheckpointId
    session: int
    snapshot: int
    slot: int | None
    payload_bytes: int
    copied_bytes: int  # into DRAM: host memory that has not changed is not copied
    written_bytes: int  # to the volume: what has not changed is not written again
    pulled: bool
    in_memory: bool  # its level is memory
    state: str
    reason: str
    hint: str
    stage: str  # of a failure: begin, copy, base, write, flush, publish, or "" ...
    error: str  # ... and the core's name for it: "EIO", "NO_SLOT"
    rehomed: int
    held_at: int  # when the gate last held the trainer before this request ...
    held: int  # ... and for how long since the previous request, as reported by the trainer
    requested: int
    ended: int
    begin: int
    first_write: int
    sealed: int
    written: int
    flushed: int
    durable: int

    def document(self) -> dict[str, Any]:
        """The fields of its id, then the others."""
        found = self._asdict()
        return {**found.pop("id").document(), **found}

    def seconds(self) -> dict[str, float]:
        """How long each part took; parts that were not reached are absent."""
        times = {name: (getattr(self, a), getattr(self, b)) for name, (a, b) in _PARTS.items()}
        return {name: max(b - a, 0) / 1e9 for name, (a, b) in times.items() if a and b}


_TIMES = ("begin", "first_write", "sealed", "written", "flushed", "durable")


@dataclass(slots=True)
class RankCheckpoint:
    """One snapshot of one session, from its request to its end. Owned by its tenant."""

    id: CheckpointId  # its sequence is the same on every rank of a group
    session: int
    snapshot: int
    payload_bytes: int
    skip_when_busy: bool
    requested_ns: int  # CLOCK_MONOTONIC
    on_device: bool = False  # its level is the GPU; it gets to memory when its trainer ends
    in_memory: bool = False  # its level is memory ...
    parks: bool = False  # ... and it has neither a lane nor a slot: nothing writes it
    wanted: bool = False  # on the disk, although its level is memory ...
    blocked: bool = False  # ... and there is no slot for it
    map: int = 0  # the exposure that its device part is pulled by; 0: there is none
    held_at_ns: int = 0
    held_ns: int = 0
    copied_bytes: int = 0
    written_bytes: int = 0
    slot: int | None = None
    state: State = State.REQUESTED
    #: Sequence and step of what replaced it in memory.
    newer: tuple[int, int] | None = None
    why: Why | None = None  # it ended so, or will never be on all ranks
    rehomed: int = 0
    first_write_ns: int = 0
    #: The native core's own times of the save, CLOCK_MONOTONIC; 0 = never reached.
    times_ns: dict[str, int] = field(default_factory=dict)
    #: When each state was reached, CLOCK_MONOTONIC.
    at_ns: dict[State, int] = field(default_factory=dict)

    @property
    def is_on_device(self) -> bool:
        """Only: nothing of its device part was copied."""
        return self.on_device and self.state is State.COPYING and not self.wanted

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def is_begun(self) -> bool:
        """It is being copied, or was."""
        return self.state is not State.REQUESTED

    @property
    def is_parked(self) -> bool:
        """It is copied, and nothing writes it."""
        return self.parks and self.state is State.COPIED

    @property
    def has_no_slot(self) -> bool:
        """It has not begun, or is in memory only."""
        return not self.is_begun or self.is_parked

    @property
    def ended_ns(self) -> int:
        """0 while it is live. The core's time counts, because the next checkpoint may begin before
        the event loop learns of the end."""
        if self.live:
            return 0
        return self.times_ns.get("ended") or max(self.at_ns.values(), default=0)

    @property
    def is_given_up(self) -> bool:
        """Whether another rank of the job will never have it."""
        return self.why is not None and self.why.cause in OF_THE_GROUP

    @property
    def sentence(self) -> Sentence:
        """Why it ended so, in words."""
        return sentence(self.why or Why())

    def record(self) -> Record:
        why = self.why or Why()
        reason, hint, _ = self.sentence
        error = "GIVEN_UP" if self.is_given_up else why.code
        return Record(
            self.id, self.session, self.snapshot,
            self.slot, self.payload_bytes, self.copied_bytes, self.written_bytes,
            bool(self.map), self.in_memory, self.state.name.lower(), reason, hint, why.stage,
            error, self.rehomed, self.held_at_ns, self.held_ns, self.requested_ns, self.ended_ns,
            *(self.times_ns.get(name, 0) for name in _TIMES),
        )  # fmt: skip

    def move(self, to: State, now_ns: int) -> None:
        """One listed move. Raises UnlistedMoveError."""
        who = f"checkpoint {self.snapshot} of session {self.session}"
        self.state = moved(MOVES, self.state, to, who)
        self.at_ns[to] = now_ns

    def advance(self, to: State, now_ns: int) -> bool:
        """Moves along the path to `to`, through what lies between; False when already there.

        Events of one checkpoint come from several threads: `durable` may overtake `copied`.
        """
        if self.state not in _PATH or to not in _PATH:
            raise UnlistedMoveError(f"{self.state.name} is not on the path to {to.name}")
        ahead = _PATH[_PATH.index(self.state) + 1 : _PATH.index(to) + 1]
        for state in ahead:
            self.move(state, now_ns)
        return bool(ahead)

    def end(self, to: State, now_ns: int, why: Why) -> None:
        """The move into SKIPPED, FAILED or SUPERSEDED, with why."""
        self.move(to, now_ns)
        self.why = why

    def note(self, event: _core.Event, now_ns: int) -> None:
        """What an event of the core says about its save, beside its state."""
        self.id = self.id._replace(sequence=event.sequence or self.id.sequence)
        self.rehomed = event.rehomed
        self.times_ns = event.times._asdict()
        if event.kind == "copied":
            self.payload_bytes = event.payload_bytes
        if event.kind in ("durable", "superseded", "given_up", "failed"):
            self.slot = event.slot
            self.copied_bytes, self.written_bytes = event.copied_bytes, event.written_bytes
        elif event.kind == "writing":
            self.first_write_ns = now_ns
