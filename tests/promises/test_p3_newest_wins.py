"""P3, newest wins: the newest durable checkpoint is recovered. A damaged checkpoint is skipped in
favour of the previous one, and reported. A read error is not damage, and leaves no flag behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import _core, catalog
from pccheck_store.observer import Observer
from pccheck_store.remote import DaemonSource
from pccheck_wire.errors import DamagedError, NoCheckpointError
from pccheck_wire.messages import Opened
from tests.integration.test_refusals import make_checkpoint, overwrite
from tests.promises.test_p2_durable import until
from tests.support import waiting
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.rank import Rank, payload_of
from tests.support.reads import read
from tests.support.trainer import Connect, RemoteError
from tests.support.volumes import damage, make

SIZE = 3_000_000


def flagged(storage: Path) -> list[int]:
    return [one.id.step for one in catalog.scan(storage).checkpoints if one.is_damaged]


def verify(daemon: Daemon, uid: int = -1) -> dict[int, dict[str, Any]]:
    """Verifies all checkpoints through the daemon; returns the results by step."""
    with Observer(str(daemon.socket)) as observer:
        document: dict[str, Any] = observer.verify("job", rank=0, uid=uid)
    return {one["step"]: one for one in document["checkpoints"]}


def steps_on_disk(start_daemon: Start, start_trainer: Connect, fault: str, steps: int) -> Daemon:
    """A daemon without checkpoints in memory, whose disk will fail."""
    daemon = start_daemon(shim=fault)
    trainer = start_trainer(daemon)
    for _ in range(steps):
        trainer.save()
    trainer.kill()
    assert daemon.stop() == 0
    return daemon.start()


def test_a_read_error_falls_to_the_one_before_and_leaves_no_flag(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = steps_on_disk(start_daemon, start_trainer, "eio:read:1", 2)
    daemon.armed.touch()
    trainer = start_trainer(daemon)
    done = trainer.restore()
    assert (done["step"], done["skipped"]) == (1, [2])
    assert trainer.check(1) == ""
    trainer.kill()
    daemon.logs("checkpoint 2 could not be read")
    assert flagged(daemon.storage) == []
    again = start_trainer(daemon)  # the disk works again
    done = again.restore()
    assert (done["step"], done["skipped"]) == (2, [])
    assert again.check(2) == ""


def test_when_nothing_can_be_read_it_says_so_and_no_flag_is_left(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = steps_on_disk(start_daemon, start_trainer, "dead:read:1", 2)
    daemon.armed.touch()
    with pytest.raises(RemoteError, match=r"UnreadableError.*step 2: .*could not read") as caught:
        start_trainer(daemon).restore()
    assert "step 1" in str(caught.value)
    until(daemon, lambda document: "checkpoints [2, 1]" in " ".join(document["warnings"]))
    shown = daemon.status()
    assert shown["daemon"]["state"] == "degraded"
    (told,) = shown["warnings"]
    assert "checkpoints [2, 1]" in told and "could not be read" in told
    assert {one["problem"] for one in verify(daemon).values()} == {"UNREADABLE"}
    assert flagged(daemon.storage) == []
    daemon.armed.unlink()
    assert all(one["valid"] for one in verify(daemon).values())
    assert daemon.status()["warnings"] == []


@contextmanager
def group(daemon: Daemon, launch: str) -> Iterator[list[Rank]]:
    with ExitStack() as ranks:
        yield [
            ranks.enter_context(Rank(daemon.socket, rank=rank, world_size=2, launch=launch))
            for rank in range(2)
        ]


def group_on_disk(start_daemon: Start) -> Daemon:
    """A daemon without checkpoints in memory, and two steps of two ranks on a disk that will
    fail."""
    daemon = start_daemon(shim="dead:read:1")
    with group(daemon, "run-0") as ranks:
        for rank in ranks:
            rank.open()
            rank.register(SIZE)
        for step in (1, 2):
            for rank in ranks:
                rank.save(step, payload_of(step, SIZE))
    assert daemon.stop() == 0
    return daemon.start()


def test_a_group_recovers_the_step_before(start_daemon: Start) -> None:
    """The ranks read the checkpoint that was agreed on once, so the next agreement must differ."""
    daemon = group_on_disk(start_daemon)
    with group(daemon, "run-1") as ranks:
        daemon.armed.touch()
        opened = ranks[0].open()
        assert isinstance(opened, Opened) and opened.step == 2
        assert ranks[0].load(opened)[0] == _core.E_UNREADABLE
        with pytest.raises(DamagedError, match="cannot be read"):
            ranks[0].open(before=opened.sequence)
        daemon.armed.unlink()
    with group(daemon, "run-2") as ranks:
        for rank in ranks:
            opened, data = rank.restore()
            assert (opened.step, data) == (1, payload_of(1, SIZE))
    assert flagged(daemon.storage) == []


def test_a_group_of_which_nothing_can_be_read_is_not_empty(start_daemon: Start) -> None:
    """At every start; and the job restores by itself once the disk is repaired."""
    daemon = group_on_disk(start_daemon)
    daemon.armed.touch()
    tried = []
    for run in range(1, 5):
        with group(daemon, f"run-{run}") as ranks:
            opened = ranks[0].open()
            assert isinstance(opened, Opened)
            assert ranks[0].load(opened)[0] == _core.E_UNREADABLE
            tried.append(opened.step)
            lost = "[2]" if opened.step == 2 else "[2, 1]"  # the daemon notices a moment later
            until(daemon, lambda document, lost=lost: lost in " ".join(document["warnings"]))
            if opened.step == 1:  # nothing readable is left; the job is not empty
                with pytest.raises(NoCheckpointError, match=r"2 .damaged or unreadable., 1 .dam"):
                    ranks[1].open()
    assert tried == [2, 1, 2, 1]
    daemon.armed.unlink()
    with group(daemon, "run-5") as ranks:
        for rank in ranks:
            opened, data = rank.restore()
            assert (opened.step, data) == (2, payload_of(2, SIZE))


def test_a_rank_that_asks_again_gets_no_other_step_than_the_others(start_daemon: Start) -> None:
    daemon = group_on_disk(start_daemon)
    with group(daemon, "run-1") as ranks:
        opened, data = ranks[1].restore()
        assert (opened.step, data) == (2, payload_of(2, SIZE))
        daemon.armed.touch()
        opened = ranks[0].open()
        assert isinstance(opened, Opened) and ranks[0].load(opened)[0] == _core.E_UNREADABLE
        daemon.armed.unlink()
        until(daemon, lambda document: "could not be read" in " ".join(document["warnings"]))
        for _ in range(2):  # a script that tries again
            with pytest.raises(DamagedError, match="rank 1 of this start restores step 2"):
                ranks[0].open()
        assert [rank.restore()[0].step for rank in reversed(ranks)] == [1, 1]
    with group(daemon, "run-2") as ranks:
        assert [rank.restore()[0].step for rank in ranks] == [1, 1]


# -- flags that go -----------------------------------------------------------------------------


@pytest.fixture
def damaged(start_daemon: Start, tmp_path: Path) -> Daemon:
    """A daemon whose newest checkpoint is damaged, and flagged because a reader found the
    damage."""
    storage = make(tmp_path / "storage", 1, 2, 3)
    daemon = start_daemon("--allow-any-filesystem", "--scrub-rate", "0", storage=storage)
    damage(storage, 3, at=128)
    source = DaemonSource(str(daemon.socket), storage)
    one = source.held().checkpoints[0]
    with closing(source.open([one])) as payloads, pytest.raises(DamagedError):
        read(payloads, one.id.rank, 0, one.payload_bytes)
    waiting.until(lambda: flagged(storage) == [3])  # after the reader has its error
    return daemon


def test_verify_takes_the_flag_away_once_all_is_whole(ctl: Ctl, damaged: Daemon) -> None:
    served = ("--socket", damaged.socket, "verify", "job", "--json")

    def result(*arguments: object, storage: Path | None = None) -> tuple[int, str]:
        ran = ctl(storage, *arguments)
        return ran.code, {one["step"]: one["result"] for one in ran.json["checkpoints"]}[3]

    assert result(*served) == (14, "damaged")
    damage(damaged.storage, 3, at=128)  # repairs the damage
    assert result("verify", "job", "--json", storage=damaged.storage) == (14, "damaged")
    assert result(*served, "--read-data-subset", "50%") == (14, "damaged")
    assert flagged(damaged.storage) == [3]
    assert result(*served) == (0, "ok")
    assert flagged(damaged.storage) == []
    damaged.logs("checkpoint 3 is readable and intact again")
    assert damaged.status()["warnings"] == []
    damaged.kill()
    damaged.start()
    assert flagged(damaged.storage) == []
    assert ctl(None, "--socket", damaged.socket, "show", "job", "--json").json["step"] == 3


def _scribble_slot_of_step(volume: Path, step: int) -> None:
    from pccheck_native import Volume

    view = Volume(str(volume), writable=False)
    info = view.info()
    (entry,) = [e for e in view.table() if e.sequence and e.step == step]
    view.close()
    first_slot = (info.volume_bytes - info.slots * info.slot_bytes) // 2
    overwrite(volume, where=first_slot + entry.slot * info.slot_bytes + 65536)


def test_damaged_data_falls_to_the_one_before(daemon: Daemon, start_trainer: Connect) -> None:
    make_checkpoint(daemon, start_trainer, 3)
    trainer = start_trainer(daemon)
    trainer.restore()
    trainer.save()
    trainer.kill()
    daemon.stop()
    (volume,) = daemon.storage.rglob("*.pcc")
    _scribble_slot_of_step(volume, 4)
    daemon.start()
    again = start_trainer(daemon)
    done = again.restore()
    assert (done["step"], done["skipped"]) == (3, [4])
    assert again.check(3) == ""
    (rank,) = daemon.status()["ranks"]
    assert rank["newest"]["step"] == 3


def test_one_rotten_replica_is_repaired(daemon: Daemon, start_trainer: Connect) -> None:
    make_checkpoint(daemon, start_trainer)
    daemon.stop()
    (volume,) = daemon.storage.rglob("*.pcc")
    overwrite(volume, where=0)
    overwrite(volume, where=1 << 20)
    daemon.start()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 3
