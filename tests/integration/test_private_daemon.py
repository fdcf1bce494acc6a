"""A private daemon (autostart=True): found, started, shared, and ended, by real processes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pccheck import (
    PCcheckClient,
    PccheckError,
    PccheckWarning,
    RefusedError,
    WaitTimeoutError,
)
from pccheck.daemon import autostart
from pccheck.daemon.autostart import PrivateDaemon
from pccheck.integrations import dcp
from pccheck_native import layout
from pccheck_store.directory import Storage
from pccheck_store.jobs import find_source
from tests.support import live
from tests.support.daemon import Daemon
from tests.support.programs import script
from tests.support.waiting import until

#: A mount namespace of its own, with another directory at a place.
MOUNTS = """
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "--bind", {disk!r}, {place!r}], check=True)
"""
KILL = "import os; os.kill(os.getpid(), 9)"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Never started: its directories are used."""
    with Daemon() as place:
        (place.root / "r").mkdir(mode=0o700)
        yield place


def daemon_of(storage: Path) -> int:
    """The pid of the directory's daemon, of the last daemon if none runs."""
    return int(layout.lock_path(storage).read_text())


SCRIPT = """
import torch
from pccheck import PCcheckClient
client = PCcheckClient(job="auto", autostart=True, storage={storage!r})
done = client.recover()
print(done.step, flush=True)
client.checkpoint([torch.ones(1000)], step=done.step + 1).wait_durable(60)
{end}
"""


def run(storage: Path, end: str, runtime: Path) -> list[str]:
    """Runs SCRIPT; returns the step that it restores."""
    environment = {"XDG_RUNTIME_DIR": str(runtime), "CUDA_VISIBLE_DEVICES": "3"}
    with script(SCRIPT.format(storage=str(storage), end=end), environment=environment) as program:
        said = program.finish()
        assert program.returncode in (0, -9), said
    assert "started a private" not in said or f"socket {runtime}/" in said
    return list(filter(str.isdigit, said.splitlines()))


def test_autostart(daemon: Daemon) -> None:
    """A private daemon outlives a crash and ends with an orderly close."""
    storage, runtime = daemon.root / "private", daemon.root / "r"
    kill = "import os; os.kill(os.getpid(), 9)"
    assert run(storage, kill, runtime) == ["0"]
    pid = daemon_of(storage)
    os.kill(pid, 0)
    # Ranks that come later have other GPUs.
    assert b"CUDA_VISIBLE_DEVICES" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert run(storage, "", runtime) == ["1"]
    assert pid == daemon_of(storage)
    ended(pid)
    assert run(storage, "client.close()", runtime) == ["2"]


def test_begins_anew_when_its_directory_was_removed(daemon: Daemon) -> None:
    """While the private daemon runs, and also while the trainer runs."""
    storage, runtime = daemon.root / "private", daemon.root / "r"
    assert run(storage, "import os; os.kill(os.getpid(), 9)", runtime) == ["0"]
    pid = daemon_of(storage)
    live.remove(storage)
    end = f"import shutil; shutil.rmtree({str(storage)!r}, ignore_errors=True); client.close()"
    assert run(storage, end, runtime) == ["0"]
    ended(pid)
    assert run(storage, "client.close()", runtime) == ["0"]


DIES_WHILE_IT_WAITS = """
import os
from pccheck import PCcheckClient
from pccheck.daemon import autostart
from pccheck.daemon.autostart import PrivateDaemon
serves = autostart._serves
autostart._serves = lambda *asked: serves(*asked) if serves(*asked) is None else os._exit(0)
PCcheckClient(job="job", autostart=True, storage={storage!r})
"""


def test_ends_a_daemon_whose_starter_was_killed_early(daemon: Daemon) -> None:
    """The daemon answers, but the process that started it has not noticed that yet."""
    storage, runtime = daemon.root / "private", daemon.root / "r"
    text, environment = (
        DIES_WHILE_IT_WAITS.format(storage=str(storage)),
        {"XDG_RUNTIME_DIR": str(runtime)},
    )
    with script(text, environment=environment) as program:
        assert program.wait(800) == 0
    pid = daemon_of(storage)
    assert _alive(pid)
    try:
        assert run(storage, "client.close()", runtime) == ["0"]
        ended(pid)
    finally:
        if _alive(pid):
            os.kill(pid, signal.SIGTERM)


