"""The promises with every storage engine, and how the daemon comes by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import NativeError, choose_engine
from pccheck_wire.errors import PccheckError
from pccheckctl.commands import status
from pccheckctl.source.observer import Observer
from tests.support.daemon import Daemon
from tests.support.trainer import Trainer

Start = Callable[..., Daemon]
Connect = Callable[..., Trainer]

MIB = 1 << 18  # float32 elements of one MiB
SLOW = ("--max-bandwidth", "12MiB")


@pytest.fixture(params=["uring", "mmap"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = str(request.param)
    if name == "uring" and not _may_use_rings(tmp_path):
        pytest.skip("io_uring is not allowed here")
    return name


def _may_use_rings(place: Path) -> bool:
    try:
        return choose_engine(place, allow_buffered=True).measured["uring"] != "UNSUPPORTED"
    except (OSError, NativeError):
        return False


def status_of(daemon: Daemon) -> dict[str, Any]:
    with Observer(str(daemon.socket)) as observer:
        return observer.status()


def test_it_survives_trainer_and_daemon(
    start_daemon: Start, start_trainer: Connect, engine: str
) -> None:
    daemon = start_daemon("--engine", engine)
    trainer = start_trainer(daemon)
    for _ in range(6):  # every slot more than once
        trainer.step()
        trainer.wait_durable(trainer.checkpoint())
    assert trainer.recover()["wrong"] == ""
    document = status_of(daemon)
    assert document["daemon"]["engine"] == engine
    assert [rank["volume"]["engine"] for rank in document["ranks"]] == [engine]
    trainer.kill()
    daemon.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 6
    assert again.check(6) == ""
    assert again.wait_durable(again.checkpoint(step=7)) == "durable"


def test_what_is_copied_is_made_durable_at_the_end(
    start_daemon: Start, start_trainer: Connect, engine: str
) -> None:
    daemon = start_daemon("--engine", engine, *SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    trainer.wait_copied(trainer.checkpoint())
    trainer.kill()
    assert daemon.stop() == 0
    daemon.start("--engine", "pwrite")  # what one has written, another one reads
    again = start_trainer(daemon, [6 * MIB])
    assert again.restore()["step"] == 1
    assert again.check(1) == ""


@pytest.mark.parametrize("fault", ["eio:flush:1", "eio:record-a:1", "eio:record-b:1"])
def test_an_error_of_the_disk(
    start_daemon: Start, start_trainer: Connect, engine: str, fault: str
) -> None:
    daemon = start_daemon("--engine", engine, shim=fault)
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
    trainer.checkpoint()  # tells of the failure, and has the volume opened again
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


def test_auto_is_measured_before_the_first_volume(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--engine", "auto")
    trainer = start_trainer(daemon)
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    document = status_of(daemon)
    told = document["daemon"]
    assert told["engine_wanted"] == "auto"
    assert told["engine_reason"].startswith("auto: ")
    if told["engine_measured"] is None:  # the disk was busy
        assert "not measured within" in told["engine_reason"]
    else:
        assert told["engine_measured"]["engine"] == told["engine"]
    assert document["ranks"][0]["volume"]["engine"] == told["engine"]
    assert f"engine   {told['engine']} (auto: " in status.as_text(document)
    assert daemon.stop() == 0


def test_auto_without_room_is_pwrite(
    start_daemon: Start, start_trainer: Connect, disk: Path
) -> None:
    daemon = start_daemon("--engine", "auto", "--allow-any-filesystem", storage=disk)
    trainer = start_trainer(daemon, [1000])
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    told = status_of(daemon)["daemon"]
    assert told["engine"] == "pwrite"
    assert told["engine_reason"] == "auto: not measured: 64 MiB of room are needed for a moment"


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
    assert "engine pwrite instead of pmem: no persistent memory" in daemon.log.read_text()


def _settled(trainer: object) -> None:
    """Returns when the newest checkpoint is durable or has failed."""
    with contextlib.suppress(PccheckError):
        trainer.handles[-1].wait_durable(30)  # type: ignore[attr-defined]
