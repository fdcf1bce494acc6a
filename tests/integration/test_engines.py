"""The promises with every storage engine, and how the daemon chooses an engine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pccheck_wire.errors import PccheckError
from tests.support.daemon import Start
from tests.support.trainer import Connect

MIB = 1 << 18  # float32 elements of one MiB
SLOW = ("--max-bandwidth", "12MiB")


ENGINE = "mmap"  # all other tests run with pwrite


def test_it_survives_trainer_and_daemon(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--engine", ENGINE)
    trainer = start_trainer(daemon)
    for _ in range(6):  # uses every slot more than once
        trainer.save()
    assert trainer.recover()["wrong"] == ""
    document = daemon.status()
    assert document["daemon"]["engine"] == ENGINE
    assert [rank["volume"]["engine"] for rank in document["ranks"]] == [ENGINE]
    trainer.kill()
    daemon.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restored() == (6, "")
    assert again.wait_durable(again.checkpoint(step=7)) == "durable"


def test_what_is_copied_is_made_durable_at_the_end(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--engine", ENGINE, *SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    trainer.wait_copied(trainer.checkpoint())
    trainer.kill()
    assert daemon.stop() == 0
    daemon.start("--engine", "pwrite")  # each engine reads what the others have written
    again = start_trainer(daemon, [6 * MIB])
    assert again.restored() == (1, "")


@pytest.mark.parametrize("fault", ["eio:flush:1", "eio:record-a:1", "eio:record-b:1"])
def test_an_error_of_the_disk(start_daemon: Start, start_trainer: Connect, fault: str) -> None:
    daemon = start_daemon("--engine", ENGINE, shim=fault)
    trainer = start_trainer(daemon)
    trainer.save()
    daemon.armed.touch()
    trainer.step()
    handle = trainer.checkpoint()
    trainer.evaluate(_settled)
    expected = "failed" if fault == "eio:record-a:1" else "durable"
    assert trainer.state(handle) == expected
    trainer.step()
    trainer.checkpoint()  # reports the failure; the volume is opened again
    trainer.evaluate(_settled)
    assert trainer.save() == "durable"
    trainer.kill()
    daemon.kill()
    daemon.shim = ""
    daemon.start()
    again = start_trainer(daemon)
    assert again.restored() == (4, "")


def test_pwrite_stands_in_and_says_why(
    start_daemon: Start, start_trainer: Connect, disk: Path
) -> None:
    daemon = start_daemon("--engine", "pmem", "--allow-any-filesystem", storage=disk)
    trainer = start_trainer(daemon, [1000])
    assert trainer.save() == "durable"
    told = daemon.status()["daemon"]
    assert (told["engine"], told["engine_wanted"]) == ("pwrite", "pmem")
    assert told["engine_reason"].startswith("pmem: no persistent memory")
    daemon.logs("engine pwrite instead of pmem: no persistent memory")


def _settled(trainer: object) -> None:
    """Returns when the newest checkpoint is durable or has failed."""
    with contextlib.suppress(PccheckError):
        trainer.handles[-1].wait_durable(60)  # type: ignore[attr-defined]
