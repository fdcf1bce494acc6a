"""Restart without loss: what a daemon had copied before it was killed becomes durable after the
service manager has started it again, whether its trainer lives or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.support.manager import ServedDaemon
from tests.support.trainer import Trainer

from .conftest import SMALL

Connect = Callable[..., Trainer]
Serve = Callable[..., ServedDaemon]

MIB = 1 << 18
SLOW = ("--max-bandwidth", "8MiB")


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    def start(*flags: str, **options: object) -> ServedDaemon:
        return stack.enter_context(ServedDaemon(*SMALL, *flags, **options)).start()  # type: ignore[arg-type]

    return start


def test_copied_survives_the_daemon(serve: Serve, start_trainer: Connect) -> None:
    """The trainer is dead by then: only the descriptor store has the bytes."""
    daemon = serve(*SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    assert trainer.wait_copied(trainer.checkpoint()) in ("copied", "writing")
    daemon.kill()
    trainer.kill()
    assert any("-segment-" in name for name in daemon.manager.names())
    daemon.start()

    again = start_trainer(daemon, [6 * MIB])
    assert again.restore()["step"] == 1
    assert again.check(1) == ""
