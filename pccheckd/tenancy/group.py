"""What a rank asks of its job (jobs/job.py)."""

from __future__ import annotations

from typing import Protocol

from pccheck_wire.messages import Begin
from pccheckd.core.port import Owner

from .checkpoint import Checkpoint


class Group(Protocol):
    def incarnation(self, rank: int, owner: Owner) -> int:
        """Of the start that the rank's process belongs to now."""

    def number(self, rank: int, checkpoint: Checkpoint, body: Begin) -> tuple[int, int]:
        """Incarnation and sequence of a requested checkpoint. Raises RefusedError."""

    def require_alike(self, rank: int, sequence: int, division: int) -> None:
        """Raises RefusedError when another rank divides its replicated state in another way."""

    @property
    def newest_common(self) -> int:
        """The newest sequence that all ranks have; 0: there is none."""

    @property
    def is_shared(self) -> bool:
        """The ranks decide together: there are several, or checkpoints of a start that had."""

    def decide_soon(self) -> None:
        """What the ranks decide on has changed: they decide again."""

    def passed(self, sequence: int) -> None:
        """A previous daemon used a sequence."""

    def gives_up(self, sequence: int) -> bool:
        """Whether another rank will never have it."""

    def why_given_up(self, sequence: int) -> str:
        """Which rank will never have it, and why, in words."""

    async def request_slot(self, rank: int) -> str:
        """Frees a slot if it can. Names the ranks that are waited for although they requested
        nothing; "" otherwise."""

    def needs(self, sequence: int) -> bool:
        """Whether a durable checkpoint must not go with its volume."""

    def pins(self, rank: int, owner: Owner) -> set[int]:
        """Which checkpoints a new trainer must leave alone until it restores (P7)."""
