"""Takes a snapshot of a process that knows nothing of it.

1. Everything that can be refused is refused while the target runs.
2. The daemon gives room, then CRIU freezes the target and streams it into the pool.
3. CRIU waits at its hook until the record is durable, and then ends the target. A target that
   goes on waits only until the image is copied.

Whatever fails before that, the pipes are cut: CRIU gets EPIPE and lets the target go on."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pccheck_process.driving import criu
from pccheck_process.driving.capture import Capture
from pccheck_store import VERSION
from pccheck_wire import attach
from pccheck_wire.basics import Closing, arrives, size_text, socket_name
from pccheck_wire.errors import CheckpointFailedError, RefusedError, UsageError, WaitTimeoutError
from pccheck_wire.messages import Pause, Paused

from . import facts, gpu
from .becoming import become
from .library import newest_steps
from .looking import Looked, look
from .saving import ImageSession
from .taken import ProcessSnapshot

#: What the image may grow by between the look and the freeze, and CRIU's own files.
MARGIN_BYTES = 64 << 20
#: For the record, while the target stands still: what the slowest disk needs.
DURABLE_LIMIT_S, SLOWEST_BYTES_PER_S = 60.0, 32 << 20
#: What CRIU refuses once may be over a moment later.
TRIES = 3
#: For a PCcheckClient in the process: until its next step.
PAUSE_LIMIT_S = 60.0
#: As many pids as a request may have.
PAUSED_MAX = 32
_LOOK_S = 0.05


@dataclass(frozen=True)
class SnapshotWanted:
    """What the user asked for."""

    job: str = ""
    tree: bool = False
    leave_running: bool = False
    socket: str | None = None


def snapshot(pid: int, wanted: SnapshotWanted | None = None) -> ProcessSnapshot:
    """Saves process `pid`, with its children if `tree`, and ends it unless `leave_running`.

    Raises RefusedError with every reason why the process cannot be restored, before anything is
    stopped; CheckpointFailedError when the snapshot failed, and the target goes on."""
    wanted = wanted or SnapshotWanted()
    program = criu.find()
    with contextlib.ExitStack() as stack:
        watched = stack.enter_context(Watched(pid))
        looked, library = look_at(pid, wanted), dict[str, int]()
        if looked.attached:
            apart = stack.enter_context(Apart(wanted.socket))
            looked = apart.until_apart(looked, wanted)
            library = newest_steps(apart.jobs, wanted.socket)
        for tries_left in reversed(range(TRIES)):
            require_restorable(looked)
            become(looked.uid, looked.gid, looked.groups)
            criu.require_capabilities(program)
            try:
                return _once(program, looked, wanted, library)
            except criu.CriuError:  # a child that was just ending, for example
                if not tries_left or not watched.lives():
                    raise
            looked = look_at(pid, wanted)
    raise AssertionError


def _once(
    program: Path, looked: Looked, wanted: SnapshotWanted, library: dict[str, int]
) -> ProcessSnapshot:
    with contextlib.ExitStack() as stack:
        job = wanted.job or f"{looked.comm}-{looked.pid}"
        place = stack.enter_context(criu.PrivatePlace())
        session = stack.enter_context(ImageSession(job, wanted.socket, bound(looked)))
        watchdog = stack.enter_context(criu.Watchdog())
        capture = stack.enter_context(Capture(place, session))
        stack.callback(session.abandon)  # first of all, whatever happens
        session.begin(watchdog.lives)
        held = stack.enter_context(gpu.hold(looked, watchdog.lives))
        taking = _Taking(looked, wanted, session, capture, watchdog, place, held, library)
        return taking.run(program, job)


def bound(looked: Looked) -> int:
    """More than the image can have, in bytes."""
    return looked.image_bytes + looked.image_bytes // 16 + MARGIN_BYTES


def look_at(pid: int, wanted: SnapshotWanted) -> Looked:
    """Root looks as the user whose process it is, since root becomes that user. Raises UsageError
    when there is no such process."""
    uid = os.geteuid()
    if uid == 0:
        with contextlib.suppress(FileNotFoundError):
            uid = Path(f"/proc/{pid}").stat().st_uid
    sockets = (socket_name(wanted.socket),)
    looked = look(pid, tree=wanted.tree, root=uid == 0, daemon_sockets=sockets, uid=uid)
    return gpu.inspect(looked)


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
        return arrives(self._pidfd, limit_s)

    def close(self) -> None:
        os.close(self._pidfd)


class Apart(Closing):
    """A trainer with a PCcheckClient is apart from the daemon while its snapshot is taken."""

    def __init__(self, socket: str | None) -> None:
        self._attachment = attach.observe(socket, version=VERSION)
        self.jobs: set[str] = set()  #: of its clients

    def until_apart(self, looked: Looked, wanted: SnapshotWanted) -> Looked:
        """Asks until every client has disconnected; what the process is then. Raises
        RefusedError."""
        deadline_s = time.monotonic() + PAUSE_LIMIT_S
        while True:
            connected = dict.fromkeys([looked.pid, *(one.pid for one in looked.attached)])
            answer = self._attachment.request(Pause([*connected][:PAUSED_MAX]))
            assert isinstance(answer, Paused)
            self.jobs.update(answer.jobs)
            if not answer.left and not (found := look_at(looked.pid, wanted)).attached:
                return found
            if time.monotonic() > deadline_s:
                raise RefusedError(
                    f"process {looked.pid} is connected to pccheckd, and did not disconnect within "
                    f"{PAUSE_LIMIT_S:.0f} s",
                    hint="its PCcheckClient disconnects at the next step of an attached optimizer, "
                    "checkpoint() or should_checkpoint()",
                )
            time.sleep(_LOOK_S)

    def close(self) -> None:
        self._attachment.close()


def require_restorable(looked: Looked) -> None:
    """Raises RefusedError, with all reasons."""
    if len(looked.refusals) == 1:
        raise RefusedError(looked.refusals[0].what, hint=looked.refusals[0].fix)
    if looked.refusals:
        raise RefusedError("; ".join(map(str, looked.refusals)))


class _Taking:
    """One run of CRIU."""

    def __init__(
        self, looked: Looked, wanted: SnapshotWanted, session: ImageSession, capture: Capture,
        watchdog: criu.Watchdog, place: criu.PrivatePlace, held: gpu.HeldProcesses,
        library: dict[str, int],
    ) -> None:  # fmt: skip
        self._looked, self._wanted, self._session = looked, wanted, session
        self._capture, self._watchdog, self._place, self._held = capture, watchdog, place, held
        self._options, self._library = facts.dump_options(looked), library

    def run(self, program: Path, job: str) -> ProcessSnapshot:
        """A target that is to end waits for the record. One that goes on waits for the copy: it
        loses nothing if the disk fails."""
        asked_s = self._held.since_s
        options = [*self._options, *(["--leave-running"] if self._wanted.leave_running else [])]
        dump = criu.Dump(program, self._place, self._looked.pid, options)
        try:
            self._until_dumped(dump)
            nbytes = self._complete()
            if self._wanted.leave_running:
                self._session.copied(criu.STALL_LIMIT_S, self._watchdog.lives)
            else:
                self._until_durable(nbytes)
        except BaseException:
            self._session.abandon()
            dump.finish(criu.CUT_LIMIT_S)
            raise
        dump.go_on()
        status = dump.finish(criu.CUT_LIMIT_S)
        trouble = self._held.release()
        ended_s = time.monotonic()
        if status != 0:
            why = dump.error(f"the image is complete, but criu ended with status {status}")
            raise CheckpointFailedError(why.message)  # not tried again: it may become durable
        sequence = self._until_durable(nbytes)
        if trouble is not None:  # the snapshot is durable all the same
            raise trouble
        return ProcessSnapshot(
            job, self._session.step, sequence, nbytes, pause_s=ended_s - asked_s,
            durable_s=time.monotonic() - asked_s, running=self._wanted.leave_running,
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
            if time.monotonic() - since_s > criu.STALL_LIMIT_S:
                raise WaitTimeoutError(
                    f"the target sent nothing for {criu.STALL_LIMIT_S:.0f} s, after "
                    f"{size_text(read_bytes)}",
                    hint="see: pccheckctl status",
                )
        if not dump.dumped:
            error = dump.error("criu could not dump the process")
            raise self._capture.error or self._session.failure() or error

    def _complete(self) -> int:
        """The image gets its index, while CRIU waits; its bytes."""
        index = self._capture.index(facts.tree_now(self._looked.pid), criu.STALL_LIMIT_S)
        found = facts.of(self._looked, self._options, self._held.facts, self._library)
        index.facts.update(found.plain())
        return self._session.end(index)

    def _until_durable(self, nbytes: int) -> int:
        limit_s = DURABLE_LIMIT_S + nbytes / SLOWEST_BYTES_PER_S
        return self._session.durable(limit_s, self._watchdog.lives)
