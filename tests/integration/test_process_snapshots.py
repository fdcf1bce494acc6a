"""Snapshots of processes that know nothing of them, with the real CRIU, daemon and commands."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccheck import RefusedError, UsageError, snapshot
from pccheck_native import layout
from pccheck_store.directory import Storage
from tests.support import criu
from tests.support.as_user import everybody_enters
from tests.support.counting import Commands, Counter, end, state_of
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, RemoteError
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(
    bool(criu.missing()) or os.geteuid() != 0, reason=criu.missing() or "needs root"
)


@pytest.fixture
def daemon(start_daemon: Start) -> Daemon:
    return start_daemon("--dram", "256MiB", "--chunk", "1MiB")


@pytest.fixture
def commands(daemon: Daemon) -> Commands:
    return Commands(daemon)


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Counter]:
    made = Counter(tmp_path)
    yield made
    made.kill()


def counts_on(counter: Counter) -> None:
    """It was let go: it is not stopped, and counts."""
    counter.moves()
    assert state_of(counter.pid) in ("R", "S")


def in_order(numbers: list[int]) -> bool:
    return numbers == list(range(1, len(numbers) + 1))


# -- what a user does ------------------------------------------------------------------------------


def test_what_has_not_changed_is_written_once(commands: Commands, tmp_path: Path) -> None:
    """Found by checksum: nobody knows what such a process changes."""
    counter = Counter(tmp_path, mib=96)
    for _ in range(2):
        counter.moves()
        told = commands.snapshot(counter.pid, "--leave-running")
    shown = json.loads(commands.run("show", "job", "--step", 2, "--json").stdout)
    assert shown["own_bytes"] < told["bytes"] - (90 << 20)
    counter.kill()
    end(commands.restored(counter))
    assert in_order(counter.numbers)


def test_ended_and_restored(commands: Commands, counter: Counter) -> None:
    told = commands.snapshot(counter.pid)
    assert counter.ended() == -signal.SIGKILL
    assert told["step"] == 1
    assert told["bytes"] > 4 << 20
    assert not told["running"]
    command = commands.restored(counter)
    counter.moves()
    assert os.path.realpath(f"/proc/{counter.pid}/cwd") == os.path.realpath(counter.log.parent)
    assert end(command) == 128 + signal.SIGTERM
    assert in_order(counter.numbers)


def test_the_exit_code_comes_back(commands: Commands, tmp_path: Path) -> None:
    setup = """
    class Waits:
        def write(self, text, log=log):
            log.write(text)
            while text == "100\\n" and not os.path.exists(path + ".go"):
                time.sleep(0.005)
    log = Waits()"""
    counter = Counter(tmp_path, last=200, code=7, setup=setup)
    until(lambda: len(counter.numbers) == 100)
    commands.snapshot(counter.pid)
    counter.ended()
    command = commands.start("restore-process", "job")
    (tmp_path / "log.go").touch()
    assert command.wait(60) == 7, commands.errors.read_text()
    assert counter.numbers == [*range(1, 201)]


@pytest.mark.parametrize("mode", ["a", "w", "r+", "w+", "a+"])
def test_goes_on_is_killed_and_restored(commands: Commands, tmp_path: Path, mode: str) -> None:
    """What was written after the snapshot goes into a file beside, and nothing is lost."""
    (tmp_path / "log").touch()
    counter = Counter(tmp_path, mode=mode)
    assert commands.snapshot(counter.pid, "--leave-running")["running"]
    counts_on(counter)
    counter.kill()
    before = counter.numbers
    command = commands.restored(counter)
    end(command)
    kept = counter.log.with_name("log.pccheck-1").read_text().split()
    assert in_order(counter.numbers)
    assert [*map(int, kept)] == before[-len(kept) :]


def test_its_children_come_with_it(commands: Commands, tmp_path: Path) -> None:
    """As the workers of a data loader do: pipes between them, and their own memory."""
    setup = (
        "\n".join([
            "ask, asked = os.pipe(), os.pipe()",
            "    if os.fork() == 0:",
            "        while (got := os.read(ask[0], 8)): os.write(asked[1], got[::-1])",
            "        os._exit(0)",
            "    class Log:",
            "        def write(self, text, log=log):",
            "            os.write(ask[1], text.strip().encode()[:8].ljust(8))",
            "            got = os.read(asked[0], 8)[::-1]",
            "            log.write(got.decode().strip() + chr(10))",
            "    log = Log()",
        ])
    )  # fmt: skip
    counter = Counter(tmp_path, setup=setup)
    refused = commands.run("snapshot", counter.pid, "--name", "job")
    assert refused.returncode == 1
    assert "has child processes" in refused.stderr
    assert "--tree" in refused.stderr
    counts_on(counter)
    commands.snapshot(counter.pid, "--tree")
    counter.ended()
    command = commands.restored(counter)
    counter.moves(20)
    os.killpg(counter.pid, signal.SIGKILL)
    assert command.wait(60) == 128 + signal.SIGKILL
    assert in_order(counter.numbers)


def test_the_daemon_knows_snapshots(commands: Commands, counter: Counter) -> None:
    """As checkpoints of a job of its own: two and their base are kept, and older ones go."""
    for step in (1, 2, 3, 4):
        assert commands.snapshot(counter.pid, "--leave-running")["step"] == step
    listed = commands.run("list").stdout
    assert listed.count("process") == 3
    shown = commands.run("show", "job", "--step", "3").stdout
    assert "process image of step 3" in shown
    assert f"pids       {counter.pid}" in shown
    assert "3 ok, 0 damaged" in commands.run("verify", "job").stdout
    assert "job" in commands.run("status").stdout
    assert "is the image of a process" in commands.run("export", "job", "-o", "x.pt").stderr
    counter.kill()
    assert commands.run("drop", "job", "--yes").returncode == 0
    assert "no process snapshot" in commands.run("restore-process", "job").stderr


def test_its_pids_are_taken(commands: Commands, counter: Counter) -> None:
    """The refusal names who has them; in a namespace they are free."""
    commands.snapshot(counter.pid, "--leave-running")
    refused = commands.run("restore-process", "job")
    assert refused.returncode == 1
    assert f"its pid {counter.pid} is taken by process {counter.pid} (python)" in refused.stderr
    assert "--own-pids" in refused.stderr
    counts_on(counter)
    os.kill(counter.pid, signal.SIGSTOP)  # both would count in one file
    written = commands.run("restore-process", "job", "--own-pids").stderr
    assert f"process {counter.pid} writes to {counter.log}" in written
    command = commands.restored(counter, "--own-pids", "--force")
    assert end(command) == 128 + signal.SIGTERM
    assert state_of(counter.pid) == "T"


def test_dry_run_changes_nothing(commands: Commands, counter: Counter) -> None:
    done = commands.run("snapshot", counter.pid, "--dry-run")
    assert done.returncode == 0
    assert "no reason to refuse" in done.stdout
    counts_on(counter)
    assert commands.run("list").stdout == "no checkpoints\n"


def test_output_goes_where_the_user_says(commands: Commands, tmp_path: Path) -> None:
    counter = Counter(tmp_path, setup="print = lambda *_: os.write(1, b'.')")
    writes = Counter(tmp_path / "x", setup="""
    class Twice:
        def write(self, text, log=log):
            log.write(text)
            os.write(1, text.encode())
    log = Twice()""") if (tmp_path / "x").mkdir() is None else counter  # fmt: skip
    counter.kill()
    commands.snapshot(writes.pid)
    writes.ended()
    before = writes.output.read_text()
    command = commands.restored(writes, "--stdout", tmp_path / "again")
    writes.moves()
    end(command)
    assert writes.output.read_text() == before
    assert in_order([*map(int, (before + (tmp_path / "again").read_text()).split())])


# -- never harmed ----------------------------------------------------------------------------------


def test_the_daemon_dies_while_the_target_stands_still(
    commands: Commands, daemon: Daemon, tmp_path: Path
) -> None:
    counter = Counter(tmp_path, mib=300)
    command = commands.start("snapshot", counter.pid, "--name", "job")
    until(lambda: state_of(counter.pid) == "t" or command.poll() is not None)
    daemon.kill()
    assert command.wait(60) != 0
    counts_on(counter)
    counter.kill()
    assert in_order(counter.numbers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_while_the_target_stands_still(
    commands: Commands, tmp_path: Path, number: int
) -> None:
    counter = Counter(tmp_path, mib=300)
    command = commands.start("snapshot", counter.pid, "--name", "job")
    until(lambda: state_of(counter.pid) == "t" or command.poll() is not None)
    command.send_signal(number)
    assert command.wait(60) != 0
    counts_on(counter)
    counter.kill()
    assert in_order(counter.numbers)


def test_a_receiver_that_stands_still_is_ended(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a watchdog beside it."""
    commands.environment["PCC_SNAPSHOT_STALL_S"] = "2"
    counter = Counter(tmp_path, mib=300)
    command = commands.start("snapshot", counter.pid, "--name", "job")
    until(lambda: state_of(counter.pid) == "t" or command.poll() is not None)
    command.send_signal(signal.SIGSTOP)
    assert command.wait(60) == -signal.SIGKILL
    counts_on(counter)
    counter.kill()


