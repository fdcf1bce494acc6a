"""One tree of errors for client, daemon and command line: code, message, hint, retryable."""

from __future__ import annotations

from collections.abc import Iterable


class PccheckError(Exception):
    """Any error of PCcheck. `hint` is the fix; `retryable` means that a later try may succeed;
    `exit_code` is the exit code of `pccheckctl`."""

    code = "ERROR"
    exit_code = 1
    default_retryable = False

    def __init__(self, message: str, *, hint: str = "", retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retryable = self.default_retryable if retryable is None else retryable

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(PccheckError):
    """An argument, a flag or a value that is not valid."""

    code = "USAGE"
    exit_code = 2


class UnsupportedStateError(PccheckError):
    """A value in the state that cannot be represented; the message names its path in the tree."""

    code = "UNSUPPORTED_STATE"
    exit_code = UsageError.exit_code


class StateMismatchError(PccheckError):
    """The recovered state does not fit the attached one; the message names the path."""

    code = "STATE_MISMATCH"
    exit_code = UsageError.exit_code


class DaemonUnreachableError(PccheckError):
    code = "DAEMON_UNREACHABLE"
    exit_code = 12
    default_retryable = True


class RequestLostError(DaemonUnreachableError):
    """The daemon's process with the request has ended: whether it was carried out is unknown."""


class ProtocolError(PccheckError):
    """The peer uses another protocol version, or another protocol."""

    code = "PROTOCOL"


class RefusedError(PccheckError):
    """The daemon refuses: another owner, a live duplicate, a limit."""

    code = "REFUSED"


class NoStoreError(PccheckError):
    """The storage directory is missing, or cannot hold volumes."""

    code = "NO_STORE"
    exit_code = 10


class StoreLockedError(PccheckError):
    code = "STORE_LOCKED"
    exit_code = 11


class StorageFullError(PccheckError):
    code = "STORAGE_FULL"


class NoCheckpointError(PccheckError):
    """No checkpoint exists, or none is valid."""

    code = "NO_CHECKPOINT"
    exit_code = 13


class DamagedError(PccheckError):
    """Data on the disk does not match its checksums."""

    code = "DAMAGED"
    exit_code = 14


class UnreadableError(PccheckError):
    """The disk could not read a checkpoint, which may be undamaged: it is skipped, and tried again
    later."""

    code = "UNREADABLE"
    exit_code = DamagedError.exit_code
    default_retryable = True


class CheckpointFailedError(PccheckError):
    """A checkpoint ended failed, skipped or abandoned: it will never be durable, on all ranks if
    that was waited for."""

    code = "CHECKPOINT_FAILED"


class TornStateError(CheckpointFailedError):
    """The attached state is a mix of two steps: a restore did not finish."""

    code = "TORN_STATE"


class DeviceError(PccheckError):
    """A GPU, its driver or its memory failed, or does not allow what was asked for."""

    code = "DEVICE"


class WaitTimeoutError(PccheckError, TimeoutError):
    code = "TIMEOUT"
    default_retryable = True


class InternalError(PccheckError):
    """A defect of PCcheck; the daemon's log has the traceback."""

    code = "INTERNAL"


def _tree(root: type[PccheckError]) -> list[type[PccheckError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


ERRORS_BY_CODE: dict[str, type[PccheckError]] = {error.code: error for error in _tree(PccheckError)}


def error_from_wire(code: str, message: str, hint: str, retryable: bool) -> PccheckError:
    """The exception for a `Failure` message; an unknown code becomes a plain `PccheckError`."""
    return ERRORS_BY_CODE.get(code, PccheckError)(message, hint=hint, retryable=retryable)


# -- whose job it is, when several users have a job of that name ----------------------------------


def one_owner(job: str, owners: Iterable[int]) -> None:
    """Raises UsageError when there are several."""
    found = sorted(set(owners))
    if len(found) > 1:
        raise UsageError(
            f"job {job!r} exists for uids {', '.join(map(str, found))}", hint="choose with --uid"
        )


def owner_of(job: str, rank: int | None, owners: Iterable[int]) -> int:
    """The only owner of these volumes. Raises NoCheckpointError without an owner, UsageError with
    several."""
    found = set(owners)
    if not found:
        which = "" if rank is None else f" rank {rank}"
        raise NoCheckpointError(
            f"there is no volume of job {job!r}{which}", hint="see: pccheckctl list"
        )
    one_owner(job, found)
    return found.pop()
