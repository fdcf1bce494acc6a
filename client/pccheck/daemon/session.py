"""A client's tie to the daemon over reconnects: what it is told at every start, and P7."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pccheck.job.naming import Identity
from pccheck.version import VERSION
from pccheck.warn import LOG, Warner
from pccheck_wire.errors import DaemonUnreachableError, PccheckError
from pccheck_wire.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Hello,
    Register,
    Registered,
    Restored,
    Role,
)

from .transport import RETRY_CONNECT_S, Connection, Transport

CONNECT_LIMIT_S = 10.0
GOODBYE_LIMIT_S = 30.0
RESTORED_LIMIT_S = 120.0
_MIB = 1 << 20
#: Of this process, by its id: a forked child is another one.
_PROCESSES: dict[int, bytes] = {}


def _process_of(identity: Identity, *, solo: bool) -> bytes:
    """What distinguishes a reconnect from a new start. A rank of a group is its process: a second
    client in that process belongs to the same start. A lone rank is a new start with every
    client: a notebook runs its cell again."""
    if identity.world_size == 1 or solo:
        return secrets.token_bytes(16)
    return _PROCESSES.setdefault(os.getpid(), secrets.token_bytes(16))


class Session:
    """Connects, connects again, registers. Used under the client's lock."""

    def __init__(
        self, identity: Identity, path: str | Path | None, *, fresh: bool, solo: bool,
        stall_limit_s: float, warner: Warner,
    ) -> None:  # fmt: skip
        self.identity = identity
        self.registered: Registered | None = None
        self._fresh = fresh
        self._solo = solo
        self._stall_limit_s = stall_limit_s
        self._warner = warner
        self._transport = Transport(path, self._hello)
        self._registered_bytes = 0
        self._restored: int | None = 0 if fresh else None  # sequence that counts as taken over
        self._met = False  # some daemon has been reached
        self._process = _process_of(identity, solo=solo)
        self.untold = 0  # failures that no daemon has counted
        self.incarnation = 0  # as the daemon that was reached last has said ...
        self._storage = ""  # ... of this directory
        self._protected_step: int | None = None  # of a run before, not restored

    @property
    def path(self) -> Path:
        return self._transport.path

    @property
    def error(self) -> PccheckError | None:
        return self._transport.error

    def current(self) -> Connection | None:
        return self._transport.current()

    def require(self, *, timeout_s: float = CONNECT_LIMIT_S) -> Connection:
        """The connection, made now if there is none. Raises what stands in the way."""
        connection = self._transport.current()
        if connection is None:
            connection = self._transport.connect(timeout_s=timeout_s)
            self._greet(connection)
        return connection

    def at_hand(self) -> Connection | None:
        """For a training loop without a connection: connects again, at most as often as the
        back-off allows; None on trouble, which `error` names."""
        self._transport.drop()
        if self._transport.may_try():
            try:
                return self.require(timeout_s=min(self._stall_limit_s, RETRY_CONNECT_S))
            except PccheckError:
                pass
        return None

    def complain(self) -> None:
        """Says once why there is no daemon."""
        error = self._transport.error
        hint = f" ({error.hint})" if error and error.hint else ""
        self._warner.once(
            "daemon",
            f"training goes on WITHOUT checkpoints: {error.message if error else 'none'}{hint}. "
            "A pccheckd that comes up later is used from then on.",
        )

    def register(self, connection: Connection, payload_bytes: int) -> None:
        """Makes sure that there is room for the payload. Raises PccheckError."""
        if payload_bytes <= self._registered_bytes:
            return
        rounded = -(-payload_bytes // _MIB) * _MIB
        told = self.untold
        try:
            answer = connection.request(Register(rounded, told), timeout_s=self._stall_limit_s)
        except DaemonUnreachableError:
            raise
        except PccheckError:  # it was heard all the same
            self.untold -= told
            raise
        self.untold -= told
        assert isinstance(answer, Registered)
        self.registered, self._registered_bytes = answer, rounded
        self.incarnation = answer.incarnation or self.incarnation
        self._warn_if_alone(answer)
        LOG.info(
            "%d slots of %.1f MiB in %s, %.1f checkpoints in flight",
            answer.slots, rounded / _MIB, answer.volume, answer.effective_in_flight,
        )  # fmt: skip

    def _warn_if_alone(self, answer: Registered) -> None:
        """A group's checkpoint is one only when every rank has it."""
        if answer.absent:
            identity = self.identity
            named = ", ".join(str(rank) for rank in answer.absent[:8])
            self._warner.once(
                "absent",
                f"rank {identity.rank} of job {identity.job!r} saves, but of its "
                f"{identity.world_size} ranks these are not connected: {named}. A checkpoint can "
                "be restored only if every rank saved it, so the checkpoints of this rank are of "
                "no use until those ranks connect. If only this rank is meant to save (rank 0 of "
                "plain DDP), make its client with PCcheckClient(solo=True); or make one on every "
                "rank with PCcheckClient(replicated=True), so that each saves a part.",
            )

    def saves_alone(self, world_size: int) -> bool:
        """Whether a checkpoint of a start with so many ranks is whole on this rank."""
        return world_size == 1 or self._solo

    def announce(self, connection: Connection, payload_bytes: int) -> None:
        """Has the daemon make room already, so that the first checkpoint need not wait for it."""
        connection.post(Register(-(-payload_bytes // _MIB) * _MIB))

    def took_over(self, connection: Connection, sequence: int) -> None:
        """The newest checkpoint is restored (0: there is none): its slot may be used again."""
        connection.request(Restored(sequence), timeout_s=RESTORED_LIMIT_S)
        self._restored = sequence
        self._registered_bytes = 0  # the next checkpoint learns the start of this process
        self._protected_step = None

    def warn_if_unrestored(self) -> None:
        """P7: a job that has checkpoints goes on without having read them."""
        if self._protected_step is not None:
            identity = self.identity
            self._warner.once(
                "unrestored",
                f"job {identity.job!r} (rank {identity.rank}) has a checkpoint of step "
                f"{self._protected_step} that was NOT restored; this run makes its own beside it. "
                "Call restore() before training, or adopt() if this run got its state in another "
                "way, or say fresh=True if this is a new beginning. "
                "The old one is kept until you do.",
            )

    def say_goodbye(self, done: bool) -> bool:
        """Whether there is a daemon that knows. Raises PccheckError when it does not answer; with
        `done` it trims the volume."""
        connection = self.current()
        if connection is not None:
            limit_s = GOODBYE_LIMIT_S if done else min(GOODBYE_LIMIT_S, self._stall_limit_s)
            connection.request(Goodbye(done), timeout_s=limit_s)
        return connection is not None

    def forget_in_child(self) -> None:
        self._transport.forget_in_child()

    def close(self) -> None:
        self._transport.drop()

    def _greet(self, connection: Connection) -> None:
        self._registered_bytes = 0
        self.registered = None
        welcome = connection.welcome
        if not self._met and welcome.newest_step is None and self._restored is None:
            self._restored = 0  # nothing was there: all that comes is ours
        self._met = True
        self.incarnation, self._storage = welcome.incarnation, welcome.storage
        self._protected_step = welcome.protected_step
        if self._warner.over("daemon"):
            LOG.warning("PCcheck: connected to pccheckd again (pid %d)", connection.welcome.pid)

    def _hello(self) -> Hello:
        identity = self.identity
        return Hello(
            protocol=PROTOCOL_VERSION, role=Role.TRAINER, version=VERSION, pid=os.getpid(),
            job=identity.job, rank=identity.rank, world_size=identity.world_size,
            local_world_size=identity.local_world_size, launch=identity.launch,
            fresh=self._fresh, solo=self._solo, process=self._process,
            incarnation=self.incarnation, storage=self._storage,
            restored=self._restored,
        )  # fmt: skip
