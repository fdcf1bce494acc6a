"""libzmq in one process per user: what a user does to that process affects no other user."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import time
from pathlib import Path

import psutil
import pytest

from pccheck_wire import attach
from pccheck_wire.errors import RefusedError
from pccheck_wire.messages import CheckpointState, Status
from pccheckd.front import program
from pccheckd.helper import framing
from tests.support import forked
from tests.support.as_user import fork_as
from tests.support.daemon import Daemon
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect, RemoteError, Trainer
from tests.support.waiting import suspend, until

SIZE = 3_000_000
NOBODY = 65534
TRIES = 200
MIB = 1 << 20

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts are the processes that users have."""
    monkeypatch.setattr(forked, "fronts", False)


def front_of(daemon: Daemon, uid: int | None = None) -> psutil.Process:
    """Waits for the process that reads the user's requests; returns it."""
    uid = os.getuid() if uid is None else uid
    wanted = ["pccheckd.front.program", str(framing.VERSION), str(uid)]

    def found() -> psutil.Process | None:
        for child in psutil.Process(daemon.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if child.cmdline()[3:6] == wanted:
                    return child
        return None

    front = until(found)
    assert front
    return front


def status(process: psutil.Process) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def plain(endpoint: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(0.2)
    made.connect(endpoint.removeprefix("ipc://"))
    return made


def exhaust(endpoint: str, victim: psutil.Process) -> None:
    """Connects and sends nothing, again and again, until the process has ended."""
    held = []
    while lives(victim):
        try:
            held.append(plain(endpoint))
        except OSError:  # its backlog is full
            continue
    assert len(held) >= program.FILES_MAX // 2
    for one in held:
        one.close()


def zmtp(endpoint: str) -> socket.socket:
    """A peer that has shaken hands as a DEALER does, without libzmq."""
    made = plain(endpoint)
    made.settimeout(30)
    made.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    made.sendall(bytes((4, len(ready))) + ready)
    heard = b""
    while b"ROUTER" not in heard:  # a peer that does not wait for it is disconnected
        heard += made.recv(200)
    return made


def saves_again(rank: Rank, step: int) -> None:
    """Requests that were under way may be lost, and are reported; later checkpoints are durable."""
    for _ in range(TRIES):
        data = payload_of(step, SIZE)
        if rank.wait(rank.begin(step, data)).outcome != CheckpointState.FAILED:
            return
    raise AssertionError("no checkpoint has become durable")


def trains_on(trainer: Trainer) -> None:
    for _ in range(TRIES):
        trainer.step()
        try:
            trainer.wait_durable(trainer.checkpoint())
            return
        except RemoteError as error:
            assert error.kind == "CheckpointFailedError", error
    raise AssertionError("no checkpoint has become durable")


def test_the_daemon_has_no_libzmq(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        assert "zmq" not in Path(f"/proc/{daemon.pid}/maps").read_text()
        told = status(front_of(daemon))
        assert told["NoNewPrivs"] == "1"
        limits = Path(f"/proc/{front_of(daemon).pid}/limits").read_text()
        assert f"Max open files            {program.FILES_MAX} " in limits
        assert f"Max address space         {program.ADDRESS_SPACE_BYTES} " in limits
    assert daemon.stop() == 0


@needs_root
@pytest.mark.parametrize("uid", [NOBODY, 3_000_000_000])  # the second is negative as a C int
def test_a_front_is_its_users_own_process(daemon: Daemon, uid: int) -> None:
    daemon.open_to_everybody()

    def saves() -> str:
        with Rank(daemon.socket) as rank:
            rank.register(SIZE)
            told = status(front_of(daemon, uid))
            rank.save(1, payload_of(1, SIZE))
            return " ".join(told[name] for name in ("Uid", "Gid", "Groups", "CapPrm", "CapEff"))

    user = "\t".join([str(uid)] * 4)
    assert fork_as(uid, saves) == f"{user} {user}  {'0' * 16} {'0' * 16}"


def test_connections_without_end_harm_their_user_only(daemon: Daemon, trainer: Trainer) -> None:
    trains_on(trainer)
    victim = front_of(daemon)
    with Rank(daemon.socket, job="attacker") as rank:
        exhaust(rank.welcome.endpoint, victim)
    trains_on(trainer)
    assert front_of(daemon).pid != victim.pid
    daemon.logs("opens too many connections to it")
    assert trainer.restore()["step"] > 1


@needs_root
def test_another_user_notices_nothing(daemon: Daemon) -> None:
    daemon.open_to_everybody()
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        ours = front_of(daemon)

        def attack() -> str:
            with Rank(daemon.socket) as rank:
                exhaust(rank.welcome.endpoint, front_of(daemon, NOBODY))
            return "done"

        assert fork_as(NOBODY, attack) == "done"
        rank.save(1, payload_of(1, SIZE))
        assert front_of(daemon).pid == ours.pid


def test_messages_without_end_harm_their_user_only(daemon: Daemon, trainer: Trainer) -> None:
    trains_on(trainer)
    victim = front_of(daemon)
    before = psutil.Process(daemon.pid).memory_info().rss
    with (
        Rank(daemon.socket, job="attacker") as rank,
        zmtp(rank.welcome.endpoint) as peer,
        pytest.raises(OSError),
    ):
        while True:  # frames of one byte, each with the flag that more of the message follows
            peer.sendall(b"\x01\x01x" * 20_000)
    trains_on(trainer)
    assert front_of(daemon).pid != victim.pid
    daemon.logs("filled its memory up to the limit")
    assert psutil.Process(daemon.pid).memory_info().rss < before + 64 * MIB


def test_training_goes_on_when_its_front_is_killed(daemon: Daemon, start_trainer: Connect) -> None:
    trainer = start_trainer(daemon, stall_limit_s=20)
    stop = daemon.root / "stop"
    trainer.post("run", 1_000_000, 5, stop=str(stop))  # however long the next front takes to start
    for step in (50, 500, 1000):
        trainer.wait_for_durable(step)
        front_of(daemon).kill()
    trainer.wait_for_durable(1500)
    stop.touch()
    assert trainer.answer() >= 1500
    trains_on(trainer)
    ends = {"durable", "superseded", "failed", "skipped"}
    until(lambda: set(trainer.states()) <= ends, trainer.states)  # some may still be written
    assert "abandoned" not in trainer.warnings
    assert daemon.log.read_text().count("connected (session") == 1
    daemon.logs("killed by SIGKILL")


@pytest.mark.parametrize("delay_s", [0.2, 0, 0.01, 0.03, 0.1])
def test_a_restore_survives_the_end_of_its_front(
    daemon: Daemon, trainer: Trainer, delay_s: float
) -> None:
    """Any lost request of a restore is sent again at once. Each case has its own daemon, because
    every end of a front delays the start of the next one."""
    trains_on(trainer)
    process = front_of(daemon)
    suspend(process.pid)
    trainer.post("restore")
    time.sleep(delay_s)
    process.kill()
    time.sleep(delay_s / 10)
    front_of(daemon).kill()
    assert trainer.answer(60)["step"] >= 1
    trains_on(trainer)


def test_an_endpoint_that_was_removed_is_made_anew(daemon: Daemon) -> None:
    """At the next session. Existing sessions find the new endpoint when their connection is
    gone."""
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        for made in daemon.socket.parent.glob("ctl-*"):
            shutil.rmtree(made)
        rank.save(2, payload_of(2, SIZE))
        with Rank(daemon.socket, job="other") as other:
            other.register(SIZE)
            other.save(1, payload_of(1, SIZE))
            saves_again(rank, 3)
        saves_again(rank, 4)
    assert daemon.stop() == 0
    assert not list(daemon.socket.parent.glob("ctl-*"))


def test_an_endpoint_that_cannot_be_made_is_told(daemon: Daemon) -> None:
    with Rank(daemon.socket):
        (made,) = daemon.socket.parent.glob("ctl-*")
        shutil.rmtree(made)
        made.touch()
        with pytest.raises(RefusedError, match=f"{made}.* cannot be created: Not a directory"):
            Rank(daemon.socket, job="other")
        made.unlink()
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))


def test_no_front_outlives_the_daemon(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.status()  # from then on its end is the daemon's, whatever its state
        process = front_of(daemon)
        suspend(process.pid)  # not even one that does not run
        daemon.kill()
        process.wait(800)
    daemon.start()
    with Rank(daemon.socket):
        process = front_of(daemon)
        assert daemon.stop() == 0
        assert not lives(process)
    assert not list(daemon.socket.parent.glob("ctl-*"))


def test_observers_need_none(daemon: Daemon) -> None:
    with attach.observe(daemon.socket) as observer:
        observer.request(Status())
        assert not psutil.Process(daemon.pid).children()
    assert not list(daemon.socket.parent.glob("ctl-*"))
