"""Makes a process again from its newest snapshot that is intact, and stays its parent."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pccheck_native import _core, catalog
from pccheck_process.driving import criu, inside
from pccheck_process.driving.serving import Serving
from pccheck_process.procs import fingerprint
from pccheck_store.reading.source import Payloads, Source
from pccheck_wire.basics import arrives
from pccheck_wire.errors import (
    CheckpointFailedError,
    DamagedError,
    NoCheckpointError,
    RefusedError,
    UnreadableError,
    one_owner,
)

from . import gpu, grown, library
from .facts import Facts
from .index import unpack
from .procs.procfs import Proc, parse_stat, shown

#: CRIU's own limit is on single steps only; the disk may need a minute for a large image.
RESTORE_LIMIT_S = 3600.0
#: For ids that are taken: by processes that live, and by those that have ended.
TAKEN_LIMIT_S, ENDED_LIMIT_S = 1.0, 10.0
#: For another restore in the same working directory.
ALONE_LIMIT_S = 60.0
_LOOK_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class RestoreWanted:
    """What the user asked for. `note` gets a sentence for each thing worth knowing."""

    job: str
    step: int | None = None
    stdout: Path | None = None
    cgroup: Path | None = None
    gpus: Mapping[str, str] = field(default_factory=dict)  #: old -> new UUID
    own_pids: bool = False  #: in a PID namespace, where its pids are free
    force: bool = False  #: although libraries or the machine are different
    note: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class RunningAgain:
    """A process that runs, below this one: as its child, or in a namespace."""

    pid: int  #: as it sees itself
    child: int  #: of this process
    receiver: int  #: of signals: the process itself, or process 1 of its namespace
    step: int

    def wait(self) -> int:
        """Its exit code; 128 and the signal's number after a signal."""
        return inside.exit_code(inside.wait_for(self.child))


class Signals:
    """What this process is sent goes to the restored one, also what comes before there is one."""

    def __init__(self) -> None:
        self._receiver = 0
        self._waiting: list[int] = []
        for number in inside.SIGNALS:
            signal.signal(number, lambda sent, _: self._take(sent))

    def pass_on(self, to: RunningAgain) -> None:
        self._receiver = to.receiver
        while self._waiting:
            inside.send(self._receiver, self._waiting.pop(0))

    def _take(self, number: int) -> None:
        if self._receiver:
            inside.send(self._receiver, number)
        else:
            self._waiting.append(number)


def restore_process(source: Source, wanted: RestoreWanted) -> RunningAgain:
    """Raises NoCheckpointError, DamagedError when no snapshot is intact, and RefusedError with all
    reasons why the process cannot be made here, before anything is made or changed."""
    program = criu.find()
    if not wanted.own_pids:  # there an ordinary user has the capabilities
        criu.require_capabilities(program)
    errors: list[str] = []
    for one in _snapshots(source, wanted):
        try:
            with contextlib.closing(source.open([one])) as payloads:
                return _attempt(program, source, payloads, one, wanted)
        except (DamagedError, UnreadableError) as error:
            errors.append(error.message)
            wanted.note(f"step {one.id.step} is not intact: {error.message}")
    raise DamagedError(
        f"no snapshot of job {wanted.job!r} is intact: {errors[0]}",
        hint="start the program again: a PCcheckClient continues from its own checkpoints "
        "(pccheckctl list)",
    )


def owner(source: Source, job: str, uid: int | None) -> int:
    """Whose snapshots these are. Raises NoCheckpointError, UsageError when several users have
    a job of that name."""
    images = _images(source, job, uid)
    one_owner(job, [one.id.uid for one in images])
    if os.geteuid() == 0 and images[0].id.uid == 0:
        # The connection has judged a daemon that serves: its directory may be its user's.
        owners = {0, source.path.stat().st_uid} if source.served else {0}
        for one in images:
            _require_roots(one.volume_path, owners)
    return images[0].id.uid


