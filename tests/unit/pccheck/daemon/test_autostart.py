"""A private daemon: found, started once, its note, its orphans, and when it is ended."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck.daemon import autostart as module
from pccheck.daemon.autostart import PrivateDaemon
from pccheck_native import layout
from pccheck_wire.errors import DaemonUnreachableError, PccheckError, WaitTimeoutError
from pccheck_wire.messages import Report
from pccheckd.jobs.survey import LIMIT_S

AWAIT_END = module._await_end
REAL, PYTHON = subprocess.Popen, module.sys.executable


class Machine:
    """Daemons by their socket. Nothing is started, and no signal is sent."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.daemons: dict[Path, list[object]] = {}  # with the pids of their sessions
        self.serves: dict[Path, str] = {}  # which directory, by layout.number
        self.started: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.killed: list[tuple[int, int]] = []
        self.ends: int | None = None  # the exit code of what is started
        self.words = ""
        self.answers_after_s = 0.0
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(path / "run"))
        (path / "run").mkdir(mode=0o700)
        monkeypatch.setattr(module.attach, "observe", self._observe)
        monkeypatch.setattr(module.subprocess, "Popen", self._popen)
        monkeypatch.setattr(module.os, "kill", lambda pid, sign: self.killed.append((pid, sign)))
        monkeypatch.setattr(module, "_await_end", lambda *_: True)
        monkeypatch.setattr(module, "_OF_THIS_PROCESS", set())

    def _observe(self, place: Path, *, timeout_s: float, **_: object) -> Any:
        if place.resolve() not in self.daemons:
            raise DaemonUnreachableError("no daemon listens")
        if timeout_s < self.answers_after_s:
            raise WaitTimeoutError(f"no answer in {timeout_s} s")
        sessions = [{"pid": pid} for pid in self.daemons[place.resolve()]]
        report = Report({"sessions": sessions})
        return Answer(SimpleNamespace(storage=self.serves[place.resolve()]), report)

    def _popen(self, command: list[str], **about: Any) -> Any:
        self.started.append(command)
        self.environments.append(about["env"])
        about["stdout"].write(self.words.encode())
        about["stdout"].flush()
        if self.ends is None:
            self.serve(Path(command[-1]), Path(command[-3]))
        ends = self.ends
        return SimpleNamespace(pid=4711, poll=lambda: ends, terminate=lambda: None, returncode=None)

    def serve(self, place: Path, storage: Path) -> None:
        self.daemons[place], self.serves[place] = [], layout.number(storage)

    def daemon(self, name: str = "storage") -> PrivateDaemon:
        return PrivateDaemon(self.path / name)


class Answer:
    daemon_pid = 4711

    def __init__(self, welcome: Any, report: Report) -> None:
        self.welcome, self.report = welcome, report

    def request(self, *_: object, timeout_s: float) -> Report:
        return self.report

    def close(self) -> None: ...

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    long = tmp_path / ("long" * 10)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(long))
    yield Machine(tmp_path, monkeypatch)


def test_ranks_of_one_directory_share_a_daemon(machine: Machine) -> None:
    first, second, other = machine.daemon(), machine.daemon(), machine.daemon("other")
    for daemon in (first, second, other):
        daemon.ensure()
    assert len(machine.started) == 2
    assert first.socket == second.socket != other.socket
    assert machine.started[0][-4:] == [
        "--storage", str(machine.path / "storage"), "--socket", str(first.socket)
    ]  # fmt: skip
    assert stat.S_IMODE(first.socket.parent.stat().st_mode) == 0o700


