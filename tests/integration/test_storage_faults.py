"""Write errors, flush errors and a full disk under the real daemon (by a preloaded shim)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer

Start = Callable[..., Daemon]
Connect = Callable[..., Trainer]


@pytest.mark.parametrize("fault", ["eio:data:2", "enospc:data:1", "eio:flush:1"])
def test_a_failed_write_moves_the_checkpoint_to_another_slot(
    start_daemon: Start, start_trainer: Connect, fault: str
) -> None:
    daemon = start_daemon(shim=fault)
    trainer = start_trainer(daemon)
    trainer.step()
    trainer.wait_durable(trainer.checkpoint())
    daemon.armed.touch()
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"
    trainer.kill()
    daemon.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 3
    assert again.check(3) == ""


@pytest.mark.parametrize("fault", ["eio:record-a:1", "eio:record-b:1"])
def test_after_a_failed_record_the_volume_is_read_again(
    start_daemon: Start, start_trainer: Connect, fault: str
) -> None:
    daemon = start_daemon(shim=fault)
    trainer = start_trainer(daemon)
    trainer.step()
    trainer.wait_durable(trainer.checkpoint())
    daemon.armed.touch()
    trainer.step()
    handle = trainer.checkpoint()
    trainer.step()
    last = None
    for _ in range(10):  # the failed one fails; the volume is reopened and goes on
        last = trainer.checkpoint()
        trainer.step()
        if trainer.evaluate(_settled) and trainer.state(last) == "durable":
            break
    assert trainer.state(handle) in ("failed", "durable", "superseded")
    assert trainer.state(last) == "durable"


def _settled(trainer: object) -> bool:
    handle = trainer.handles[-1]  # type: ignore[attr-defined]
    try:
        handle.wait_durable(30)
    except Exception:
        return False
    return True
