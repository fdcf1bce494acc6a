"""A training that is killed in the middle of an epoch goes on with the very same numbers, although
its loader draws from the generators when it makes an iterator."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable

import pytest

from tests.support.daemon import Daemon
from tests.support.programs import Program

STEPS = 20  # of 8 in an epoch


def ran(*arguments: object, code: int = 0) -> list[str]:
    with Program("tests.support.loadertraining", *arguments) as program:
        said = program.finish()
    assert program.returncode == code, said
    return [line for line in said.splitlines() if line.startswith(("FROM ", "LOSS "))]


LOADERS = [
    "plain",
    "wrapped",
    pytest.param(
        "torchdata",
        marks=pytest.mark.skipif(not importlib.util.find_spec("torchdata"), reason="not installed"),
    ),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", LOADERS)
def test_losses_are_equal_bit_for_bit(
    start_daemon: Callable[..., Daemon], loader: str, workers: int
) -> None:
    socket = start_daemon().socket
    undisturbed = ran("", loader, workers, STEPS, 3)
    killed = ran(socket, loader, workers, STEPS, 3, 13, code=-signal.SIGKILL)
    assert killed[0] == "FROM 1" and killed[1:] == undisturbed[:13]
    resumed = ran(socket, loader, workers, STEPS, 3)
    assert resumed[0] == "FROM 13" and resumed[1:] == undisturbed[12:]


@pytest.mark.parametrize("loader", [item for item in LOADERS if item != "wrapped"])
def test_a_checkpoint_at_the_end_of_an_epoch(
    start_daemon: Callable[..., Daemon], loader: str
) -> None:
    """The next iterator draws in the undisturbed training, too."""
    socket = start_daemon().socket
    undisturbed = ran("", loader, 0, STEPS, 8)
    ran(socket, loader, 0, STEPS, 8, 9, code=-signal.SIGKILL)
    assert ran(socket, loader, 0, STEPS, 8) == ["FROM 9", *undisturbed[8:]]