@pytest.mark.parametrize("fault", ["eio:data:1", "enospc:data:1", "eio:flush:1", "eio:record-a:1"])
def test_a_disk_that_fails_costs_only_the_snapshot(
    start_daemon: Start, tmp_path: Path, fault: str
) -> None:
    """A failed write moves the image to another slot; a record that fails does not."""
    daemon = start_daemon("--dram", "64MiB", "--chunk", "1MiB", shim=fault)
    commands, counter = Commands(daemon), Counter(tmp_path)
    commands.snapshot(counter.pid, "--leave-running")
    daemon.armed.touch()
    failed = commands.run("snapshot", counter.pid, "--name", "job")
    if failed.returncode == 0:
        assert counter.ended() == -signal.SIGKILL
    else:
        assert "record" in fault
        counts_on(counter)
        counter.kill()
    end(commands.restored(counter))


def test_no_room_for_the_volume_is_said_before_anything_stops(
    start_daemon: Start, counter: Counter
) -> None:
    daemon = start_daemon("--max-storage", "16MiB")
    failed = Commands(daemon).run("snapshot", counter.pid, "--name", "job")
    assert failed.returncode == 1
    assert "max-storage" in failed.stderr
    counts_on(counter)


# -- restoring -------------------------------------------------------------------------------------


