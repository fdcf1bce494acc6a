"""The daemon under a service manager: its notifications, the sockets and descriptors that it
gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from pccheck_store.observer import Observer
from pccheck_wire.messages import CheckpointState as State
from pccheckctl import cli
from tests.conftest import SMALL
from tests.support.rank import Rank, payload_of
from tests.support.service import Service, listen_at
from tests.support.trainer import Connect

Start = Callable[..., Service]
SIZE = 3_000_000


@pytest.fixture
def make(stack: ExitStack) -> Start:
    """A service that is not started yet."""

    def made(*flags: str, **options: object) -> Service:
        return stack.enter_context(Service(*SMALL, *flags, **options))  # type: ignore[arg-type]

    return made


def test_ready_comes_after_every_record_was_read(make: Start) -> None:
    service = make().start()
    with Rank(service.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
    assert service.stop() == 0
    (volume,) = service.storage.glob("*/*/*.pcc")
    bad = volume.with_name("rank-1.0.pcc")
    bad.write_bytes(bytes(1 << 20))
    service.drain()
    service.start()
    log = service.log.read_text()
    assert f"{bad} cannot be read" in log
    assert log.index("1 volumes with 1 checkpoints") < log.rindex("ready: ")
    assert any(said.startswith("EXTEND_TIMEOUT_USEC=") for said in service.heard)
    said = service.wait_for(lambda said: said.startswith("STATUS="))
    assert said.startswith(f"STATUS=degraded: {bad} cannot be read")


def test_status_says_what_is_going_on(make: Start) -> None:
    service = make("--stall-limit", "0.2").start()
    service.wait_for(lambda said: said.startswith("STATUS=0 trainers, 0 checkpoints in flight"))
    with Rank(service.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        service.wait_for(lambda said: said.startswith("STATUS=1 trainer, 0 ") and "1 made" in said)
    service.wait_for(lambda said: said.startswith("STATUS=0 trainers, 0 "))


def test_the_watchdog_hears_the_loop(make: Start) -> None:
    service = make(watchdog_s=1.0).start()
    for _ in range(3):
        service.wait_for(lambda said: said == "WATCHDOG=1")
    service.kill(signal.SIGSTOP)
    service.drain()
    assert service._listen() == []
    service.kill(signal.SIGCONT)
    service.wait_for(lambda said: said == "WATCHDOG=1")
    assert service.stop() == 0


def test_a_wedged_disk_is_degraded_and_no_reason_to_die(
    make: Start, start_trainer: Connect
) -> None:
    service = make("--stall-limit", "0.5", watchdog_s=1.0, shim="slow:data:3600000000").start()
    service.armed.touch()
    trainer = start_trainer(service)
    trainer.checkpoint()
    said = service.wait_for(lambda said: said.startswith("STATUS=degraded: job 'job' rank 0"))
    assert "the disk has finished nothing for" in said
    service.drain()
    service.wait_for(lambda said: said == "WATCHDOG=1")
    document = service.status()
    assert document["daemon"]["state"] == "degraded"
    assert "stay in memory" in str(document["warnings"])


def test_a_stop_says_how_long_it_still_takes(make: Start, start_trainer: Connect) -> None:
    service = make("--drain-limit", "1", shim="slow:data:3600000000").start()
    service.armed.touch()
    trainer = start_trainer(service)
    trainer.checkpoint()
    service.wait_for(lambda said: said.startswith("STATUS=1 trainer, 1 checkpoint in flight"))
    service.drain()
    service.kill(signal.SIGTERM)
    service.wait_for(lambda said: said.startswith("STATUS=stopping: 1 checkpoint not dur"))
    assert "STOPPING=1" in service.heard
    assert any(said.startswith("EXTEND_TIMEOUT_USEC=") for said in service.heard)
    assert service.wait_end() == 1
    assert "stopped with 1 checkpoints that are not durable" in service.log.read_text()


def test_sighup_takes_over_what_it_can(make: Start) -> None:
    service = make().start()
    service.file.write_text('max-storage = "1MiB"\nslots = 9\n')
    service.kill(signal.SIGHUP)
    service.wait_for(lambda said: said == "READY=1")
    assert "RELOADING=1" in service.heard
    assert any(said.startswith("MONOTONIC_USEC=") for said in service.heard)
    service.wait_log("reload: these options need a restart: slots 4 -> 9")
    with (
        Rank(service.socket) as rank,
        pytest.raises(Exception, match=r"--max-storage 1.00 MiB are used"),
    ):
        rank.register(SIZE)
    service.file.write_text("slots = nine")
    service.kill(signal.SIGHUP)
    service.wait_for(lambda said: said == "READY=1")
    service.wait_log("reload failed, no option changed")
    with Observer(str(service.socket)) as observer:
        rows = {row["name"]: row for row in observer.config()["options"]}  # type: ignore[attr-defined]
    assert rows["max-storage"]["value"] == 1 << 20
    assert rows["slots"]["after_restart"] == "9"


def test_a_reload_that_hangs_does_not_hold_the_end_up(make: Start) -> None:
    """Reading a pipe waits for a writer, as reading a file waits for a dead file server."""
    service = make().start()
    service.file.unlink()
    os.mkfifo(service.file)
    service.kill(signal.SIGHUP)
    service.wait_for(lambda said: said == "RELOADING=1")
    service.kill(signal.SIGTERM)
    assert service.wait_end() == 0


def test_sighup_limits_what_is_open(make: Start) -> None:
    """At a KiB per second the checkpoint would take an hour. So would its first chunks after the
    limit was raised, if the waiting threads were not told."""
    service = make().start()

    def limit(text: str) -> int:
        service.file.write_text(text)
        service.kill(signal.SIGHUP)
        service.wait_for(lambda said: said == "READY=1")
        (shown,) = service.status()["ranks"]
        limited: int = shown["volume"]["max_bandwidth_bytes"]
        return limited

    with Rank(service.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        assert limit("") == 0
        assert limit('max-bandwidth = "1KiB"') == 1024
        snapshot = rank.begin(2, payload_of(2, SIZE))
        assert rank.wait(snapshot, copied=True).outcome != State.DURABLE
        assert limit("") == 0
        assert rank.wait(snapshot).outcome == State.DURABLE


def test_config_show_asks_the_daemon(make: Start, capsys: pytest.CaptureFixture[str]) -> None:
    service = make()
    service.file.write_text("writers = 3\n")
    service.start()
    flags = ["--socket", str(service.socket)]
    assert cli.main([*flags, "config", "show", "--origin"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["file", str(service.file)] in lines
    assert ["writers", "3", str(service.file)] in lines
    assert ["chunk", "1MiB", "--chunk"] in lines
    assert ["keep", "2", "default"] in lines
    assert ["block-bytes", "64KiB", "--block-bytes"] in lines, "hidden, but given"
    assert cli.main([*flags, "config", "show", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["source"], document["daemon"]["pid"]) == ("daemon", service.pid)


def test_config_show_without_a_daemon_says_what_one_would_use(make: Start) -> None:
    service = make()
    service.file.write_text(f'storage = "{service.storage}"\nwriters = 3\n')

    def show(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pccheckctl", "--socket", str(service.socket), "config", "show",
             "--origin", *more],
            capture_output=True, text=True, env=service.environment(), check=False,
        )  # fmt: skip

    done = show()
    assert done.returncode == 0, done.stderr
    assert "no daemon listens" in done.stderr and "started from this shell" in done.stderr
    assert ["writers", "3", str(service.file)] in [line.split() for line in done.stdout.split("\n")]
    service.file.write_text("writer = 3\n")
    done = show("--json")
    assert done.returncode == 2
    assert "did you mean 'writers'" in json.loads(done.stdout)["error"]["message"]


def test_the_managers_socket_is_served_and_left_to_him(make: Start) -> None:
    service = make()
    with listen_at(service.socket) as listener:
        service.start(listener=listener)
        for step in (1, 2):
            with Rank(service.socket) as rank:
                rank.register(SIZE)
                rank.save(step, payload_of(step, SIZE))
            assert service.stop() == 0
            assert service.socket.is_socket(), "it is the manager's: connections wait in it"
            service.start(listener=listener)
        with Rank(service.socket) as rank:
            assert rank.restore()[0].step == 2


def test_a_manager_that_listens_elsewhere_is_told(make: Start) -> None:
    service = make()
    with listen_at(service.root / "run" / "other.sock") as listener:
        with pytest.raises(
            AssertionError, match=r"listens at .*other\.sock, but the configuration"
        ):
            service.start(listener=listener)
        assert service.wait_end() == 2


def test_the_end_of_its_terminal_is_its_end(make: Start) -> None:
    """SIGHUP from a terminal does not request a reload."""
    service = make()
    ours, theirs = os.openpty()
    take_it = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # these tests may run under nohup
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    with service.log.open("ab") as log:
        service.process = subprocess.Popen(
            [sys.executable, "-c", take_it, *service.command()],
            stdin=theirs, stdout=log, stderr=log, start_new_session=True,
            env=service.environment(),
        )  # fmt: skip
    os.close(theirs)
    service.wait_for(lambda said: said == "READY=1")
    os.close(ours)
    assert service.wait_end() == 0
    assert "RELOADING=1" not in service.heard
    assert service.log.read_text().rstrip().endswith("stopped")
