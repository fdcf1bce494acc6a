"""Takes a snapshot of a process that knows nothing of it.

1. Everything that can be refused is refused while the target runs.
2. The daemon gives room, then CRIU freezes the target and streams it into the pool.
3. CRIU waits at its hook until the record is durable; then it ends the target, or lets it go on.

Whatever fails before that, the pipes are cut: CRIU gets EPIPE and lets the target go on."""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from pccheck_wire.basics import Closing, size_text, socket_name
from pccheck_wire.errors import CheckpointFailedError, RefusedError, UsageError, WaitTimeoutError

from . import criu, facts
from .capture import Capture
from .looking import Looked, look
from .saving import ImageSession

#: What the image may grow by between the look and the freeze, and CRIU's own files.
MARGIN_BYTES = 64 << 20
#: A target whose pipes bring nothing for so long is let go.
STALL_LIMIT_S = 30.0
DURABLE_LIMIT_S = 3600.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class SnapshotWanted:
    """What the user asked for."""

    job: str = ""
    tree: bool = False
    leave_running: bool = False
    socket: str | None = None


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


def snapshot(pid: int, wanted: SnapshotWanted | None = None) -> ProcessSnapshot:
    """Saves process `pid`, with its children if `tree`, and ends it unless `leave_running`.

    Raises RefusedError with every reason why the process cannot be restored, before anything is
    stopped; CheckpointFailedError when the snapshot failed, and the target goes on."""
    wanted = wanted or SnapshotWanted()
    program = criu.find()
    with contextlib.ExitStack() as stack:
        watched = stack.enter_context(Watched(pid))
        looked = look_at(pid, wanted)
        require_restorable(looked)
        job = wanted.job or f"{looked.comm}-{pid}"
        place = stack.enter_context(criu.PrivatePlace())
        session = stack.enter_context(ImageSession(job, wanted.socket, bound(looked)))
        watchdog = stack.enter_context(criu.Watchdog())
        capture = stack.enter_context(Capture(place, session))
        stack.callback(session.abandon)  # first of all, whatever happens
        session.begin()
        taking = _Taking(looked, watched, wanted, session, capture, watchdog, place)
        return taking.run(program, job)


def bound(looked: Looked) -> int:
    """More than the image can have, in bytes."""
    return looked.image_bytes + looked.image_bytes // 16 + MARGIN_BYTES


def look_at(pid: int, wanted: SnapshotWanted) -> Looked:
    """Raises UsageError when there is no such process."""
    sockets = (socket_name(wanted.socket),)
    return look(pid, tree=wanted.tree, root=os.geteuid() == 0, daemon_sockets=sockets)


class Watched(Closing):
    """A process by its identity: a pid alone may be used again."""

    def __init__(self, pid: int) -> None:
        """Raises UsageError."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise UsageError(f"there is no process {pid}", hint="see: ps -e") from error

    def lives(self) -> bool:
        return not self.wait(0)

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended by then."""
        ready, _, _ = select.select([self._pidfd], [], [], max(0, limit_s))
        return bool(ready)

    def close(self) -> None:
        os.close(self._pidfd)


def require_restorable(looked: Looked) -> None:
    """Raises RefusedError, with all reasons."""
    if looked.refusals:
        raise RefusedError(
            "; ".join(one.what for one in looked.refusals),
            hint="; ".join(dict.fromkeys(one.fix for one in looked.refusals)),
        )


class _Taking:
    """One run of CRIU."""

    def __init__(
        self, looked: Looked, watched: Watched, wanted: SnapshotWanted, session: ImageSession,
        capture: Capture, watchdog: criu.Watchdog, place: criu.PrivatePlace,
    ) -> None:  # fmt: skip
        self._looked, self._watched, self._wanted, self._session = looked, watched, wanted, session
        self._capture, self._watchdog, self._place = capture, watchdog, place
        self._asked_s = time.monotonic()
        self._options = facts.dump_options(looked)
        self._leave = ["--leave-running"] if wanted.leave_running else []

    def run(self, program: Path, job: str) -> ProcessSnapshot:
        frozen_s = time.monotonic()
        options = [*self._options, *self._leave]
        dump = criu.Dump(program, self._place, self._looked.pid, options)
        try:
            self._until_dumped(dump)
            nbytes, sequence = self._keep()
        except BaseException:
            self._session.abandon()
            dump.finish(criu.CUT_LIMIT_S)
            raise
        durable_s = time.monotonic()
        dump.go_on()
        status = dump.finish(criu.CUT_LIMIT_S)
        if status != 0:
            raise dump.error(f"the snapshot is durable, but criu ended with status {status}")
        return ProcessSnapshot(
            job, self._session.step, sequence, nbytes, pause_s=durable_s - frozen_s,
            durable_s=durable_s - self._asked_s, running=self._wanted.leave_running,
            pid=self._looked.pid, notes=self._looked.notes,
        )  # fmt: skip

    def _until_dumped(self, dump: criu.Dump) -> None:
        read_bytes, since_s = -1, time.monotonic()
        while not dump.poll(_LOOK_S):
            self._watchdog.lives()
            if self._capture.error is not None:
                raise self._capture.error
            if (now := self._session.read_bytes) != read_bytes:
                read_bytes, since_s = now, time.monotonic()
            if time.monotonic() - since_s > STALL_LIMIT_S:
                raise WaitTimeoutError(
                    f"the target sent nothing for {STALL_LIMIT_S:.0f} s, after "
                    f"{size_text(read_bytes)}",
                    hint="see: pccheckctl status",
                )
        if not dump.dumped:
            raise dump.error("criu could not dump the process")

    def _keep(self) -> tuple[int, int]:
        """Makes the image durable, while CRIU waits; its bytes and its sequence."""
        index = self._capture.index(self._looked.tree, STALL_LIMIT_S)
        if not self._watched.lives():
            raise CheckpointFailedError(f"process {self._looked.pid} has ended meanwhile")
        index.facts.update(facts.of(self._looked, self._options).plain())
        nbytes = self._session.end(index)
        return nbytes, self._session.durable(DURABLE_LIMIT_S, self._watchdog.lives)