def volume_of(daemon: Daemon) -> Path:
    (found,) = layout.list_volumes(daemon.storage)
    return found.path


def test_a_damaged_newest_snapshot_is_passed_over(
    commands: Commands, daemon: Daemon, counter: Counter
) -> None:
    commands.snapshot(counter.pid, "--leave-running")
    counter.moves()
    commands.snapshot(counter.pid)
    counter.ended()
    daemon.stop()
    newest = max(Storage(daemon.storage).held().checkpoints, key=lambda one: one.id.sequence)
    with volume_of(daemon).open("r+b") as file:
        for at in range(0, newest.payload_bytes, 4096):
            file.seek(offset_of(daemon, newest.slot) + at + 100)
            file.write(b"rot")
    daemon.start()
    done = commands.start("restore-process", "job")
    until(lambda: counter.log.with_name("log.pccheck-1").exists() or done.poll() is not None)
    counter.moves()
    end(done)
    assert in_order(counter.numbers)


def offset_of(daemon: Daemon, slot: int) -> int:
    """Where the payload of a slot begins, by FORMAT.md."""
    with volume_of(daemon).open("rb") as file:
        record = file.read(4096)
    stride = int.from_bytes(record[80:88], "little")
    return 2 * stride + slot * int.from_bytes(record[88:96], "little")


