"""The promises with every storage engine, and how the daemon chooses an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pccheck_store.observer import Observer
from pccheck_wire.errors import PccheckError
from tests.support.daemon import Daemon
from tests.support.trainer import Trainer

Start = Callable[..., Daemon]
Connect = Callable[..., Trainer]

MIB = 1 << 18  # float32 elements of one MiB
SLOW = ("--max-bandwidth", "12MiB")


ENGINE = "mmap"  # all other tests run with pwrite


def status_of(daemon: Daemon) -> dict[str, Any]:
    with Observer(str(daemon.socket)) as observer:
        return observer.status()


def test_it_survives_trainer_and_daemon(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--engine", ENGINE)
    trainer = start_trainer(daemon)
    for _ in range(6):  # uses every slot more than once
        trainer.step()
        trainer.wait_durable(trainer.checkpoint())
    assert trainer.recover()["wrong"] == ""
    document = status_of(daemon)
    assert document["daemon"]["engine"] == ENGINE
    assert [rank["volume"]["engine"] for rank in document["ranks"]] == [ENGINE]
    trainer.kill()
    daemon.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 6
    assert again.check(6) == ""
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
    assert again.restore()["step"] == 1
    assert again.check(1) == ""


@pytest.mark.parametrize("fault", ["eio:flush:1", "eio:record-a:1", "eio:record-b:1"])
def test_an_error_of_the_disk(start_daemon: Start, start_trainer: Connect, fault: str) -> None:
    daemon = start_daemon("--engine", ENGINE, shim=fault)
    trainer = start_trainer(daemon)
    trainer.step()
    trainer.wait_durable(trainer.checkpoint())
    daemon.armed.touch()
    trainer.step()
    handle = trainer.checkpoint()
    trainer.evaluate(_settled)
    expected = "failed" if fault == "eio:record-a:1" else "durable"
    assert trainer.state(handle) == expected
    trainer.step()
    trainer.checkpoint()  # reports the failure; the volume is opened again
    trainer.evaluate(_settled)
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    trainer.kill()
    daemon.kill()
    daemon.shim = ""
    daemon.start()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 4
    assert again.check(4) == ""


def test_pwrite_stands_in_and_says_why(
    start_daemon: Start, start_trainer: Connect, disk: Path
) -> None:
    daemon = start_daemon("--engine", "pmem", "--allow-any-filesystem", storage=disk)
    trainer = start_trainer(daemon, [1000])
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    told = status_of(daemon)["daemon"]
    assert (told["engine"], told["engine_wanted"]) == ("pwrite", "pmem")
    assert told["engine_reason"].startswith("pmem: no persistent memory")
    daemon.logs("engine pwrite instead of pmem: no persistent memory")


def _settled(trainer: object) -> None:
    """Returns when the newest checkpoint is durable or has failed."""
    with contextlib.suppress(PccheckError):
        trainer.handles[-1].wait_durable(60)  # type: ignore[attr-defined]
