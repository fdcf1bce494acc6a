"""Errors of reads: which checkpoint it was, and what is wrong with it."""

from __future__ import annotations

from pccheck_wire.errors import (
    DaemonUnreachableError,
    DamagedError,
    NoCheckpointError,
    PccheckError,
    UnreadableError,
)

_DAMAGED = " is damaged: "
_UNREADABLE = " could not be read: the disk reported an error"


class RecycledError(PccheckError):
    """Newer checkpoints became durable, and one of them has this one's slot."""

    code = "RECYCLED"
    default_retryable = True


class PartUnreachableError(DaemonUnreachableError):
    """No node that has a copy of a part can be read from."""


def recycled(step: int, sequence: int) -> RecycledError:
    return RecycledError(
        f"the checkpoint of step {step} (sequence {sequence}) was replaced by a newer one",
        hint="try again",
    )


def damaged(step: int, sequence: int, rank: int, problem: str) -> DamagedError:
    return DamagedError(
        f"the checkpoint of step {step} (sequence {sequence}, rank {rank}){_DAMAGED}{problem}",
        hint="recover takes the previous valid checkpoint; check the disk (dmesg)",
    )


def unreadable(step: int, sequence: int, rank: int) -> UnreadableError:
    return UnreadableError(
        f"the checkpoint of step {step} (sequence {sequence}, rank {rank}){_UNREADABLE}",
        hint="see the log of the kernel (dmesg), then try again",
    )


def problem_of(error: PccheckError) -> str:
    """What is wrong, for a line that names the checkpoint already."""
    if error.message.endswith(_UNREADABLE):
        return "the disk could not read the data"
    return error.message.rpartition(_DAMAGED)[2]


def lacking(rank: int, step: int) -> NoCheckpointError:
    return NoCheckpointError(
        f"rank {rank} stores a part of step {step}, and that part is not in this directory",
        hint="copy the volumes of all ranks into one storage directory; a rank that has "
        "only newer steps has replaced its part: choose one of those, see pccheckctl list",
    )
