"""The states of one checkpoint and the moves between them. A move that is not listed raises."""

from __future__ import annotations

from dataclasses import dataclass, field

from pccheck_wire.messages import CheckpointState as State

#: From each state to those that may follow. Writing starts while the copy goes on (chunks are
#: pipelined), but WRITING as a state comes after COPIED: it says that only the disk is waited for.
MOVES: dict[State, frozenset[State]] = {
    State.REQUESTED: frozenset({State.COPYING, State.SKIPPED, State.FAILED}),
    State.COPYING: frozenset({State.COPIED, State.SUPERSEDED, State.SKIPPED, State.FAILED}),
    State.COPIED: frozenset({State.WRITING, State.SUPERSEDED, State.SKIPPED, State.FAILED}),
    State.WRITING: frozenset({State.DURABLE, State.SUPERSEDED, State.SKIPPED, State.FAILED}),
    State.DURABLE: frozenset({State.GLOBAL, State.SUPERSEDED}),
    State.GLOBAL: frozenset(),
    State.SUPERSEDED: frozenset(),
    State.SKIPPED: frozenset(),
    State.FAILED: frozenset(),
}

#: States in which a checkpoint occupies a lane or waits for one.
LIVE = frozenset({State.REQUESTED, State.COPYING, State.COPIED, State.WRITING})

#: `error` of a checkpoint that another rank of the job will never have.
GIVEN_UP = "GIVEN_UP"

_PATH = (State.REQUESTED, State.COPYING, State.COPIED, State.WRITING, State.DURABLE)


class UnlistedMoveError(RuntimeError):
    """A fault of ours: a state was followed by one that cannot follow it."""


@dataclass(slots=True)
class Checkpoint:
    """One snapshot of one session, from its request to its end. Owned by its tenant."""

    session: int
    snapshot: int
    step: int
    payload_bytes: int
    tree_offset: int
    tree_bytes: int
    skip_when_busy: bool
    incarnation: int
    world_size: int
    requested_ns: int  # CLOCK_MONOTONIC
    map: int = 0  # the exposure that its device part is pulled by; 0: there is none
    held_at_ns: int = 0  # when the gate last held the trainer, as the trainer says ...
    held_ns: int = 0  # ... and how long it did since the request before
    sequence: int = 0  # the same on every rank of a group, from the request on
    slot: int | None = None
    state: State = State.REQUESTED
    reason: str = ""
    hint: str = ""
    stage: str = ""  # of a failure: admission, copy, write, flush, publish ...
    error: str = ""  # ... and the core's name for it: "EIO", "NO_SLOT"
    newer_sequence: int = 0
    newer_step: int | None = None
    rehomed: int = 0
    first_write_ns: int = 0
    #: The native core's own times of the save, CLOCK_MONOTONIC; 0 = never reached.
    times_ns: dict[str, int] = field(default_factory=dict)
    #: When each state was reached, CLOCK_MONOTONIC.
    at_ns: dict[State, int] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def move(self, to: State, now_ns: int) -> None:
        """One listed move. Raises UnlistedMoveError."""
        if to not in MOVES[self.state]:
            raise UnlistedMoveError(
                f"checkpoint {self.snapshot} of session {self.session}: "
                f"{self.state.name} cannot become {to.name}"
            )
        self.state = to
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

    def end(self, to: State, now_ns: int, reason: str, hint: str = "") -> None:
        """The move into SKIPPED, FAILED or SUPERSEDED, with why."""
        self.move(to, now_ns)
        self.reason, self.hint = reason, hint
