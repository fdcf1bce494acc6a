"""Chooses what a restore reads: the newest valid checkpoint, and after damage the one before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from pccheck.daemon.connection import Connection
from pccheck.warn import LOG, warn
from pccheck_store.reading.errors import PartUnreachableError, RecycledError, problem_of
from pccheck_store.reading.loads import DaemonPayloads
from pccheck_store.reading.source import Payloads
from pccheck_store.reading.state_reader import StateReader
from pccheck_wire import tree
from pccheck_wire.errors import (
    DamagedError,
    NoCheckpointError,
    PccheckError,
    UnreadableError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Empty, Open, Opened, Skipped, Waiting, Writing
from pccheck_wire.units import MIB

OPEN_LIMIT_S = 120.0  #: the daemon opens the volumes of all ranks before it answers
#: A restore waits while earlier checkpoints are written, as long as more of them is written;
#: pccheckd reports every few seconds how much that is.
STUCK_LIMIT_S = 120.0
#: A restore waits so long for the other nodes of the job.
NODES_LIMIT_S = 300.0
#: How often the opened checkpoint may be replaced by newer ones before it was read.
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What `restore()` did. Falsy when the volume was read and holds nothing."""

    step: int = 0
    sequence: int = 0
    #: "dram" (the daemon's memory), "volume", "both", or "peer" (some of it from other nodes)
    source: str = ""
    #: Damaged ones, and those that the disk could not read: step and reason.
    skipped: list[Skipped] = field(default_factory=list)
    metadata: Any = None

    def __bool__(self) -> bool:
        return self.sequence > 0

    def __repr__(self) -> str:
        if not self:
            return f"<{type(self).__name__}: nothing to restore>"
        steps = ", ".join(str(item.step) if item.sequence else "unknown" for item in self.skipped)
        skipped = f" skipped=[{steps}]" if steps else ""
        return f"<{type(self).__name__} step={self.step} source={self.source}{skipped}>"


@dataclass(frozen=True, slots=True, repr=False)
class Found(RestoreResult):
    """What `recover()` found; `state` has the structure that was saved."""

    state: Any = None


class OpenedPayloads(Payloads, Protocol):
    """Those of a checkpoint that a daemon has opened."""

    @property
    def rank(self) -> int: ...  # whose state it is
    @property
    def ranks(self) -> list[int]: ...  # that have stored a part
    @property
    def origin(self) -> str: ...  # where the bytes came from, as RestoreResult.source
    @property
    def wall_ns(self) -> int: ...  # when they became durable; 0: not known


def _key(item: Skipped) -> tuple[int, str]:
    return item.sequence, "" if item.sequence else item.reason


def read_newest(
    connection: Connection,
    step: int | None,
    use: Callable[[Opened, StateReader, tree.Tree], Any],
    *,
    any_world_size: bool = False,
    words: tuple[str, list[str]] | None = None,
    job: str,
) -> tuple[Found, tuple[Opened, tree.Tree] | None]:
    """Opens checkpoints, newest first, until `use` succeeds without damage or a read error: what
    it returns is the state that was found. `words`: all ranks of the job restore now, with this
    start and without these nodes. `job`: the name of the job, for its other nodes.

    If newer checkpoints replace the one that is open, the newest is opened instead. Also returns
    what was opened; None when the volume holds nothing. Raises NoCheckpointError when checkpoints
    exist, but none is valid; RecycledError when newer ones keep replacing what is open.
    """
    skipped: dict[tuple[int, str], Skipped] = {}
    before: int | None = None
    attempts = _ATTEMPTS
    failed: DamagedError | UnreadableError | None = None
    together = (False, "", list[str]()) if words is None else (True, *words)
    while True:
        try:
            opened, refusal = _open(connection, Open(step, before, any_world_size, *together))
        except PccheckError as error:
            if failed is None:
                raise
            reasons = "; ".join(
                f"step {i.step}: {i.reason}" if i.sequence else i.reason for i in skipped.values()
            )
            raise type(failed)(f"{reasons}; {error.message}", hint=error.hint) from error
        skipped.update({_key(item): item for item in opened.skipped})
        if isinstance(opened, Empty):
            if step is not None or before is not None:
                raise NoCheckpointError(
                    f"there is no valid checkpoint of step {step}", hint="see: pccheckctl list"
                )
            return Found(skipped=list(skipped.values())), None
        try:
            read = _read(connection, opened, job, refusal, use)
        except RecycledError:
            attempts -= 1
            if not attempts:
                raise
            continue
        except (DamagedError, UnreadableError) as error:
            if opened.far:  # the daemon would name the same parts again
                raise
            damaged = Skipped(opened.sequence, opened.step, problem_of(error))
            skipped[_key(damaged)] = damaged
            before, failed = opened.sequence, error
            continue
        if (own := skipped.pop((opened.sequence, ""), None)) is not None:
            warn(
                f"the copy of step {opened.step} on this node was skipped ({own.reason}), and that "
                "of another node was read. Check the disk: pccheckctl verify"
            )
        return Found(
            opened.step, opened.sequence, read.origin,
            sorted(skipped.values(), key=lambda item: -item.sequence),
            tree.plain(read.described.metadata), read.used,
        ), (read.opened, read.described)  # fmt: skip


