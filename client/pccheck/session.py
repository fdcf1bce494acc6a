"""A client's tie to the daemon over reconnects: what it is told at every start, and P7."""

from __future__ import annotations

import os
from pathlib import Path

from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Hello,
    Register,
    Registered,
    Restored,
    Role,
)

from .naming import Identity
from .restore import say_restored
from .transport import RETRY_CONNECT_S, Connection, Transport
from .version import VERSION
from .warn import LOG, Warner

CONNECT_LIMIT_S = 10.0
GOODBYE_LIMIT_S = 30.0
_MIB = 1 << 20


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
        self._newest_step: int | None = None

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
        answer = connection.request(Register(rounded), timeout_s=self._stall_limit_s)
        assert isinstance(answer, Registered)
        self.registered, self._registered_bytes = answer, rounded
        LOG.info(
            "%d slots of %.1f MiB in %s, %.1f checkpoints in flight",
            answer.slots, rounded / _MIB, answer.volume, answer.effective_in_flight,
        )  # fmt: skip

    def announce(self, connection: Connection, payload_bytes: int) -> None:
        """Has the daemon make room already, so that the first checkpoint need not wait for it."""
        connection.post(Register(-(-payload_bytes // _MIB) * _MIB))

    def took_over(self, connection: Connection, sequence: int) -> None:
        """The newest checkpoint is restored (0: there is none): its slot may be used again."""
        say_restored(connection, sequence)
        self._restored = sequence

    def warn_if_unrestored(self) -> None:
        """P7: a job that has checkpoints goes on without having read them."""
        if self._restored is None and self._newest_step is not None:
            identity = self.identity
            self._warner.once(
                "unrestored",
                f"job {identity.job!r} (rank {identity.rank}) has a checkpoint of step "
                f"{self._newest_step} that was NOT restored; this run makes its own beside it. "
                "Call restore() before training, or say fresh=True if this is a new beginning. "
                "The old one is kept until you do.",
            )

    def say_goodbye(self, done: bool) -> None:
        """Raises PccheckError when the daemon does not answer; with `done` it trims the volume."""
        connection = self.current()
        if connection is not None:
            limit_s = GOODBYE_LIMIT_S if done else min(GOODBYE_LIMIT_S, self._stall_limit_s)
            connection.request(Goodbye(done), timeout_s=limit_s)

    def forget_in_child(self) -> None:
        self._transport.forget_in_child()

    def close(self) -> None:
        self._transport.drop()

    def _greet(self, connection: Connection) -> None:
        self._registered_bytes = 0
        self.registered = None
        if not self._met:
            self._met = True
            self._newest_step = connection.welcome.newest_step
            if self._newest_step is None and self._restored is None:
                self._restored = 0  # nothing was there: all that comes is ours
        elif self._restored is not None:
            connection.post(Restored(self._restored))
        if self._warner.over("daemon"):
            LOG.warning("connected to pccheckd again (pid %d)", connection.welcome.pid)

    def _hello(self) -> Hello:
        identity = self.identity
        return Hello(
            protocol=PROTOCOL_VERSION, role=Role.TRAINER, version=VERSION, pid=os.getpid(),
            job=identity.job, rank=identity.rank, world_size=identity.world_size,
            local_world_size=identity.local_world_size, launch=identity.launch,
            fresh=self._fresh, solo=self._solo,
        )  # fmt: skip