def _require_roots(volume: Path, owners: set[int]) -> None:
    """Root runs as root only what root has stored. A volume says of itself whose it is, so the
    owners of the file and of the directories above it count. Raises RefusedError."""
    for place in (volume, *volume.parents):
        with contextlib.suppress(FileNotFoundError):
            found = place.stat()
            if found.st_uid not in owners or (
                found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
            ):
                raise RefusedError(
                    f"{place} belongs to uid {found.st_uid} or others may write there, so this "
                    "snapshot may not be one of root",
                    hint="--uid N restores snapshots of user N as that user",
                )


def _images(source: Source, job: str, uid: int | None) -> list[catalog.StoredCheckpoint]:
    held = source.held(job=job, uid=uid)
    images = [one for one in held.checkpoints if one.flags & _core.SLOT_IMAGE]
    if not images:
        raise NoCheckpointError(
            f"there is no process snapshot of job {job!r}", hint="see: pccheckctl list"
        )
    return images


def _snapshots(source: Source, wanted: RestoreWanted) -> list[catalog.StoredCheckpoint]:
    """Those of this user that are asked for, the newest first: nobody runs what another user has
    stored."""
    images = _images(source, wanted.job, os.geteuid())
    images.sort(key=lambda one: one.id.sequence, reverse=True)
    if wanted.step is None:
        return images
    chosen = [one for one in images if one.id.step == wanted.step]
    if not chosen:
        steps = ", ".join(str(one.id.step) for one in images)
        raise NoCheckpointError(
            f"job {wanted.job!r} has no snapshot of step {wanted.step}", hint=f"there are: {steps}"
        )
    return chosen


def _attempt(
    program: Path, source: Source, payloads: Payloads, one: catalog.StoredCheckpoint,
    wanted: RestoreWanted,
) -> RunningAgain:  # fmt: skip
    index = unpack(payloads.packed_tree(one.id.rank), one.payload_bytes)
    facts = Facts.of_plain(index.facts)
    for sentence in library.later(source, facts.library):
        wanted.note(sentence)
    _subreap()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(facts))
        _require_possible(facts, wanted)
        place = stack.enter_context(criu.PrivatePlace())
        inherited = stack.enter_context(_Inherited(facts, wanted))
        files = grown.CutFiles(one.id.step)
        try:
            for directory in facts.sockets:
                Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            for kept in files.cut(facts.written):
                wanted.note(f"what was written after the snapshot is in {kept}")
            serving = stack.enter_context(Serving(place, payloads, one.id.rank, index))
            child = _run_criu(program, place, facts, inherited, wanted, serving)
            gpu.wake(facts.gpu, child if wanted.own_pids else None, wanted.gpus)
        except BaseException:
            if not wanted.own_pids:  # else the namespace ends with the program that made it
                _clear(facts)
            files.undo()
            raise
    if wanted.own_pids:
        return RunningAgain(facts.pid, child, _first_child(child), one.id.step)
    _put_back(facts)
    return RunningAgain(facts.pid, child, child, one.id.step)


