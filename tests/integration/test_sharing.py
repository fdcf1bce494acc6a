"""Several jobs share little DRAM: a job that has all of it gives some back while it runs, every job
can save, and the DRAM of a user can be limited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pccheck_wire.errors import PccheckError, RefusedError, StorageFullError
from pccheck_wire.messages import CheckpointState, Role
from tests.conftest import SMALL
from tests.support.as_user import import_all
from tests.support.daemon import Daemon, Start
from tests.support.manager import ServedDaemon
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect, Trainer
from tests.support.waiting import until

MIB = 1 << 20
FLOATS = MIB // 4
NOBODY = 65534
LIMIT_S = 240.0


def dram(daemon: Daemon) -> dict[str, dict[str, int]]:
    """What each job has and wants; checks that all jobs together have no more than the total."""
    told = daemon.status()
    assert told["pool"]["used_bytes"] <= told["pool"]["budget_bytes"], told["pool"]
    # A volume that was created after the daemon's answer is listed without memory.
    return {rank["job"]: rank["dram"] for rank in told["ranks"] if "dram" in rank}


def has(daemon: Daemon, **expected: int) -> None:
    """Waits until these jobs have that many MiB."""

    def reached() -> bool:
        found = dram(daemon)
        return all(found[job]["bytes"] == mib * MIB for job, mib in expected.items())

    until(reached)


def become_nobody(_trainer: Any) -> int:
    os.setgroups([])
    os.setgid(NOBODY)
    import_all("pccheck")  # the other user may have no access to it
    os.setuid(NOBODY)
    return os.getuid()


@pytest.fixture
def start_stranger(stack: ExitStack) -> Connect:
    """A trainer of another user."""

    def start(daemon: Daemon, counts: list[int], **options: object) -> Trainer:
        if os.getuid() != 0:
            pytest.skip("needs root")
        daemon.open_to_everybody()
        trainer = stack.enter_context(Trainer())
        assert trainer.evaluate(become_nobody) == NOBODY
        trainer.open(counts, socket=str(daemon.socket), **options)
        return trainer

    return start


def saves(trainer: Trainer) -> int:
    step: int = trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) in ("durable", "global", "superseded")
    return step


def recovers(trainer: Trainer, step: int) -> None:
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (step, "")


@pytest.mark.parametrize("other_user", [False, True])
def test_an_idle_job_makes_room(
    start_daemon: Start, start_trainer: Connect, start_stranger: Connect, other_user: bool
) -> None:
    daemon = start_daemon("--dram", "16MiB")
    first = start_trainer(daemon, [10 * FLOATS], job="first")
    saves(first)
    has(daemon, first=16)
    second = (start_stranger if other_user else start_trainer)(daemon, [10 * FLOATS], job="second")
    assert saves(second) == 1
    has(daemon, first=8, second=8)
    for _ in range(3):
        assert saves(first) == saves(second) + 0
    recovers(first, 4)
    recovers(second, 4)
    # A job that has ended frees its memory for the other job at once.
    second.close(done=True)
    has(daemon, first=16, second=0)
    saves(first)
    recovers(first, 5)


def test_many_jobs_of_one_user_are_one_user(
    start_daemon: Start, start_trainer: Connect, start_stranger: Connect
) -> None:
    daemon = start_daemon("--dram", "24MiB")
    for name in ("a", "b", "c"):
        saves(start_trainer(daemon, [12 * FLOATS], job=name))
    has(daemon, a=8, b=8, c=8)
    saves(start_stranger(daemon, [12 * FLOATS], job="other"))
    has(daemon, a=4, b=4, c=4, other=12)
    (mine, others) = daemon.status()["users"]
    assert (mine["uid"], mine["dram_bytes"], others["dram_bytes"]) == (0, 12 * MIB, 12 * MIB)


@pytest.mark.parametrize("victims", ["first", "daemon", "both"])
def test_memory_goes_while_checkpoints_are_in_flight(
    stack: ExitStack, start_trainer: Connect, victims: str
) -> None:
    """A process is killed meanwhile: copied checkpoints become durable."""
    daemon = ServedDaemon(*SMALL, "--dram", "16MiB", "--slots", "4", "--keep", "2",
                          "--max-bandwidth", "6MiB")  # fmt: skip
    stack.enter_context(daemon).start()
    first = start_trainer(daemon, [6 * FLOATS], job="first")
    second = start_trainer(daemon, [6 * FLOATS], job="second")
    saves(first)
    for _ in range(2):
        first.step()
        first.wait_copied(first.checkpoint())
    second.step()
    second.post("checkpoint")
    until(lambda: dram(daemon).get("second", {"bytes": 0})["bytes"] > 0)
    if victims in ("daemon", "both"):
        daemon.kill()
    if victims in ("first", "both"):
        first.kill()
    second.answer()
    if victims in ("daemon", "both"):
        daemon.start()
    else:
        assert second.wait_durable(0) == "durable"
    if victims == "daemon":
        until(lambda: bool(saves_again(first)))
        first.kill()
    again = start_trainer(daemon, [6 * FLOATS], job="first")
    step = again.restore()["step"]
    assert step >= 3 and again.check(step) == ""
    until(lambda: bool(saves_again(second)))
    recovers(second, second.step(0))


def saves_again(trainer: Trainer) -> bool:
    """Saves until a checkpoint succeeds: after a restart of the daemon, a client reconnects at its
    next checkpoint."""
    trainer.step()
    handle = trainer.checkpoint()
    return bool(trainer.state(handle) != "failed" and trainer.wait_durable(handle))


def test_two_chunks_for_everybody(start_daemon: Start) -> None:
    """With less memory the job is refused, with numbers. The refusal ends when its reason ends."""
    daemon = start_daemon("--dram", "5MiB")
    with ExitStack() as stack:
        ranks = [stack.enter_context(Rank(daemon.socket, job=f"job{i}")) for i in range(3)]
        for rank in ranks[:2]:
            rank.register(3 * MIB)
        has(daemon, job0=3, job1=2)
        with pytest.raises(RefusedError, match=r"two chunks for each of 3 sessions") as refused:
            ranks[2].register(3 * MIB)
        assert "5.00 MiB (--dram)" in refused.value.message and "--dram" in refused.value.hint
        for index, rank in enumerate(ranks[:2]):
            data = payload_of(index, 3 * MIB)
            rank.save(1, data)
            assert rank.restore()[1] == data
        ranks[0].close()
        until(lambda: _registers(ranks[2], 3 * MIB))
        ranks[2].save(1, payload_of(9, 3 * MIB))


def test_a_reader_that_is_refused_leaves_no_descriptor_open(start_daemon: Start) -> None:
    daemon = start_daemon("--dram", "3MiB")
    files = Path(f"/proc/{daemon.pid}/fd")
    with Rank(daemon.socket) as rank:
        rank.register(MIB)
        rank.save(1, payload_of(1, MIB))
        before = len(list(files.iterdir()))
        for _ in range(4):
            with pytest.raises(RefusedError, match="two chunks for each of 2 sessions"):
                Rank(daemon.socket, role=Role.READER)
        until(lambda: len(list(files.iterdir())) <= before)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for two users")
def test_the_sessions_of_one_user_do_not_hold_all_memory(start_daemon: Start) -> None:
    """The sessions connected first, hold two chunks each, and answer nothing."""
    daemon = start_daemon("--dram", "16MiB")
    daemon.open_to_everybody()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.as_user", "12345", "tests.support.hostile",
         "minimal_sessions", str(daemon.socket), "{}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as attacker:  # fmt: skip
        assert attacker.stdout is not None and attacker.stdin is not None
        assert attacker.stdout.readline() == "enough\n"
        assert daemon.status()["pool"]["used_bytes"] == 16 * MIB
        for job in ("first", "second"):
            with Rank(daemon.socket, job=job) as rank:
                rank.register(3 * MIB)
                for step in (1, 2):
                    rank.save(step, payload_of(step, 3 * MIB))
                assert rank.restore()[1] == payload_of(2, 3 * MIB)
        attacker.stdin.close()
        assert int(attacker.stdout.readline()) > 0
    daemon.logs("uid 12345")


def _registers(rank: Rank, size: int) -> bool:
    try:
        rank.register(size)
    except RefusedError:
        return False
    return True


def _chunks(daemon: Daemon) -> int:
    (rank,) = daemon.status()["ranks"]
    return sum(count for state, count in rank["chunks"].items() if state != "bytes")


def test_a_stopped_trainer_keeps_only_what_it_holds(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """A stopped trainer cannot answer. A new job gets an error within the time limit, and memory
    once the trainer answers."""
    daemon = start_daemon("--dram", "16MiB")
    first = start_trainer(daemon, [10 * FLOATS], job="first")
    saves(first)
    has(daemon, first=16)
    until(lambda: _chunks(daemon) == 16)  # memory that the trainer did not get yet needs no answer
    first.signal(signal.SIGSTOP)
    with Rank(daemon.socket, job="second") as second:
        with pytest.raises(RefusedError, match="being returned") as refused:
            second.register(2 * MIB)
        assert refused.value.retryable
        first.signal(signal.SIGCONT)
        second.register(2 * MIB)
        second.save(1, payload_of(1, 2 * MIB))
    saves(first)


def test_dram_of_one_user(start_daemon: Start) -> None:
    daemon = start_daemon("--dram", "32MiB", "--max-dram-per-user", "6MiB")
    with ExitStack() as stack:
        ranks = [stack.enter_context(Rank(daemon.socket, job=f"job{i}")) for i in range(4)]
        ranks[0].register(8 * MIB)
        has(daemon, job0=6)
        for rank in ranks[1:3]:
            rank.register(8 * MIB)
        has(daemon, job0=2, job1=2, job2=2)
        with pytest.raises(RefusedError, match="--max-dram-per-user") as refused:
            ranks[3].register(8 * MIB)
        assert "'job1' rank 0 of uid" in refused.value.message and refused.value.hint
        for rank in ranks[:3]:
            rank.save(1, payload_of(3, 8 * MIB))
        assert daemon.status()["users"][0]["dram_bytes"] == 6 * MIB
        ranks[0].close()
        until(lambda: _registers(ranks[3], 8 * MIB))
        assert daemon.status()["users"][0]["dram_bytes"] <= 6 * MIB


def test_storage_of_one_user(start_daemon: Start) -> None:
    daemon = start_daemon("--max-storage-per-user", "40MiB")
    with Rank(daemon.socket, job="old") as old, Rank(daemon.socket, job="new") as new:
        old.register(6 * MIB)
        old.save(1, payload_of(1, 6 * MIB))
        with pytest.raises(StorageFullError, match=r"--max-storage-per-user 40.0 MiB") as full:
            new.register(6 * MIB)
        assert "pccheckctl drop old" in full.value.hint


SIZES = (1, 2, 3, 5, 9)


class Storm:
    """Sessions that connect and end; each saves payloads that can be made again from their step."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.daemon = daemon
        self.seed = seed
        self.steps: dict[str, int] = {}
        self.sizes: dict[tuple[str, int], int] = {}
        self.troubles: list[str] = []

    def run(self, name: str, rounds: int) -> None:
        random = Random(f"{self.seed} {name}")
        try:
            for _ in range(rounds):
                self._session(name, random)
        except Exception as error:
            self.troubles.append(f"{name}: {error!r}")

    def _session(self, name: str, random: Random) -> None:
        with _connected(self.daemon, name) as rank:
            if name in self.steps:
                self.check(rank, name)
            for _ in range(random.randint(1, 4)):
                step = self.steps.get(name, 0) + 1
                size = random.choice(SIZES) * MIB - random.randrange(MIB // 2)
                self.sizes[name, step] = size
                rank.register(size)
                state = rank.wait(rank.begin(step, payload_of(step, size)))
                assert state.outcome in (CheckpointState.DURABLE, CheckpointState.SUPERSEDED), state
                self.steps[name] = step
            if random.random() < 0.5:  # and leaves in mid-copy
                rank.begin(self.steps[name] + 1, payload_of(0, MIB), fill=False)

    def check(self, rank: Rank, name: str) -> None:
        opened, data = rank.restore()
        assert opened.step == self.steps[name], (name, opened)
        assert data == payload_of(opened.step, self.sizes[name, opened.step]), name


def _connected(daemon: Daemon, name: str) -> Rank:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return Rank(daemon.socket, job=name)
        except PccheckError:  # the previous session is still being drained
            assert time.monotonic() < deadline


def seeds() -> Iterator[int]:
    given = os.environ.get("PCCHECK_SEED")
    yield from [int(given)] if given else [1, 2]


@pytest.mark.parametrize("seed", list(seeds()))
def test_sessions_come_and_go(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon("--dram", "12MiB", "--slots", "3", "--keep", "1")
    storm = Storm(daemon, seed)
    names = [f"job{i}" for i in range(5)]
    threads = [threading.Thread(target=storm.run, args=(name, 4)) for name in names]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        dram(daemon)
        threads[0].join(0.2)
    assert not storm.troubles, (seed, storm.troubles)
    for name in names:
        with _connected(daemon, name) as rank:
            storm.check(rank, name)