def test_it_serves_every_gpu_and_reads_no_file_of_the_service(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("PCCHECK_CONFIG", raising=False)
    machine.daemon().ensure()
    monkeypatch.setenv("PCCHECK_CONFIG", "/mine")
    machine.daemon("other").ensure()
    first, second = machine.environments
    assert "CUDA_VISIBLE_DEVICES" not in first and first["HOME"] == "/home/me"
    assert (first["PCCHECK_CONFIG"], second["PCCHECK_CONFIG"]) == (os.devnull, "/mine")


def test_one_that_was_started_elsewhere_is_found_by_its_note(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG_RUNTIME_DIR differs between a login and a batch job."""
    elsewhere = machine.path / "elsewhere.sock"
    daemon = machine.daemon()
    daemon.storage.mkdir()
    machine.serve(elsewhere, daemon.storage)
    layout.socket_note(daemon.storage).write_text(str(elsewhere))
    monkeypatch.chdir(machine.path)  # the path of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(elsewhere.name)
        daemon.ensure()
    assert machine.started == []
    assert daemon.socket.resolve() == elsewhere


def test_a_start_that_fails_tells_the_last_line_of_the_log(machine: Machine) -> None:
    machine.ends, machine.words = 2, "a line\n--slots must be at least 2\n"
    with pytest.raises(PccheckError, match="did not start: --slots must be at least 2") as raised:
        machine.daemon().ensure()
    assert "see its log" in raised.value.hint
    machine.ends, machine.words = None, ""
    machine.daemon().ensure()  # the lock is free again


def test_a_daemon_that_still_reads_the_records_is_waited_for(machine: Machine) -> None:
    """The daemon listens already. On a slow disk it reads records for as long as its own limit."""
    machine.answers_after_s = LIMIT_S
    machine.daemon().ensure()
    machine.daemon().ensure()
    assert len(machine.started) == 1


def test_parents_are_not_made(machine: Machine) -> None:
    """They may be the place of a disk that is not mounted."""
    with pytest.raises(PccheckError, match="cannot make the storage directory"):
        PrivateDaemon(machine.path / "disk" / "storage").ensure()
    assert not (machine.path / "disk").exists()


@pytest.mark.parametrize("name", ["file", "file/storage"])
def test_a_file_in_place_of_the_directory_is_told(machine: Machine, name: str) -> None:
    """Nothing is to be made or mounted there."""
    (machine.path / "file").touch()
    with pytest.raises(PccheckError, match="cannot make the storage directory") as raised:
        PrivateDaemon(machine.path / name).ensure()
    assert "mount" not in raised.value.hint
    assert f"{machine.path / 'file'} is not a directory: choose" in raised.value.hint


def test_another_process_that_starts_one_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_LIMIT_S", 0.05)
    daemon = machine.daemon()
    daemon.storage.mkdir()
    with daemon._locked(), pytest.raises(WaitTimeoutError, match="another process has held"):
        machine.daemon().ensure()
    machine.daemon().ensure()


@pytest.mark.parametrize(("sessions", "ends"), [([], True), ([os.getpid()], False), ([1], False)])
def test_it_ends_with_its_last_client(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, sessions: list[object], ends: bool
) -> None:
    """A session of this process may still be listed for a moment; that of another one counts."""
    monkeypatch.setattr(module, "_HANG_UP_LIMIT_S", 0.05)
    daemon = machine.daemon()
    daemon.ensure()
    machine.daemons[daemon.socket] = sessions
    daemon.release()
    assert machine.killed == ([(4711, signal.SIGTERM)] if ends else [])


def test_a_client_is_not_listed_any_more_when_the_next_one_closes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would take its session for that of an open client, and the daemon would stay."""
    listed = [[os.getpid(), 1], [os.getpid(), 1], [1]]

    def request(*_: object, timeout_s: float) -> Report:
        return Report({"sessions": [{"pid": pid} for pid in listed.pop(0)]})

    monkeypatch.setattr(Answer, "request", request)
    daemon = machine.daemon()
    daemon.ensure()
    daemon.release()
    assert (listed, machine.killed) == ([], [])


def test_it_stays_while_another_client_of_this_process_is_open(machine: Machine) -> None:
    first, second = machine.daemon(), machine.daemon()
    first.ensure()
    first.release()
    assert machine.killed == []
    second.release()
    assert machine.killed == [(4711, signal.SIGTERM)]


def test_a_daemon_of_another_pid_namespace_is_not_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number there is that of another process here."""
    daemon = machine.daemon()
    daemon.ensure()
    monkeypatch.setattr(Answer, "daemon_pid", 0)
    daemon.release()
    assert machine.killed == []


def test_a_daemon_of_another_directory_is_neither_used_nor_replaced(machine: Machine) -> None:
    """The path is another directory in another container, and both share XDG_RUNTIME_DIR."""
    theirs, mine = machine.daemon(), machine.daemon()
    theirs.ensure()
    theirs.storage.rename(machine.path / "theirs")
    mine.ensure()
    assert mine.socket != theirs.socket and len(machine.started) == 2
    again = machine.daemon()
    again.ensure()
    assert again.socket == mine.socket and len(machine.started) == 2


def test_no_process_is_forked_while_a_daemon_is_started(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a DataLoader would have Popen's pipe open, for which Popen waits."""
    free: list[bool] = []

    def popen(command: list[str], **about: Any) -> Any:
        other = threading.Thread(target=lambda: free.append(module._STARTS.acquire(blocking=False)))
        other.start()
        other.join()
        return machine._popen(command, **about)

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    machine.daemon().ensure()
    assert free == [False]


@pytest.mark.parametrize("holds", [True, False])
def test_an_orphan_is_ended_before_another_one_starts(machine: Machine, holds: bool) -> None:
    """Its socket was removed at a logout: it holds the lock, and nothing can connect to it. After
    a reboot or in another PID namespace the number in the lock is of some other process."""
    daemon = machine.daemon()
    daemon.storage.mkdir()
    layout.socket_note(daemon.storage).write_text(str(machine.path / "removed.sock"))
    lock = Path(layout.lock_path(daemon.storage))
    lock.touch()
    script = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    place = lock if holds else __file__
    orphan = REAL([PYTHON, "-c", script, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert orphan.stdout is not None and orphan.stdout.readline()
        lock.write_text(str(orphan.pid))
        daemon.ensure()
        assert machine.killed == ([(orphan.pid, signal.SIGTERM)] if holds else [])
    finally:
        orphan.communicate()


def test_a_killed_daemon_is_started_again_in_the_background(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, begun = machine.daemon(), threading.Event()
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    calls: list[float] = []

    def ensure() -> None:
        calls.append(now_s)
        begun.wait(20)

    monkeypatch.setattr(daemon, "ensure", ensure)
    daemon.ensure_later()
    daemon.ensure_later()  # it is starting
    begun.set()
    assert daemon._starting is not None
    daemon._starting.join(20)
    now_s += module._AGAIN_S / 2
    daemon.ensure_later()  # too early
    assert calls == [100.0]
    now_s += module._AGAIN_S
    daemon.ensure_later()
    daemon._starting.join(20)
    assert len(calls) == 2


def test_a_client_that_closes_meanwhile_leaves_no_daemon_behind(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = machine.daemon()
    released: list[bool] = []
    monkeypatch.setattr(daemon, "ensure", lambda: module._OF_THIS_PROCESS.discard(daemon))
    monkeypatch.setattr(daemon, "release", lambda: released.append(True))
    daemon.ensure_later()
    assert daemon._starting is not None
    daemon._starting.join(20)
    assert released == [True]


def test_a_runtime_directory_that_others_can_read_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(module, "TEMPORARY", str(tmp_path))
    (tmp_path / f"pccheck-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(PccheckError, match="other users can read it"):
        machine.daemon().ensure()


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_without_a_runtime_directory_of_its_own_it_takes_a_temporary_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    given = tmp_path / "given"
    if kind == "file":
        given.touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(given))
    monkeypatch.setattr(module, "TEMPORARY", str(tmp_path))
    assert machine.daemon().socket.parent.parent == tmp_path / f"pccheck-{os.getuid()}"


def test_a_runtime_directory_that_cannot_be_made_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setattr(module, "TEMPORARY", str(tmp_path / "file"))
    with pytest.raises(PccheckError, match=r"cannot make the directory .*: Not a directory"):
        machine.daemon().ensure()


def test_what_the_system_refuses_is_an_error_of_pccheck(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only such an error leaves the training running."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    with pytest.raises(PccheckError, match=r"cannot start a private pccheckd: .*unavailable"):
        machine.daemon().ensure()


@pytest.mark.parametrize("name", ["x" * 300, "denied/storage"])
def test_a_storage_directory_that_cannot_be_looked_at_ends_no_training(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither making the client nor closing it at the end of the training may raise."""
    real = module.Path.is_dir

    def is_dir(path: Path) -> bool:  # what an ordinary user gets; tests may run as root
        if "denied" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(module.Path, "is_dir", is_dir)
    daemon = machine.daemon(name)
    with pytest.raises(PccheckError, match="cannot make the storage directory"):
        daemon.ensure()
    daemon.release()


def test_a_process_is_awaited_by_a_descriptor_above_1023(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where `select` would raise."""
    opened: list[int] = []
    pidfd_open = os.pidfd_open

    def high(pid: int) -> int:
        low = pidfd_open(pid)
        opened.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024))
        os.close(low)
        return opened[-1]

    monkeypatch.setattr(module.os, "pidfd_open", high)
    with REAL(["sleep", "100"]) as process:
        assert not AWAIT_END(process.pid, 0.0)
        process.kill()
        assert AWAIT_END(process.pid, 60.0)
    assert min(opened) >= 1024
    assert AWAIT_END(process.pid, 0.0)