def test_a_library_that_changed_is_named_before_a_process_is_made(
    commands: Commands, tmp_path: Path
) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF" + os.urandom(8192))
    setup = (
        "import mmap\n"
        f"    file = open({str(library)!r}, 'rb')\n"
        "    held = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)\n"
        "    file.close()"
    )
    counter = Counter(tmp_path, setup=setup)
    commands.snapshot(counter.pid)
    counter.ended()
    library.write_bytes(b"\x7fELF" + os.urandom(8192))
    refused = commands.run("restore-process", "job")
    assert refused.returncode == 1
    assert f"{library} changed since the snapshot" in refused.stderr
    assert state_of(counter.pid) == ""


def test_a_log_that_was_removed_is_named(commands: Commands, counter: Counter) -> None:
    commands.snapshot(counter.pid)
    counter.ended()
    counter.log.unlink()
    refused = commands.run("restore-process", "job")
    assert refused.returncode == 1
    assert str(counter.log) in refused.stderr
    counter.log.touch()


def test_a_failed_restore_puts_the_logs_back(commands: Commands, counter: Counter) -> None:
    """CRIU fails, because its working directory is another one by then."""
    commands.snapshot(counter.pid, "--leave-running")
    counter.moves()
    counter.kill()
    before = counter.log.read_bytes()
    counter.output.chmod(0o600)
    counter.output.rename(counter.output.with_name("moved"))
    counter.output.mkdir()
    failed = commands.run("restore-process", "job")
    assert failed.returncode == 1
    assert counter.log.read_bytes() == before
    assert not counter.log.with_name("log.pccheck-1").exists()
    assert state_of(counter.pid) == ""


# -- other users -----------------------------------------------------------------------------------


@pytest.mark.skipif(
    not everybody_enters(criu.FOLDER.parent), reason="the user cannot run criu here"
)
def test_root_takes_a_users_process_as_that_user(daemon: Daemon) -> None:
    """The snapshots are the user's, and so is the restored process."""
    daemon.open_to_everybody()
    place = daemon.root / "theirs"
    place.mkdir()
    (place / "output").touch()
    for one in (place, place / "output"):
        os.chown(one, 4242, 4242)
    setpriv = ("setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups")
    counter = Counter(place, prefix=setpriv, python="/usr/bin/python3")
    commands = Commands(daemon)
    commands.snapshot(counter.pid)
    counter.ended()
    (held,) = Storage(daemon.storage).held().checkpoints
    assert held.id.uid == 4242
    command = commands.restored(counter)
    status = Path(f"/proc/{counter.pid}/status").read_text()
    assert "Uid:\t4242\t4242\t4242\t4242" in status
    assert end(command) == 128 + signal.SIGTERM
    assert in_order(counter.numbers)


def test_a_criu_that_is_too_old_is_named(
    commands: Commands, counter: Counter, tmp_path: Path
) -> None:
    old = tmp_path / "criu"
    old.write_text("#!/bin/sh\necho Version: 3.17.1\n")
    old.chmod(0o755)
    commands.environment["PCCHECK_CRIU"] = str(old)
    refused = commands.run("snapshot", counter.pid)
    assert f"{old} is criu 3.17.1, which is too old" in refused.stderr
    assert "criu 4.2" in refused.stderr
    counts_on(counter)


