"""A client's session over reconnects: when to connect, what each new daemon learns, and P7."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq

from pccheck.job.naming import Identity
from pccheck.nodes.voice import Voice
from pccheck.version import VERSION
from pccheck.warn import LOG, Warner
from pccheck_wire import attach
from pccheck_wire.basics import PROTOCOL_VERSION, START_HINT, some
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    PccheckError,
    ProtocolError,
    RefusedError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Goodbye, Hello, Joined, Register, Registered, Restored, Role
from pccheck_wire.units import MIB

from .connection import Connection, require_files

CONNECT_LIMIT_S = 10.0
#: For each attempt to connect again, which costs training time.
RETRY_CONNECT_S = 2.0
BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 5.0
#: After a daemon that runs and refuses, or accepts no connection.
BACKOFF_SLOW_S = 30.0
SNAPSHOT_LOOK_S = 0.02
GOODBYE_LIMIT_S = 30.0
GOODBYE_LEAST_S = 1.0
RESTORED_LIMIT_S = 120.0
#: A kind for the warner.
DISCONNECTED = "daemon"
#: Of this process, by its id and birth: a forked child is another one, and so is a restored one.
_PROCESSES: dict[tuple[int, int], bytes] = {}


class Session:
    """Connects, connects again, registers. Used under the client's lock."""

    def __init__(
        self, identity: Identity, where: Callable[[], str], *, fresh: bool,
        solo: bool, stall_limit_s: float, warner: Warner, replicated: bool = False,
    ) -> None:  # fmt: skip
        """`where`: the socket of the daemon, asked for each connection."""
        self.identity = identity
        self._where = where
        self.error: PccheckError | None = None  #: why there is no connection
        self.uncounted = 0  #: failures that no daemon has counted
        self.incarnation = 0  #: of the start that this process is a member of ...
        self._start = b""  # ... the id of that start, and the storage directory of its daemon
        self._storage = ""
        self._fresh, self._solo, self._stall_limit_s = fresh, solo, stall_limit_s
        self._replicated = replicated
        self._warner = warner
        self._connection: Connection | None = None
        self._voice = Voice() if identity.is_wide and not solo else None
        self._attempt: attach.Attempt | None = None  # not answered in time: the answer may come
        self._delay_s = BACKOFF_FIRST_S
        self._next_try_s = 0.0  # time.monotonic()
        self._disconnected = {DISCONNECTED}  # kinds for the warner
        self._registered_bytes, self._levels = 0, 0
        self.room_bytes = 0  #: of the daemon's memory, for this rank, in the end
        self._noted = ""
        self._restored: int | None = 0 if fresh else None  # sequence that counts as restored
        self._has_connected = False
        # Tells a reconnect from a new start. A rank of a group is its process: further clients are
        # of the same start. A lone rank starts with every client: a notebook runs its cell again.
        self._born = born()
        self._process = self._new_process()
        self._protected_step: int | None = None  # of an earlier run, not restored
        self._made_way = False  # for a snapshot: it connects again when that is over
        self._saved: int | None = None  # the newest sequence that was durable then
        self._in_part: dict[int, set[str]] = {}  # by step, the names of restore(only=...)

    def current(self) -> Connection | None:
        """The connection, if it lives."""
        connection = self._connection
        return connection if connection is not None and connection.alive() else None

    def require(self, *, timeout_s: float = CONNECT_LIMIT_S) -> Connection:
        """The connection, made now if there is none. Raises PccheckError, which is `error` then."""
        return self.current() or self._connect(timeout_s)

    def reconnect(self) -> Connection | None:
        """For a training loop without a connection: tries again, at most as often as the back-off
        allows; None on failure, and `error` has the reason."""
        self._end()
        if self._made_way:
            return self._connect_after_snapshot()
        attempt = self._attempt
        if attempt.answered if attempt is not None else time.monotonic() >= self._next_try_s:
            try:
                return self.require(timeout_s=min(self._stall_limit_s, RETRY_CONNECT_S))
            except PccheckError:
                pass
        return None

    def make_way(self, saved: int | None) -> None:
        """A snapshot of this process is about to be taken, and a connection cannot be in it.
        `saved`: the newest sequence that is known to be durable."""
        self._saved = saved
        self._end()
        self._made_way = True

    def _connect_after_snapshot(self) -> Connection | None:
        """The daemon refuses until the snapshot is taken, or was given up."""
        self._made_way = False
        # Tries are counted: an image that is restored after a boot has another clock.
        for _ in range(int(self._stall_limit_s / SNAPSHOT_LOOK_S)):
            try:
                return self.require(timeout_s=RETRY_CONNECT_S)
            except RefusedError as error:
                if not error.retryable:
                    return None
            except PccheckError:
                return None
            time.sleep(SNAPSHOT_LOOK_S)
        return None

    def _connect(self, timeout_s: float) -> Connection:
        self._end()
        try:
            require_files()
            self._connection = Connection(
                self._attach(timeout_s), saves_alone=self.saves_alone(self.identity.world_size)
            )
        except (PccheckError, OSError, zmq.ZMQError) as error:
            self.error = _as_ours(error)
            slow = not isinstance(self.error, DaemonUnreachableError)
            self._next_try_s = time.monotonic() + (BACKOFF_SLOW_S if slow else self._delay_s)
            self._delay_s = min(2 * self._delay_s, BACKOFF_LAST_S)
            if self.error is error:
                raise
            raise self.error from error
        self.error = None
        self._delay_s, self._next_try_s = BACKOFF_FIRST_S, 0.0
        self._greet(self._connection)
        return self._connection

    def _attach(self, timeout_s: float) -> attach.Attachment:
        """Continues an attempt that was not answered in time: volumes on a slow disk open late."""
        attempt = self._attempt or attach.Attempt(self._hello(), self._where(), timeout_s=timeout_s)
        self._attempt = None
        try:
            return attempt.finish(timeout_s=timeout_s)
        except WaitTimeoutError:
            self._attempt = attempt
            raise

    def warn_disconnected(self, *, private: bool) -> None:
        """Warns why there is no connection, once for each kind of error: a daemon of another
        version may start where none was. `private`: the client starts the daemon itself."""
        why = str(self.error or "no daemon")
        then = "The client connects when a pccheckd runs there. Before that, restore() raises"
        if self.error is not None and not isinstance(self.error, DaemonUnreachableError):
            then = "Later calls of checkpoint() try to connect again; until then restore() raises"
        elif self.error is not None and private:
            why, then = self.error.message, "The client starts its private daemon again"
        kind = DISCONNECTED if self.error is None else f"{DISCONNECTED}: {self.error.code}"
        self._disconnected.add(kind)
        self._warner.once(kind, f"training continues WITHOUT checkpoints: {why}. {then}.")

    def register(self, connection: Connection, payload_bytes: int, levels: int = 1) -> None:
        """Makes sure that the daemon has capacity for the payload, at each of the levels, which are
        bits. Raises PccheckError."""
        if payload_bytes <= self._registered_bytes and levels == self._levels:
            return
        rounded = -(-payload_bytes // MIB) * MIB
        uncounted = self.uncounted
        try:
            wanted = Register(rounded, uncounted, levels)
            answer = connection.request(wanted, timeout_s=self._stall_limit_s)
        except DaemonUnreachableError:
            raise
        except PccheckError:
            if connection.alive():  # the daemon has counted them
                self.uncounted -= uncounted
            raise
        self.uncounted -= uncounted
        assert isinstance(answer, Registered)
        self._registered_bytes, self._levels = rounded, levels
        self.room_bytes = answer.expected_bytes
        self._belongs_to(answer)
        self._warn_if_ranks_are_absent(answer)
        if answer.note and answer.note != self._noted:
            self._noted = answer.note
            LOG.warning("PCcheck: %s", answer.note)
        LOG.info(
            "%d slots of %.1f MiB in %s, up to %g checkpoints in flight",
            answer.slots, rounded / MIB, answer.volume, answer.effective_in_flight,
        )  # fmt: skip

    def state_bytes(self, chunk_bytes: int) -> int:
        """The daemon's memory that one checkpoint takes, in whole chunks."""
        return -(-self._registered_bytes // chunk_bytes) * chunk_bytes

    def _warn_if_ranks_are_absent(self, answer: Registered) -> None:
        """A group's checkpoint is complete only when every rank has it."""
        if answer.absent:
            identity = self.identity
            named = some(answer.absent)
            self._warner.once(
                "absent",
                f"rank {identity.rank} of job {identity.job!r} saves, but of its "
                f"{identity.world_size} ranks these are not connected: {named}. A checkpoint can "
                "be restored only if every rank saved it, so this rank's checkpoints are useless "
                "until those ranks connect. If only this rank should save (rank 0 of plain DDP), "
                "use PCcheckClient(solo=True); or make a client with PCcheckClient("
                "replicated=True) on every rank, and each saves a part.",
            )

    def saves_alone(self, world_size: int) -> bool:
        """Whether a checkpoint of a start of `world_size` ranks is complete on this rank."""
        return world_size == 1 or self._solo

    def announce(self, connection: Connection, payload_bytes: int, levels: int) -> None:
        """Makes the daemon allocate already, so that the first checkpoint does not wait for it. The
        answer names the start that this process belongs to since it has restored."""
        rounded = -(-payload_bytes // MIB) * MIB
        connection.ask(Register(rounded, levels=levels), self._belongs_to)

    def _belongs_to(self, answer: object) -> None:
        """The start that this process is a member of now, if the answer names one."""
        if isinstance(answer, (Registered, Joined)) and answer.incarnation:
            self.incarnation, self._start = answer.incarnation, answer.start

    def took_over(
        self, connection: Connection, sequence: int, *, base: int = 0, turn: int = 0
    ) -> None:
        """The newest checkpoint is restored (0: there is none). Ends the daemon's protection of the
        earlier run (P7). `base`: the sequence that is in place now, by restore(); `turn`: as
        `Steps.turn`."""
        restored = Restored(sequence, base, turn)
        self._belongs_to(connection.request(restored, timeout_s=RESTORED_LIMIT_S))
        self._restored = sequence
        self._registered_bytes = 0  # the next checkpoint learns the start of this process
        self._protected_step = None

    def restored_in_part(self, step: int, names: Iterable[str]) -> None:
        """That ends no protection: a run may take a model from another one."""
        self._in_part.setdefault(step, set()).update(names)

    def warn_if_unrestored(self) -> None:
        """P7: this run saves although it did not read the checkpoints that the job has."""
        if self._protected_step is None:
            return
        what = "NOT restored"
        then = (
            "To continue from it, call restore() before training (in a framework: see "
            "docs/frameworks.md). To start over, use PCcheckClient(fresh=True). If this run got "
            "its state in another way, call adopt()."
        )
        if names := self._in_part.get(self._protected_step):
            what = f"restored only in part ({', '.join(sorted(names))})"
            then = "If this run continues that job, call adopt() after restore(only=...)."
        self._warner.once(
            "unrestored",
            f"job {self.identity.job!r} (rank {self.identity.rank}) has a checkpoint of step "
            f"{self._protected_step} that was {what}. It stays on the disk, beside the checkpoints "
            f"of this run. {then}",
        )

    def say_goodbye(self, done: bool, left_s: float | None = None) -> bool:
        """Whether a daemon got it. Raises PccheckError when it does not answer; with `done` it
        trims the volume. `left_s`: the process is about to be killed."""
        connection = self.current()
        if connection is not None:
            limit_s = GOODBYE_LIMIT_S if done else min(GOODBYE_LIMIT_S, self._stall_limit_s)
            if left_s is not None:
                limit_s = min(limit_s, max(GOODBYE_LEAST_S, left_s))
            connection.request(Goodbye(done, self.uncounted), timeout_s=limit_s)
            self.uncounted = 0
        return connection is not None

    def forget_in_child(self) -> None:
        """In a forked child: closes the sockets, so that the daemon notices the parent's end."""
        self._give_up_attempt()
        if self._voice is not None:
            self._voice.forget_in_child()
        if self._connection is not None:
            self._connection.forget_in_child()

    def close(self) -> None:
        """Ctrl-C does not keep the session open; what is left then, a second call ends."""
        self._give_up_attempt()
        try:
            self._end()
        finally:
            if self._voice is not None:
                self._voice.close()

    def _give_up_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _end(self) -> None:
        """Ends the connection, if there is one."""
        connection = self._connection
        if connection is None:
            return
        try:
            self.error = connection.gone()
            if not isinstance(self.error, DaemonUnreachableError):  # it would happen again
                self._next_try_s = time.monotonic() + BACKOFF_SLOW_S
            with contextlib.suppress(PccheckError):
                connection.pump()  # answers that the next daemon will need may have arrived
        finally:
            if self._voice is not None:
                self._voice.leave()
            connection.close()
            self._connection = None

    def _greet(self, connection: Connection) -> None:
        self._registered_bytes = 0
        welcome = connection.welcome
        if not self._has_connected and welcome.newest_step is None and self._restored is None:
            self._restored = 0  # the volume was empty: all later checkpoints are this run's
        self._has_connected = True
        self.incarnation, self._start = welcome.incarnation, welcome.start
        self._storage = welcome.storage
        self._protected_step = welcome.protected_step
        if self._voice is not None:
            self._voice.follow(connection.path, welcome.token)
        if self._warner.over(*self._disconnected):
            LOG.warning(
                "PCcheck: connected to pccheckd (pid %d); checkpoints continue", welcome.pid
            )

    def _new_process(self) -> bytes:
        new = secrets.token_bytes(16)
        if self.saves_alone(self.identity.world_size):
            return new
        return _PROCESSES.setdefault((os.getpid(), self._born), new)

    def _of_an_image(self) -> None:
        """A process that was restored from a snapshot is a new start of its job, which continues
        from what it knew to be saved: the process that the image was taken of may have gone on."""
        if (now := born()) != self._born:
            self._born = now
            self._process = self._new_process()
            self.incarnation, self._start = 0, b""
            self._restored = self._restored if self._saved is None else self._saved

    def _hello(self) -> Hello:
        self._of_an_image()
        identity = self.identity
        return Hello(
            protocol=PROTOCOL_VERSION, role=Role.TRAINER, version=VERSION, pid=os.getpid(),
            job=identity.job, rank=identity.rank, world_size=identity.world_size,
            local_world_size=identity.local_world_size, launch=identity.launch,
            fresh=self._fresh, solo=self._solo, replicated=self._replicated, process=self._process,
            incarnation=self.incarnation, start=self._start, storage=self._storage,
            restored=self._restored,
        )  # fmt: skip


def born() -> int:
    """When this process was made, in clock ticks: CRIU's restore makes another one."""
    text = Path("/proc/self/stat").read_text(errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def _as_ours(error: Exception) -> PccheckError:
    if isinstance(error, CheckpointFailedError):  # it cannot save; it is not only busy
        return RefusedError(error.message, hint=error.hint, retryable=error.retryable)
    if isinstance(error, PccheckError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE):
        return DaemonUnreachableError(f"the daemon closed the connection: {error}", hint=START_HINT)
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        return RefusedError(
            "cannot connect: this process can start no more threads",
            hint="raise the limit: ulimit -u, ulimit -v, or pids.max of its cgroup",
            retryable=True,
        )
    return ProtocolError(f"cannot set up the session: {error}")
