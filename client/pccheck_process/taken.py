"""What a snapshot of a process was. Imports nothing: every training script imports this module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessSnapshot:
    """A durable one. Times are in seconds: how long the target stood still, and from the request
    to the durable record."""

    job: str
    step: int
    sequence: int
    nbytes: int
    pause_s: float
    durable_s: float
    running: bool  #: the target goes on
    pid: int
    notes: tuple[str, ...]  #: what is different when it is restored