INTERRUPTED = """
import signal, subprocess
from pccheck import PCcheckClient

class Process(subprocess.Popen):
    asked = False

    def poll(self):
        if not self.asked:
            self.asked = True
            print("pid", self.pid, flush=True)
            signal.raise_signal(signal.SIGINT)
        return super().poll()

subprocess.Popen = Process
PCcheckClient(job="job", autostart=True, storage={storage!r})
"""


def test_ctrl_c_ends_a_daemon_that_does_not_listen_yet(daemon: Daemon) -> None:
    """Before, the daemon ran until the next run on the directory ended."""
    text = INTERRUPTED.format(storage=str(daemon.root / "private"))
    with script(text, environment={"XDG_RUNTIME_DIR": str(daemon.root / "r")}) as program:
        said = program.finish()
        assert "KeyboardInterrupt" in said
    [pid] = [int(line.split()[1]) for line in said.splitlines() if line.startswith("pid ")]
    try:
        ended(pid)
    finally:
        if _alive(pid):
            os.kill(pid, signal.SIGTERM)


def test_a_trainer_that_blocks_signals_does_not_block_those_of_its_daemon(daemon: Daemon) -> None:
    """Before, only SIGKILL ended the daemon, and each close() waited 10 s for its end."""
    storage, runtime = daemon.root / "private", daemon.root / "r"
    block = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    text = block + SCRIPT.format(storage=str(storage), end="")
    with script(text, environment={"XDG_RUNTIME_DIR": str(runtime)}) as program:
        said = program.finish()
        assert program.returncode == 0, said
    pid = daemon_of(storage)
    try:
        ended(pid)
    finally:
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)


def ended(pid: int) -> None:
    until(lambda: not _alive(pid), every_s=0.1)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_finds_its_daemon_when_xdg_runtime_dir_has_changed(daemon: Daemon) -> None:
    storage = daemon.root / "private"
    first, second = daemon.root / "r1", daemon.root / "r2"
    first.mkdir(mode=0o700)
    second.mkdir(mode=0o700)
    kill = "import os; os.kill(os.getpid(), 9)"
    assert run(storage, kill, first) == ["0"]
    pid = daemon_of(storage)
    assert run(storage, kill, second) == ["1"]
    assert daemon_of(storage) == pid and _alive(pid)  # no second daemon was started
    ran = subprocess.run(
        [sys.executable, "-m", "pccheckctl", "--storage", str(storage), "--json", "status"],
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert json.loads(ran.stdout)["daemon"]["pid"] == pid, ran.stderr
    assert run(storage, "client.close()", second) == ["2"]  # ends it, too
    ended(pid)
    assert not (storage / layout.SOCKET_NAME).exists()
    assert run(storage, "client.close()", second) == ["3"]


def test_dcp_reads_through_the_daemon_that_was_found(daemon: Daemon) -> None:
    """Its socket is not where this process would make one."""
    storage, other = daemon.root / "private", daemon.root / "r2"
    other.mkdir(mode=0o700)
    assert run(storage, KILL, daemon.root / "r") == ["0"]
    with private(storage, other) as client:
        dcp.async_save({"x": torch.ones(9)}, client=client, step=1).result(60)
        state = {"x": torch.zeros(9)}
        dcp.load(state, client=client)
        assert state["x"].sum() == 9


def test_the_daemon_of_autostart_sees_every_gpu_and_bounds_its_log(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    runtime = daemon.root / "r"
    run(daemon.root / "private", "import os; os.kill(os.getpid(), 9)", runtime)
    pid = daemon_of(daemon.root / "private")
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    os.kill(pid, signal.SIGTERM)
    assert not any(one.startswith(b"CUDA_VISIBLE_DEVICES=") for one in environ)
    assert any(one.startswith(b"PCCHECKD_LOG_BYTES=") for one in environ)


def test_memory_only_checkpoints_end_with_it_and_that_is_said(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemon.root / "r"))
    storage, model = daemon.root / "private", torch.nn.Linear(2, 2)
    with PCcheckClient("auto", autostart=True, storage=storage, durable_every="auto") as client:
        with pytest.warns(PccheckWarning, match=r"end with the private pccheckd.*service") as told:
            client.attach(model=model)
            client.attach(other=torch.nn.Linear(2, 2))
        assert len(told) == 1
        client.checkpoint(step=1).wait_copied(60)
    ended(daemon_of(storage))
    with PCcheckClient("auto", autostart=True, storage=storage) as client:
        assert [one.step for one in client.steps()] == [1]


def test_says_who_holds_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autostart, "_LOCK_LIMIT_S", 0.0)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with (tmp_path / ".pccheckd.starting").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WaitTimeoutError, match="another process has held"):
            PCcheckClient(job="x", autostart=True, storage=tmp_path, on_error="raise")


