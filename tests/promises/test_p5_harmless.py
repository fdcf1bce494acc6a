"""P5, harmless: faults of the daemon, the disk or the process neither hang nor end the training,
nor make every checkpoint wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck import PCcheckClient
from pccheck_wire.messages import ListVolumes, Report
from tests.support import live, programs, sandbox
from tests.support.daemon import Daemon, Start
from tests.support.programs import Program
from tests.support.trainer import Commands, Trainer
from tests.support.waiting import PATIENCE, suspend, until

LIMIT_S = 280.0
STALL_LIMIT_S = 2.0 * PATIENCE
LONELY = 61234  #: a uid with no process but the test's
ROOT = Path(__file__).parents[2]

#: The first lines of every script.
SCRIPT = """
import os, signal, sys, time, warnings
import torch
from pccheck import PCcheckClient
warnings.simplefilter("ignore")
model = torch.nn.Linear(300, 300)

def save(client, *state, **options):
    # Until a connect has ended that takes longer than training waits for it.
    end = time.monotonic() + 120
    while client.checkpoint(*state, **options).exception(60) is not None:
        assert time.monotonic() < end
        time.sleep(0.05)
"""


#: The first one of a process takes seconds: it loads torch's compiler.
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters())\n"


def script(text: str, *words: object) -> Program:
    return programs.script(SCRIPT + OPTIMIZER + text, *words)


def told(running: Program) -> str:
    said = running.finish()
    assert running.returncode == 0, (running.returncode, said)
    return said


def interpreter(text: str, *words: object) -> str:
    """Runs a script in a new interpreter, where the start or the end of Python matters; returns
    what it prints."""
    command = [sys.executable, "-c", SCRIPT + OPTIMIZER + text, *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    return ran.stdout


FILES = """
import resource
top = max(int(name) for name in os.listdir("/proc/self/fd"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for spare in range(1, 40):
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1 + spare, hard))
    client = PCcheckClient(job="job", socket=sys.argv[1], stall_limit_s=5)
    for _ in range(3):
        client._session._next_try_s = 0.0  # as if the back-off were over
        client.checkpoint([1])
    client.close()
    del client
resource.setrlimit(resource.RLIMIT_NOFILE, (top + 200, hard))
before = len(os.listdir("/proc/self/fd"))
with PCcheckClient(job="job", socket=sys.argv[1]) as client:
    client.checkpoint([1]).wait_durable(60)
print("trained", len(os.listdir("/proc/self/fd")) - top < 20)
"""


def test_a_process_without_files_left_trains_on(daemon: Daemon) -> None:
    """libzmq would abort the process. A failed attempt to connect must not use up the last
    descriptors."""
    with script(FILES, daemon.socket) as running:
        # A connection that succeeds after a failed attempt is logged before this line.
        assert told(running).splitlines()[-1] == "trained True"


THREADS = """
import resource, threading
torch.set_num_threads(1)
os.setgroups([])
os.setresuid(int(sys.argv[2]), int(sys.argv[2]), int(sys.argv[2]))
client = PCcheckClient(job="job", socket=sys.argv[1], stall_limit_s=5)
client.checkpoint([1])  # imports what it needs, and finds no daemon
running = len(os.listdir("/proc/self/task"))
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
os.symlink(sys.argv[3], sys.argv[1])
for spare in range(6):  # other processes of this user may take some of them
    resource.setrlimit(resource.RLIMIT_NPROC, (running + spare, hard))
    client._session._next_try_s = 0.0  # as if the back-off were over
    client.checkpoint([1])
    client.close()
    client = PCcheckClient(job="job", socket=sys.argv[1], stall_limit_s=5)
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
client._session._next_try_s = 0.0
save(client, [1])
client.close()
print("trained")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without processes")
def test_a_process_without_threads_left_trains_on(daemon: Daemon) -> None:
    """libzmq would abort the process."""
    daemon.open_to_everybody()
    with tempfile.TemporaryDirectory(prefix="pcc-") as root:
        os.chown(root, LONELY, LONELY)
        with script(THREADS, Path(root) / "late.sock", LONELY, daemon.socket) as running:
            assert told(running).splitlines()[-1] == "trained"