def test_from_python(commands: Commands, counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCHECK_CRIU", commands.environment["PCCHECK_CRIU"])
    socket = str(commands.daemon.socket)
    taken = snapshot(counter.pid, name="job", leave_running=True, socket=socket)
    assert (taken.job, taken.step, taken.running, taken.pid) == ("job", 1, True, counter.pid)
    counts_on(counter)
    with pytest.raises(RefusedError, match="process 1 is the init of this system"):
        snapshot(1, socket=socket)
    with pytest.raises(UsageError, match="cannot save itself"):
        snapshot(os.getpid(), socket=socket)
    with pytest.raises(UsageError, match="there is no process 999999"):
        snapshot(999999, socket=socket)


def test_a_restored_process_is_taken_again(commands: Commands, counter: Counter) -> None:
    """And again: it is a process like any other."""
    commands.snapshot(counter.pid)
    counter.ended()
    for step in (2, 3):
        command = commands.restored(counter)
        assert commands.snapshot(counter.pid)["step"] == step
        assert command.wait(60) == 128 + signal.SIGKILL
    end(commands.restored(counter))
    assert in_order(counter.numbers)


def test_a_name_of_a_training_job_is_refused(
    commands: Commands, counter: Counter, start_trainer: Connect
) -> None:
    """Its checkpoints would be pushed out."""
    trainer = start_trainer(commands.daemon)
    assert trainer.save() == "durable"
    refused = commands.run("snapshot", counter.pid, "--name", "job")
    assert refused.returncode == 2
    assert "job 'job' has checkpoints of tensors" in refused.stderr
    counts_on(counter)
    assert trainer.save() == "durable"


def test_a_name_of_snapshots_is_refused_to_a_training_job(
    commands: Commands, counter: Counter, start_trainer: Connect
) -> None:
    commands.snapshot(counter.pid, "--leave-running")
    with pytest.raises(RemoteError, match="job 'job' has images of processes"):
        start_trainer(commands.daemon).save()
    assert commands.snapshot(counter.pid, "--leave-running")["step"] == 2


def test_checkpoints_of_its_own_are_named_at_the_restore(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that went on after the snapshot has newer checkpoints than a restored one."""
    monkeypatch.setenv("PCCHECK_SOCKET", str(commands.daemon.socket))
    setup = """
    import torch
    from pccheck import PCcheckClient
    client = PCcheckClient("trained")
    class Saves:
        def write(self, text, log=log):
            log.write(text)
            client.checkpoint({"x": torch.full((8,), int(text))}, step=int(text))
    log = Saves()"""
    counter = Counter(tmp_path, setup=setup)
    commands.snapshot(counter.pid, "--leave-running")
    counter.moves()
    trained = "list", "trained", "--json"
    at = len(counter.numbers)
    until(lambda: json.loads(commands.run(*trained).stdout)["checkpoints"][0]["step"] > at)
    counter.kill()
    command = commands.restored(counter)
    assert "job 'trained' has a checkpoint of step" in commands.errors.read_text()
    end(command)
    assert in_order(counter.numbers)


def test_own_pids_and_another_output(commands: Commands, counter: Counter, tmp_path: Path) -> None:
    commands.snapshot(counter.pid)
    counter.ended()
    command = commands.restored(counter, "--own-pids", "--stdout", tmp_path / "again")
    assert end(command) == 128 + signal.SIGTERM
    assert in_order(counter.numbers)


def test_a_directory_that_was_removed_is_refused(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    counter = Counter(tmp_path, setup="os.chdir('gone')\n    os.rmdir('../gone')")
    refused = commands.run("snapshot", counter.pid, "--name", "job")
    assert f"works in {tmp_path / 'gone'}, which was removed" in refused.stderr
    counts_on(counter)
    counter.kill()


def test_a_rotated_log_is_refused(commands: Commands, counter: Counter) -> None:
    commands.snapshot(counter.pid)
    counter.ended()
    counter.log.rename(counter.log.with_name("log.1"))
    counter.log.write_text("x" * 10_000)
    refused = commands.run("restore-process", "job")
    assert f"{counter.log} is another file than at the snapshot" in refused.stderr
    assert counter.log.read_text() == "x" * 10_000
    counter.log.write_text("")