def test_needs_a_parent_directory(tmp_path: Path) -> None:
    with pytest.raises(PccheckError, match="storage directory"), warnings.catch_warnings():
        PCcheckClient(
            job="x", autostart=True, storage=tmp_path / "not" / "mounted", on_error="raise"
        )


CLIENTS = """
import torch
from pccheck import PCcheckClient
for number in range(6):
    client = PCcheckClient(job=f"sweep-{{number}}", autostart=True, storage={storage!r})
    handles = [client.checkpoint([torch.ones(1000)], step=step) for step in (1, 2)]
    handles[-1].wait_durable(60)
    client.close()
    client.close(done=True)
    print([handle.state.name for handle in handles if handle.state.name == "FAILED"])
"""


def test_clients_of_a_private_daemon_follow_each_other(daemon: Daemon) -> None:
    """The next client connects while the daemon ends, because the previous client was its last."""
    storage, runtime = daemon.root / "private", daemon.root / "r"
    text, environment = CLIENTS.format(storage=str(storage)), {"XDG_RUNTIME_DIR": str(runtime)}
    with script(text, environment=environment) as program:
        said = program.finish()
        assert program.returncode == 0, said
    assert said.splitlines().count("[]") == 6, said


KILLED = """
import os, signal, time
import torch
from pccheck import PCcheckClient
client = PCcheckClient(job="auto", autostart=True, storage={storage!r})
client.checkpoint([torch.ones(1000)], step=1).wait_durable(60)
os.kill(client._session.require().welcome.pid, signal.SIGKILL)
deadline, state = time.monotonic() + 100, ""
while state not in ("durable", "global") and time.monotonic() < deadline:
    handle = client.checkpoint([torch.ones(1000)], step=2)
    handle.exception(60)
    state = str(handle.state)
    time.sleep(0.05)
print(state)
client.close()
"""


def test_a_private_daemon_that_was_killed_is_started_again(daemon: Daemon) -> None:
    """The trainer starts a new daemon at one of its next checkpoints; that daemon ends with the
    trainer."""
    storage, runtime = daemon.root / "private", daemon.root / "r"
    text, environment = KILLED.format(storage=str(storage)), {"XDG_RUNTIME_DIR": str(runtime)}
    with script(text, environment=environment) as program:
        said = program.finish()
        assert (program.returncode, said.splitlines()[-1]) == (0, "durable"), said
    ended(daemon_of(storage))


# -- whose daemon it is ----------------------------------------------------------------------------


def test_a_copy_of_a_directory_gets_a_daemon_of_its_own(daemon: Daemon) -> None:
    """The copy contains the file that names the daemon of the first directory, which still runs."""
    first, copy, runtime = daemon.root / "first", daemon.root / "copy", daemon.root / "r"
    assert run(first, KILL, runtime) == ["0"]
    live.copy(first, copy)
    assert layout.noted_socket(copy) == layout.noted_socket(first)
    assert isinstance(find_source(copy, None), Storage)
    assert not isinstance(find_source(first, None), Storage)
    assert run(copy, KILL, runtime) == ["1"]
    assert run(copy, "client.close()", runtime) == ["2"]
    assert run(first, "client.close()", runtime) == ["1"]


def test_a_directory_that_was_moved_gets_another_daemon(daemon: Daemon) -> None:
    first, moved, runtime = daemon.root / "first", daemon.root / "moved", daemon.root / "r"
    assert run(first, KILL, runtime) == ["0"]
    before = daemon_of(first)
    first.rename(moved)
    assert run(moved, KILL, runtime) == ["1"]
    assert not _alive(before) and daemon_of(moved) != before
    assert run(moved, "client.close()", runtime) == ["2"]