class _Read(NamedTuple):
    opened: Opened
    described: tree.Tree
    origin: str
    used: Any  # what `use` returned


def _read(
    connection: Connection, opened: Opened, job: str, refusal: NoCheckpointError | None,
    use: Callable[[Opened, StateReader, tree.Tree], Any],
) -> _Read:  # fmt: skip
    """Of replicated state another copy, when the node with the first one cannot be reached."""
    while True:
        payloads = _payloads(connection, opened, job)
        ranks = opened.copies[0] if opened.copies else payloads.ranks
        with StateReader(payloads, payloads.rank, ranks) as reader:
            try:
                described = reader.merged()
                opened = replace(opened, wall_ns=payloads.wall_ns or opened.wall_ns)
                if refusal is not None and not (described.sharded() or described.shared()):
                    raise refusal
                used = use(opened, reader, described)
            except PartUnreachableError as error:
                copies = opened.copies[1:]
                if not copies:
                    raise
                warn(f"{error.message}: another copy is read")
                opened = replace(opened, rank=min(copies[0]), copies=copies)
                continue
        if opened.far:
            LOG.info("PCcheck: step %d: %s", opened.step, payloads)
        return _Read(opened, described, payloads.origin, used)


def _payloads(connection: Connection, opened: Opened, job: str) -> OpenedPayloads:
    near = DaemonPayloads(connection, opened)
    if not opened.far:
        return near
    from pccheck_store.reading import peers  # imports ssl

    return peers.GatheredPayloads(near, peers.PeerPayloads(job, opened, warn))


def _open(connection: Connection, wanted: Open) -> tuple[Opened | Empty, NoCheckpointError | None]:
    """Also returns why the daemon refused another number of ranks. The refusal counts for state
    that each rank stores for itself; sharded and replicated state can be read by any number."""
    try:
        return ask_open(connection, wanted), None
    except NoCheckpointError as refusal:
        if wanted.any_world_size:
            raise
        with contextlib.suppress(PccheckError):
            opened = ask_open(connection, replace(wanted, any_world_size=True))
            if isinstance(opened, Opened):  # a refusal never becomes "nothing is there"
                return opened, refusal
        raise


def ask_open(connection: Connection, wanted: Open) -> Opened | Empty:
    """The answer, once what was copied is written. Raises WaitTimeoutError when writing stops."""
    before: Writing | None = None
    progress_s = time.monotonic()
    while True:
        answer = connection.request(wanted, timeout_s=OPEN_LIMIT_S)
        if isinstance(answer, (Opened, Empty)):
            for words in answer.warnings:
                warn(words)
            return answer
        if isinstance(answer, Waiting):
            if time.monotonic() - progress_s >= NODES_LIMIT_S:
                raise WaitTimeoutError(
                    f"{answer.reason} (waited for {NODES_LIMIT_S:g} s)",
                    hint="every rank calls restore(); see pccheckctl status on each node",
                )
            LOG.warning("PCcheck: restore() waits: %s", answer.reason)
            continue
        assert isinstance(answer, Writing)
        written, total = answer.total_bytes - answer.left_bytes, answer.total_bytes
        how_far = (
            f"pccheckd is still writing step {answer.step}: {written / MIB:.0f} of "
            f"{total / MIB:.0f} MiB of {answer.checkpoints} checkpoints"
        )
        if answer != before:
            before, progress_s = answer, time.monotonic()
        elif time.monotonic() - progress_s >= STUCK_LIMIT_S:
            raise WaitTimeoutError(
                f"{how_far}, and nothing was written for {STUCK_LIMIT_S:g} s",
                hint="check the disk (pccheckctl status, dmesg), then restore again; do not "
                "restart pccheckd, which has the copied checkpoints in memory",
            )
        LOG.warning("PCcheck: restore() waits: %s", how_far)
