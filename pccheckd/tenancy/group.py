"""What a rank asks of its job: `Job` in group/job.py says what each answer means."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pccheck_wire.ends import Why
from pccheckd.core.port import Owner

from .checkpoint import End


class Requested(NamedTuple):
    """Which checkpoint of its job a rank requests: the fields of its name (`names.py`) as the
    client counts them, and what all ranks must request alike."""

    step: int
    base: int = 0  # the sequence that the process restored last in its start; 0: nothing
    turn: int = 0  # which of its restores that was
    descents: int = 0
    row: int = 0
    division: int = 0  # a digest of how the rank divides its replicated state
    skip_when_busy: bool = False
    at_ns: int = 0  # CLOCK_MONOTONIC


class Numbered(NamedTuple):
    """What a request got."""

    incarnation: int
    sequence: int  # 0: the request ends without one
    end: End | None = None  # why it ends at once; None: it is saved


class Group(Protocol):
    @property
    def newest_common(self) -> int: ...
    @property
    def is_shared(self) -> bool: ...

    def incarnation(self, rank: int, owner: Owner) -> int: ...
    def alone(self, rank: int, owner: Owner) -> tuple[int, int] | None: ...
    def took(self, rank: int, sequence: int) -> int: ...
    def start_id(self, rank: int, owner: Owner) -> bytes: ...
    def number(self, rank: int, requested: Requested) -> Numbered: ...
    def decide_soon(self) -> None: ...
    def passed(self, sequence: int) -> None: ...
    def gives_up(self, sequence: int) -> bool: ...
    def why_given_up(self, sequence: int) -> Why: ...
    async def request_slot(self, rank: int) -> list[int]: ...
    def needs(self, sequence: int) -> bool: ...
    def pins(self, rank: int, owner: Owner) -> set[int]: ...