SPACE = """
import resource
from pccheck import PccheckError
client = PCcheckClient(job="job", socket=sys.argv[1], stall_limit_s=5)
client.attach(model=model, optimizer=optimizer)
client.restore()
size = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
limit = int(size.split()[1]) * 1024 + (6 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
for step in range(1, 6):
    try:
        client.checkpoint(step=step).wait_durable(60)
    except PccheckError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
client._session._next_try_s = 0.0  # as if the back-off were over
save(client, step=6)
print("trained")
"""


def test_a_process_without_address_space_is_told_so(start_daemon: Start) -> None:
    """The daemon runs, and another daemon would not help."""
    daemon = start_daemon("--chunk", "16MiB", "--dram", "128MiB")
    with script(SPACE, daemon.socket) as running:
        said = told(running)
    assert said.splitlines()[-1] == "trained"
    assert "cannot map the daemon's memory: Cannot allocate memory (raise the limit" in said
    assert "has ended" not in said, said


SANDBOX = """
from tests.support.sandbox import forbid
forbid(int(sys.argv[2]))
client = PCcheckClient(job="job", socket=sys.argv[1], stall_limit_s=5)
client.attach(model=model, optimizer=optimizer)
print(client.checkpoint(step=1).reason)
print("trained")
"""


@pytest.mark.parametrize("call", ["sched_setscheduler", "sched_getparam"])
def test_a_process_whose_sandbox_would_end_it_is_told_so(start_daemon: Start, call: str) -> None:
    """libzmq would abort the process."""
    number = sandbox.numbers().get(call)
    if number is None:
        pytest.skip("no header with the numbers of the system calls")
    daemon = start_daemon()
    with script(SANDBOX, daemon.socket, number) as running:
        said = told(running)
    assert said.splitlines()[-1] == "trained"
    assert "may not set the scheduling policy of its threads (Operation not permitted)" in said


REPLACED = """
client = PCcheckClient(job="job", socket=sys.argv[1], on_error="raise", gate="manual")
client.attach(model=model)
done = client.restore()
step = done.step if done else 0
if step < 2:
    client.checkpoint(step=step + 1).wait_durable(60)
    client.checkpoint(step=step + 1)  # on its way
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], *sys.argv[1:]])
print("at", step, sorted(int(name) for name in os.listdir("/proc/self/fd"))[-1] < 24)
"""


@pytest.mark.long
def test_a_process_that_replaces_itself_goes_on_where_it_was(daemon: Daemon) -> None:
    """exec keeps the process id, and closes the client's descriptors."""
    text = SCRIPT + REPLACED
    with script(REPLACED, daemon.socket, text) as running:
        assert told(running).splitlines()[-1] == "at 2 True"


WORKERS = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 300))
loader = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
client = PCcheckClient(job="job", socket=sys.argv[1], on_error="raise")
client.attach(model=model, optimizer=optimizer)
step = 0
for epoch in range(3):
    for (batch,) in loader:
        step += 1
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        handle = client.checkpoint(step=step)
handle.wait_durable(60)
if sys.argv[2] == "workers":
    (again,) = [DataLoader(data, batch_size=8, num_workers=2)]
    next(iter(again))
    client.close()
print("trained", client._step)
"""


@pytest.mark.parametrize("end", ["workers", "nothing"])
def test_workers_that_are_forked_from_a_trainer_do_nothing_of_ours(
    daemon: Daemon, end: str
) -> None:
    """Workers live for several epochs, and the interpreter may end without close()."""
    assert interpreter(WORKERS, daemon.socket, end) == "trained 24\n"
    with PCcheckClient(job="job", socket=daemon.socket, on_error="raise") as client:
        assert client.recover().step == 24  # no other trainer has taken its session


TERMINATED = """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
client = PCcheckClient(job="job", socket=sys.argv[1], on_error="raise")
client.attach(model=model, optimizer=optimizer)
print("ready", flush=True)
step = 0
while not asked:
    optimizer.zero_grad()
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
    step += 1