def test_one_path_in_two_containers_is_two_directories(daemon: Daemon) -> None:
    """The containers share the runtime directory, but have different file systems at the path."""
    runtime, path = daemon.root / "r", daemon.root / "ckpt"
    path.mkdir()
    found = []
    for inside in ("one", "two", "one", "two"):
        (daemon.root / inside).mkdir(exist_ok=True)
        text = MOUNTS.format(disk=str(daemon.root / inside), place=str(path))
        text += SCRIPT.format(storage=str(path), end=KILL)
        with script(text, environment={"XDG_RUNTIME_DIR": str(runtime)}) as program:
            said = program.finish()
            if program.returncode != -signal.SIGKILL:
                pytest.skip(f"no mount namespace here: {said[-200:]}")
        found.append(list(filter(str.isdigit, said.splitlines())))
    assert found == [["0"], ["0"], ["1"], ["1"]]
    for inside in ("one", "two"):
        os.kill(daemon_of(daemon.root / inside), signal.SIGTERM)


def test_checkpoints_of_another_uid_are_not_passed_over(daemon: Daemon) -> None:
    """A directory that was copied with chown, or is used by another uid in a container."""
    storage, runtime = daemon.root / "private", daemon.root / "r"
    assert run(storage, "client.close()", runtime) == ["0"]
    (storage / str(os.getuid())).rename(storage / "12345")
    with pytest.raises(RefusedError, match="of uid 12345"), private(storage, runtime) as client:
        client.recover()


# -- when it ends ----------------------------------------------------------------------------------

STAYS = """
import sys
import torch
from pccheck import PCcheckClient
client = PCcheckClient(job="stays", autostart=True, storage=sys.argv[1], on_error="raise")
for step, line in enumerate(sys.stdin, 1):
    print(client.checkpoint([torch.ones(1000)], step=step).wait_durable(60).step, flush=True)
"""