@contextlib.contextmanager
def _alone(facts: Facts) -> Iterator[None]:
    """Of several restores in one working directory one goes on; the next one looks again."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            place = os.open(facts.cwd, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, place)
            _lock(place)
        yield


def _lock(place: int) -> None:
    """Goes on without the lock after a while: anybody who can read the directory may hold it."""
    deadline_s = time.monotonic() + ALONE_LIMIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_S)


def _require_possible(facts: Facts, wanted: RestoreWanted) -> None:
    """Raises RefusedError with all reasons."""
    reasons = grown.refusals(facts.written, facts.read)
    if not wanted.own_pids:
        reasons += _still_taken(facts)
    if os.geteuid() != facts.uid:
        reasons.append(
            f"the process belonged to uid {facts.uid}, this command runs as uid {os.geteuid()}"
        )
    lacking = sorted({*facts.groups} - {*os.getgroups(), os.getegid()})
    if lacking and os.geteuid() != 0:
        reasons.append(
            f"uid {facts.uid} lacks groups that the process had: {', '.join(map(str, lacking))}"
        )
    if not Path(facts.cwd).is_dir():
        reasons.append(f"its working directory {facts.cwd} is missing")
    reasons += gpu.refusals(facts.gpu, wanted.gpus, force=wanted.force)
    now = fingerprint.measured_again(facts.fingerprint)
    if not wanted.force:
        reasons += grown.writers(facts.written)
        reasons += fingerprint.differences(facts.fingerprint, now)
    if reasons:
        raise RefusedError(
            f"the process cannot be restored here: {'; '.join(reasons)}",
            hint=_way_out(reasons, facts),
        )
    for text in fingerprint.notes(facts.fingerprint, now):
        wanted.note(text)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < facts.open_files[1]:
        wanted.note(
            f"the process had a limit of {facts.open_files[1]} open files, higher than that of "
            "this shell: raise it with ulimit -n, and restore again"
        )


def _way_out(reasons: list[str], facts: Facts) -> str:
    hints = ["--step N chooses another snapshot"]
    if any("its pid" in reason for reason in reasons):
        hints.insert(0, "--own-pids makes the process in a PID namespace, where its pids are free")
    if any("since the snapshot" in one or "mount" in one or "writes to" in one for one in reasons):
        hints.append("--force restores all the same")
    if facts.library:
        jobs = ", ".join(sorted(facts.library))
        hints.append(
            f"or start the program again, which continues from its own checkpoints (job {jobs})"
        )
    return "; ".join(hints)


def _still_taken(facts: Facts) -> list[str]:
    """Processes that are ending keep their ids until their parent has collected them."""
    begin_s = time.monotonic()
    while True:
        found = _taken(facts)
        limit_s = ENDED_LIMIT_S if any(ended for _, ended in found) else TAKEN_LIMIT_S
        if not found or time.monotonic() - begin_s > limit_s:
            return [text for text, _ in found]
        time.sleep(_LOOK_S)


def _taken(facts: Facts) -> list[tuple[str, bool]]:
    """Ids that other processes have now, as pid, thread, session or process group; and whether
    that process has ended."""
    wanted = {one for pid, threads in facts.tree.items() for one in (pid, *threads)}
    files, found = Proc(Path("/proc")), []
    for pid in files.pids():
        if (stat := parse_stat(files.text(pid, "stat"))) is None:
            continue
        has = {pid, stat.group, stat.session, *(files.numbers(pid, "task") or ())}
        name = f"process {pid} ({shown(stat.comm)})" + (", which has ended" if stat.ended else "")
        for number in sorted(wanted & has):
            found.append((f"its pid {number} is taken by {name}", stat.ended))
    return found


def _run_criu(
    program: Path, place: criu.PrivatePlace, facts: Facts, inherited: _Inherited,
    wanted: RestoreWanted, serving: Serving,
) -> int:  # fmt: skip
    """The child that is the process, or process 1 of its namespace."""
    options = ["-o", place.log.name, "--restore-detached", "--restore-sibling"]
    line = criu.command(program, "restore", place, [*options, *facts.options, *inherited.options])
    heard, says = os.pipe()
    if wanted.own_pids:
        line = inside.command(facts.pid, says, line)
    try:
        try:
            with _cgroup(wanted.cgroup) as enter:
                process = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, pass_fds=(*inherited.descriptors, says),
                    preexec_fn=enter, env=criu.environment(),
                )  # fmt: skip
        finally:
            os.close(says)
        made = _until_made(process, heard, wanted)
    finally:
        os.close(heard)
    if serving.error is not None:
        raise serving.error
    if not made:
        log = place.log.read_text(errors="replace") if place.log.exists() else ""
        reason = criu.reason_in(log) or f"status {process.returncode}"
        raise CheckpointFailedError(f"criu could not restore the process: {reason}")
    return process.pid if wanted.own_pids else facts.pid


def _until_made(process: subprocess.Popen[bytes], heard: int, wanted: RestoreWanted) -> bool:
    """Waits for CRIU's end, or for what process 1 of the namespace says of that."""
    if wanted.own_pids:
        said = arrives(heard, RESTORE_LIMIT_S) and os.read(heard, len(inside.RESTORED))
        if said == inside.RESTORED:
            return True
        process.kill()
    try:
        return process.wait(RESTORE_LIMIT_S) == 0 and not wanted.own_pids
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _first_child(pid: int) -> int:
    """Process 1 of a namespace is the child of the program that made the namespace."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else pid


def _put_back(facts: Facts) -> None:
    """What CRIU leaves out."""
    for thread, cpus in facts.affinity.items():
        with contextlib.suppress(OSError, ValueError):  # this machine may have fewer
            os.sched_setaffinity(thread, cpus)


@contextlib.contextmanager
def _cgroup(wanted: Path | None) -> Iterator[Callable[[], None] | None]:
    """What the child does before it becomes CRIU. Raises RefusedError."""
    if wanted is None:
        yield None
        return
    try:
        procs = os.open(wanted / "cgroup.procs", os.O_WRONLY)
    except OSError as error:
        raise RefusedError(
            f"{wanted} cannot be entered: {error.strerror}",
            hint="--cgroup DIR is a directory of cgroup v2 that this user may write to",
        ) from error
    try:
        yield lambda: _enter(procs)
    except subprocess.SubprocessError as error:
        raise RefusedError(f"the kernel refuses to move a process to {wanted}") from error
    finally:
        os.close(procs)


def _enter(procs: int) -> None:
    os.write(procs, b"0")


class _Inherited:
    """What takes the place of pipes and terminals that ended outside of the process."""

    def __init__(self, facts: Facts, wanted: RestoreWanted) -> None:
        self.options: list[str] = []
        self.descriptors: list[int] = []
        self._output: IO[bytes] | None = None
        if wanted.stdout is not None:
            self._output = wanted.stdout.open("ab")
        for name in [*facts.pipes, *facts.terminals]:
            is_input = name in facts.pipes and name == facts.standard[0]
            descriptor = self._end_of_input() if is_input else self._copy_of_output()
            self.descriptors.append(descriptor)
            self.options += ["--inherit-fd", f"fd[{descriptor}]:{name}"]
        output = facts.standard[1]
        if wanted.stdout is not None and output.startswith("/") and output not in facts.terminals:
            descriptor = self._copy_of_output()
            self.descriptors.append(descriptor)
            self.options += ["--inherit-fd", f"fd[{descriptor}]:{output[1:]}"]

    def __enter__(self) -> _Inherited:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.descriptors:
            os.close(one)
        if self._output is not None:
            self._output.close()

    def _end_of_input(self) -> int:
        reading, writing = os.pipe()
        os.close(writing)
        return reading

    def _copy_of_output(self) -> int:
        return os.dup(1 if self._output is None else self._output.fileno())


def _subreap() -> None:
    """What a failed restore leaves becomes a child of this process, which can end it."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise RefusedError("this process cannot adopt children")


def _clear(facts: Facts) -> None:
    """Half-made processes stay, asleep and with their pids, until somebody ends them. Only
    children of this process are: a pid alone may be anybody's."""
    ours = {os.getpid(), *facts.tree}
    found = {pid: parse_stat(Proc(Path("/proc")).text(pid, "stat")) for pid in facts.tree}
    half_made = [pid for pid, one in found.items() if one is not None and one.parent in ours]
    for pid in half_made:
        inside.send(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + ENDED_LIMIT_S
    while half_made and time.monotonic() < deadline_s:  # a driver may hold a process for good
        half_made = [pid for pid in half_made if not _collected(pid)]
        time.sleep(_LOOK_S)


def _collected(pid: int) -> bool:
    """Children of children come to this process when their parent has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not Path(f"/proc/{pid}").exists()