print(step, client.checkpoint(step=step).wait_durable(60).step)
client.close()
"""


@pytest.mark.long
def test_every_sigterm_gets_its_checkpoint(daemon: Daemon) -> None:
    """As the README has it: the handler sets a flag."""
    for _ in range(3):
        with script(TERMINATED, daemon.socket) as running:
            assert running.line() == "ready\n"
            running.terminate()
            step, durable = told(running).split()
        with PCcheckClient(job="job", socket=daemon.socket) as client:
            assert client.recover().step == int(step) == int(durable)


REMOVED = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
client = PCcheckClient(job="job", socket=sys.argv[1], stall_limit_s=float(sys.argv[2]))
client.attach(model=model, optimizer=optimizer)
for step in range(110):
    if step == 10:
        print("ready", flush=True)
        signal.sigwait([signal.SIGUSR1])
    optimizer.step()
    client.checkpoint(step=step)
print("trained")
"""


@pytest.mark.parametrize("what", ["endpoints", "all"])
@pytest.mark.parametrize("killed", [False, True])
def test_sockets_that_are_removed_while_it_runs_cost_next_to_nothing(
    daemon: Daemon, what: str, killed: bool
) -> None:
    """As a clean-up of /tmp does. If the daemon is killed as well, no client can reconnect."""
    with script(REMOVED, daemon.socket, 2.0) as running:
        assert running.line() == "ready\n"
        for path in daemon.socket.parent.glob("ctl-*"):
            live.remove(path)
        if what == "all":
            live.remove(daemon.socket.parent)
        if killed:
            daemon.kill()
        os.kill(running.pid, signal.SIGUSR1)
        assert told(running) == "trained\n"


def test_training_goes_on_without_the_daemon(daemon: Daemon, trainer: Trainer) -> None:
    """P5: the daemon is SIGKILLed under load; one warning, and a reconnect when it is back."""
    trainer.save()
    trainer.step()
    trainer.checkpoint()
    daemon.kill()
    for _ in range(20):
        trainer.step()
        trainer.checkpoint()
    told = [w for w in trainer.warnings if "pccheckd" in w]
    assert len(told) == 1, trainer.warnings
    daemon.start()
    durable = trainer.wait_durable(trainer.connects_again())
    assert durable in ("durable", "global", "superseded")


def copied_in_a_step(commands: Commands) -> bool:
    commands.checkpoint()
    commands.native.send(("durable", 1))  # it begins now
    commands.step()  # its gate waits for the copy
    return commands.wait_durable(-1) == "durable"


def answered(commands: Commands) -> bool:
    connection = commands.client._session.current()
    assert connection is not None
    commands.native.send(("durable", 1))
    return isinstance(connection.request(ListVolumes(), timeout_s=STALL_LIMIT_S), Report)


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("work", [copied_in_a_step, answered])
def test_the_time_for_which_the_trainer_is_stopped_is_no_stall(
    daemon: Daemon, trainer: Trainer, work: Callable[[Commands], bool]
) -> None:
    """A batch system suspends a job, with or without its daemon."""
    trainer.save()
    trainer.step()
    trainer.shorten(STALL_LIMIT_S)
    daemon.kill(signal.SIGSTOP)
    try:
        trainer.post("evaluate", work)
        trainer.wait_for_durable(1)
        until(lambda: sleeps(trainer.pid))
        suspend(trainer.pid)
        ends = time.monotonic() + STALL_LIMIT_S + 1
        until(lambda: time.monotonic() > ends)
        os.kill(trainer.pid, signal.SIGCONT)
    finally:
        daemon.kill(signal.SIGCONT)
    assert trainer.answer()
    assert trainer.warnings == []


def test_no_daemon_at_all_warns_and_trains_on(stack: object) -> None:
    with Daemon() as daemon, Trainer() as trainer:
        trainer.open([1000], socket=str(daemon.socket), job="job")
        for _ in range(3):
            trainer.step()
            trainer.checkpoint()
        assert set(trainer.states()) == {"failed"}
        (warning,) = trainer.warnings
        assert "pccheckd --storage" in warning
