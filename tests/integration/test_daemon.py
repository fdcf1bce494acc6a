"""The real daemon and core, driven by ranks without torch: bytes in, bytes out."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from pccheck_wire import attach, codec
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import (
    NoCheckpointError,
    PccheckError,
    RefusedError,
    StorageFullError,
    UsageError,
)
from pccheck_wire.messages import (
    CheckpointState,
    Empty,
    Goodbye,
    Hello,
    ListVolumes,
    Opened,
    Register,
    Registered,
    Report,
    Request,
    Role,
    Status,
    Verify,
)
from tests.support.as_user import fork_as
from tests.support.daemon import Daemon, Start
from tests.support.rank import Rank, payload_of
from tests.support.waiting import until

SIZE = 3_000_000


def document(daemon: Daemon, body: Status | ListVolumes | Verify) -> dict[str, object]:
    with attach.observe(daemon.socket) as observer:
        answer = observer.request(body)
    assert isinstance(answer, Report)
    return answer.document


def saved(daemon: Daemon, *steps: int, size: int = SIZE, **options: object) -> None:
    """A run that saves these steps, waits for each, and ends."""
    with Rank(daemon.socket, **options) as rank:  # type: ignore[arg-type]
        rank.register(size)
        for step in steps:
            rank.save(step, payload_of(step, size))


def flip(path: Path, data: bytes) -> None:
    """Damages the first place where `data` lies in the file."""
    content = path.read_bytes()
    at = content.index(data)
    with path.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([content[at + 5] ^ 1]))


def test_bytes_come_back_from_dram_and_from_the_volume(daemon: Daemon) -> None:
    saved(daemon, *range(1, 8))
    for source in ("dram", "volume"):
        with Rank(daemon.socket) as rank:
            assert rank.welcome.newest_step == 7
            opened, data = rank.restore()
            assert (opened.step, opened.sequence, data) == (7, 7, payload_of(7, SIZE))
            assert rank.native.loaded == ((SIZE, 0) if source == "dram" else (0, SIZE))
        assert daemon.stop() == 0
        daemon.start()


def test_nothing_saved_is_empty(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        assert rank.open() == Empty()


def test_damage_is_passed_over_flagged_and_told(daemon: Daemon) -> None:
    saved(daemon, 1, 2)
    daemon.stop()
    (volume,) = daemon.storage.rglob("*.pcc")
    flip(volume, payload_of(2, SIZE)[:4096])
    daemon.start()
    with Rank(daemon.socket) as rank:
        newest = rank.open()
        assert isinstance(newest, Opened)
        assert newest.step == 2
        assert rank.load(newest)[0] != 0
        older = rank.open(before=newest.sequence)
        assert isinstance(older, Opened)
        assert rank.load(older) == (0, payload_of(1, SIZE))
        again = until(lambda: one if (one := rank.open()) and one.step == 1 else None)
        assert [item.step for item in again.skipped] == [2]
    assert "damaged" in str(document(daemon, Status())["warnings"])
    checked: Any = document(daemon, Verify("job"))["checkpoints"]
    assert sorted(one["valid"] for one in checked) == [False, True]


def test_a_reader_reads_while_the_trainer_saves(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        with Rank(daemon.socket, role=Role.READER) as reader:
            opened = reader.open()
            assert isinstance(opened, Opened)
            assert reader.load(opened) == (0, payload_of(1, SIZE))
            with pytest.raises(RefusedError):
                reader.register(SIZE)
        rank.save(2, payload_of(2, SIZE))


def test_copied_survives_the_trainer_and_sigterm_makes_it_durable(start_daemon: Start) -> None:
    daemon = start_daemon("--max-bandwidth", "4MiB")
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.wait(rank.begin(5, payload_of(5, SIZE)), copied=True)
    assert daemon.stop() == 0
    daemon.start("--max-bandwidth", "1GiB")
    with Rank(daemon.socket) as rank:
        assert rank.restore()[1] == payload_of(5, SIZE)


def test_an_incomplete_copy_fails_when_the_trainer_ends(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        rank.begin(2, payload_of(2, SIZE), fill=False)
        rank.until_copying(2)
    with Rank(daemon.socket) as rank:
        assert rank.restore()[0].step == 1
    (one,) = document(daemon, Status())["ranks"]  # type: ignore[misc]
    assert one["counters"] == {"durable": 1, "superseded": 0, "skipped": 0, "failed": 1}


def test_a_live_duplicate_is_refused_and_costs_nothing(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        with pytest.raises(RefusedError, match="already served for pid"):
            Rank(daemon.socket)
        rank.save(1, payload_of(1, SIZE))
        assert rank.welcome.incarnation == 1
    with Rank(daemon.socket) as rank:
        assert rank.welcome.incarnation == 2


def test_a_state_that_grows_moves_to_a_new_volume(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(1, payload_of(1, SIZE))
        grown = rank.register(3 * SIZE)
        assert isinstance(grown, Registered)
        assert grown.volume.endswith("rank-0.1.pcc")
        assert rank.restore()[1] == payload_of(1, SIZE)
        assert rank.save(2, payload_of(2, 3 * SIZE)).sequence == 2
        until(lambda: len(list(daemon.storage.rglob("*.pcc"))) == 1)
        assert rank.restore()[1] == payload_of(2, 3 * SIZE)


def test_the_run_before_is_kept_until_restored_or_fresh(start_daemon: Start) -> None:
    daemon = start_daemon("--slots", "3", "--keep", "1")
    saved(daemon, 100)
    saved(daemon, *range(1, 9))
    saved(daemon, *range(1, 9))
    with Rank(daemon.socket) as rank:
        kept = rank.open(step=100)
        assert isinstance(kept, Opened)
        assert rank.load(kept) == (0, payload_of(100, SIZE))
    saved(daemon, *range(1, 9), fresh=True)
    with Rank(daemon.socket) as rank, pytest.raises(NoCheckpointError, match="step 100"):
        rank.open(step=100)


def test_no_slot_left_beside_the_protected_one_names_the_fix(start_daemon: Start) -> None:
    daemon = start_daemon("--slots", "2", "--keep", "1")
    saved(daemon, 1)
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.save(2, payload_of(2, SIZE))
        snapshot = rank.begin(3, payload_of(3, SIZE))
        rank.wait(snapshot)
        told = rank.describe(snapshot)
        assert told.state in (CheckpointState.FAILED, CheckpointState.DURABLE)
        if told.state is CheckpointState.FAILED:
            assert "fresh=True" in told.hint
        kept = rank.open(step=1)
        assert isinstance(kept, Opened)


def test_numbers_in_the_errors_of_admission(start_daemon: Start) -> None:
    daemon = start_daemon("--max-storage", "24MiB")
    saved(daemon, 1, size=100_000, job="first")
    with Rank(daemon.socket, job="second") as rank:
        with pytest.raises(StorageFullError, match=r"--max-storage 24.0 MiB.*first") as error:
            rank.register(SIZE)
        assert "MiB" in error.value.message
        with pytest.raises(StorageFullError, match="free"):
            rank.register(1 << 42)
        with pytest.raises(UsageError):
            rank.ask(Register(0))


def test_goodbye_trims_a_finished_job(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        for step in (1, 2, 3):
            rank.save(step, payload_of(step, SIZE))
        rank.ask(Goodbye(done=True))
        listed = document(daemon, ListVolumes())["checkpoints"]
    assert [item["step"] for item in listed] == [3]  # type: ignore[attr-defined]


def test_ranks_recover_the_newest_step_that_all_have(daemon: Daemon) -> None:
    group = [Rank(daemon.socket, rank=n, world_size=2, launch="a") for n in range(2)]
    for rank in group:
        assert rank.open() == Empty()
        rank.register(SIZE)
        rank.save(4, payload_of(4, SIZE))
    states = [group[0].wait(group[0].begin(step, payload_of(step, SIZE))) for step in range(5, 12)]
    assert states[-1].outcome == CheckpointState.SKIPPED  # the other rank may need its slots
    for rank in group:
        rank.close()
    group = [Rank(daemon.socket, rank=n, world_size=2, launch="b") for n in range(2)]
    for rank in group:
        opened, data = rank.restore()
        assert opened.step == 4
        assert data == payload_of(4, SIZE)
        rank.close()
    with (
        Rank(daemon.socket, rank=0, world_size=3, launch="c") as rank,
        pytest.raises(NoCheckpointError, match="3 ranks"),
    ):
        rank.open()


def test_a_bad_request_fails_that_request_only(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        for bad in (b"", b"\xc0", b"\x81\xa1t\xa7request", b"x" * 60000):
            rank._socket.send(bad)
        rank._socket.send_multipart([b"a", b"b", b"c"])
        with pytest.raises(NoCheckpointError):
            rank.describe(99)
        with pytest.raises(PccheckError):
            rank.load(Opened(0, 77, 1, 1, 1, b"", b"", 100, 0, 8))
        rank.save(2, payload_of(2, SIZE))


def test_sigterm_with_live_ranks_drains_what_they_copied(start_daemon: Start) -> None:
    daemon = start_daemon("--max-bandwidth", "4MiB")
    ranks = [Rank(daemon.socket, job=f"job-{n}") for n in range(2)]
    for rank in ranks:
        rank.register(SIZE)
        rank.wait(rank.begin(1, payload_of(1, SIZE)), copied=True)
        rank.begin(2, payload_of(2, SIZE), fill=False)
    assert daemon.stop() == 0
    assert not ranks[0].native.alive()
    for rank in ranks:
        rank.close()
    daemon.start()
    for number in range(2):
        with Rank(daemon.socket, job=f"job-{number}") as rank:
            assert rank.restore()[0].step == 1


def test_a_stop_does_not_blame_the_trainer(daemon: Daemon) -> None:
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.until_copying(rank.begin(1, payload_of(1, SIZE), fill=False))
        daemon.kill(signal.SIGTERM)
        assert daemon.wait_end() == 0
    daemon.logs("step 1 failed: the trainer ended or abandoned it, or pccheckd stopped,")


def test_a_second_signal_hurries(start_daemon: Start) -> None:
    daemon = start_daemon("--max-bandwidth", "16KiB", "--drain-limit", "1h")
    with Rank(daemon.socket) as rank:
        rank.register(SIZE)
        rank.wait(rank.begin(1, payload_of(1, SIZE)), copied=True)
        daemon.kill(signal.SIGTERM)
        daemon.logs("stopping")
        daemon.kill(signal.SIGTERM)
        assert daemon.wait_end() == 1  # and not after the three minutes that the disk takes
    daemon.logs("not durable")


def test_memory_of_ranks_that_are_gone_makes_room(start_daemon: Start) -> None:
    daemon = start_daemon("--dram", "12MiB")
    for number in range(6):
        saved(daemon, 1, job=f"job-{number}")
    daemon.logs("was released for others")


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
def test_users_are_apart(daemon: Daemon) -> None:
    saved(daemon, 1)
    daemon.open_to_everybody()

    def others() -> str:
        assert not document(daemon, ListVolumes())["checkpoints"]
        assert not document(daemon, Status())["ranks"]
        assert not document(daemon, Status())["sessions"]
        with pytest.raises(RefusedError):
            document(daemon, Verify("job", uid=0))
        with pytest.raises(RefusedError):
            attach.connect(
                Hello(PROTOCOL_VERSION, Role.READER, "", 1, job="job", uid=0), daemon.socket
            )
        saved(daemon, 7, job="job")  # the same name, but a volume of this user
        with Rank(daemon.socket) as rank:
            return str(rank.restore()[0].step)

    assert fork_as(65534, others) == "7"
    assert len(document(daemon, ListVolumes())["checkpoints"]) == 2  # type: ignore[arg-type]
    with Rank(daemon.socket) as rank:
        assert rank.restore()[0].step == 1
        endpoint, token = rank.welcome.endpoint, rank.welcome.token

        def thief() -> str:
            socket = zmq.Context().socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(endpoint)
            socket.send(codec.encode(Request(1, token, Goodbye(done=True))))
            return str(socket.poll(1000))

        assert fork_as(65534, thief) == "0"


def test_a_fork_that_keeps_the_socket_does_not_keep_the_session(daemon: Daemon) -> None:
    reading, writing = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        Rank(daemon.socket).register(SIZE)
        worker = os.fork()  # holds every descriptor of the trainer
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writing, str(worker).encode())
        time.sleep(60)
        os._exit(0)
    os.close(writing)
    worker = int(os.read(reading, 20))
    try:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        saved(daemon, 1)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_closed_session_ends_though_a_fork_has_its_socket(daemon: Daemon) -> None:
    """A worker of a DataLoader has it until the worker runs for the first time."""
    rank = Rank(daemon.socket)
    rank.register(SIZE)
    worker = os.dup(rank.attachment.socket.fileno())
    rank.close()
    saved(daemon, 1)
    os.close(worker)


def test_a_killed_daemon_leaves_nothing_behind_for_long(daemon: Daemon) -> None:
    for _ in range(2):
        saved(daemon, 1)
        assert len(list(daemon.socket.parent.glob("ctl-*"))) == 1
        daemon.kill()
        daemon.start()
    assert not list(daemon.socket.parent.glob("ctl-*"))