def test_a_daemon_with_a_trainer_is_not_ended_by_a_process_that_cannot_connect(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, each with its own /tmp, use one directory."""
    storage, runtime, other = daemon.root / "private", daemon.root / "r", daemon.root / "r2"
    other.mkdir(mode=0o700)
    monkeypatch.setattr(autostart, "_END_LIMIT_S", 0.5)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", STAYS, str(storage)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)},
    ) as trainer:  # fmt: skip
        assert trainer.stdin is not None and trainer.stdout is not None
        for step in (1, 2, 3):
            print(file=trainer.stdin, flush=True)
            assert trainer.stdout.readline() == f"{step}\n"
            socket = layout.noted_socket(storage)
            if socket is not None:
                socket.unlink()  # from here on no process can connect to it
            else:
                with pytest.raises(PccheckError, match="for another training process"):
                    private(storage, other)
        pid = daemon_of(storage)
        assert _alive(pid)
        trainer.stdin.close()
        assert trainer.wait(800) == 0
    ended(pid)


PREEMPTED = """
import os, signal, sys
import torch
from pccheck import PCcheckClient
with PCcheckClient(job="auto", autostart=True, storage=sys.argv[1]) as client:
    client.stop_on(signal.SIGTERM)
    client.checkpoint([torch.ones(1000)], step=1).wait_durable(60)
    os.kill(client._session.require().welcome.pid, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert client.should_stop()
    client.checkpoint([torch.ones(1000)], step=2)
    print("durable", client.flush().step)
"""


def test_sigterm_to_a_whole_job_step_loses_no_last_checkpoint(daemon: Daemon) -> None:
    """The signal reaches the trainer and its private daemon at once."""
    storage, environment = daemon.root / "private", {"XDG_RUNTIME_DIR": str(daemon.root / "r")}
    with script(PREEMPTED, storage, environment=environment) as program:
        said = program.finish()
        assert program.returncode == 0 and "durable 2" in said, said
    ended(daemon_of(storage))
    assert run(storage, "client.close()", daemon.root / "r") == ["2"]


def test_it_is_started_again_when_its_runtime_directory_has_gone(daemon: Daemon) -> None:
    """A logout removes XDG_RUNTIME_DIR, and a user cannot make it again."""
    storage, runtime, spare = daemon.root / "private", daemon.root / "r", daemon.root / "tmp"
    spare.mkdir()
    text = KILLED.replace(
        "os.kill(", f"import shutil; shutil.rmtree({str(runtime)!r})\nos.kill(", 1
    )
    environment = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(spare)}
    with script(text.format(storage=str(storage)), environment=environment) as program:
        said = program.finish()
        assert (program.returncode, said.splitlines()[-1]) == (0, "durable"), said
    ended(daemon_of(storage))


MANY_FILES = """
import os, resource, shutil, sys
import torch
from pccheck import PCcheckClient
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
clients = []
for job in ("one", "two"):
    client = PCcheckClient(job=job, autostart=True, storage=sys.argv[1], on_error="raise")
    client.checkpoint([torch.ones(1000)], step=1).wait_durable(60)
    assert client.recover().step == 1
    shutil.rmtree(sys.argv[2])
    os.environ["XDG_RUNTIME_DIR"] = sys.argv[3]
    if sys.argv[4] == "close" or job == "two":
        pid = client._session.require().welcome.pid
        client.close()
        assert os.waitpid(pid, os.WNOHANG)[0] == pid, "the daemon outlives its last client"
        break
    client._session.close()  # the daemon has no trainer, and cannot be reached
    sys.argv[2] = sys.argv[3]
print("done")
"""


@pytest.mark.parametrize("then", ["close", "another"])
def test_its_end_is_awaited_by_a_process_with_1500_files(daemon: Daemon, then: str) -> None:
    """Its runtime directory has gone; then its client is closed, or another one is made."""
    storage, runtime, spare = daemon.root / "private", daemon.root / "r", daemon.root / "r2"
    spare.mkdir(mode=0o700)
    environment = {"XDG_RUNTIME_DIR": str(runtime)}
    with script(MANY_FILES, storage, runtime, spare, then, environment=environment) as program:
        said = program.finish()
        assert (program.returncode, said.splitlines()[-1:]) == (0, ["done"]), said


def test_its_socket_is_elsewhere_where_the_directory_named_does_not_do(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one is another directory for the daemon, and below the long one of a batch system
    the path of a socket is too long."""
    monkeypatch.chdir(daemon.root)
    long = daemon.root / "slurm_job.12345678.node-0123456789"
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name, runtime in (("one", Path("r")), ("two", Path())):
        with private(daemon.root / name, runtime) as client:
            assert client.recover().step == 0
            socket = layout.noted_socket(daemon.root / name)
        assert socket is not None and not socket.is_relative_to(daemon.root)
        shutil.rmtree(socket.parent)


def test_training_continues_where_the_daemon_has_no_place_for_its_socket(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user can have made a directory in /tmp first."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(daemon.root))
    place = daemon.root / f"pccheck-{os.getuid()}"
    place.mkdir(mode=0o755)
    with pytest.warns(PccheckWarning, match="WITHOUT checkpoints.* other users can read it"):
        client = PCcheckClient(job="auto", autostart=True, storage=daemon.root / "private")
    handle = client.checkpoint([torch.ones(1000)], step=1)
    assert "other users can read it" in str(handle.exception(60))
    place.chmod(0o700)
    client.recover()
    client.checkpoint([torch.ones(1000)], step=2).wait_durable(60)
    client.close()


# -- the lock under which it is found, started or ended --------------------------------------------


def test_other_users_cannot_hold_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".pccheckd.starting"
    lock.touch(0o644)
    with PrivateDaemon(tmp_path)._locked():
        assert lock.stat().st_mode & 0o777 == 0o600


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".pccheckd.starting").symlink_to(tmp_path / "target")
    with pytest.raises(PccheckError, match="cannot open"), PrivateDaemon(tmp_path)._locked():
        pass
    assert not (tmp_path / "target").exists()


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a DataLoader, while a thread of the client starts the daemon again."""
    monkeypatch.setattr(autostart, "_LOCK_LIMIT_S", 0.0)
    daemon = PrivateDaemon(tmp_path)
    with daemon._locked():
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with daemon._locked():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def private(storage: Path, runtime: Path) -> PCcheckClient:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        return PCcheckClient(job="auto", autostart=True, storage=storage, on_error="raise")
