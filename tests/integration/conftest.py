"""Fixtures: daemons and trainers that end with the test, whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.daemon import Daemon
from tests.support.gpunode import Node
from tests.support.trainer import Trainer

#: Small enough that a checkpoint of a few MiB has many chunks and blocks.
SMALL = ("--chunk", "1MiB", "--block-bytes", "64KiB", "--dram", "64MiB")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_daemon(stack: ExitStack) -> Callable[..., Daemon]:
    """A started daemon; extra flags come after the small geometry and win."""

    def start(*flags: str, shim: str = "", storage: object = None) -> Daemon:
        return stack.enter_context(Daemon(*SMALL, *flags, shim=shim, storage=storage)).start()  # type: ignore[arg-type]

    return start


@pytest.fixture
def start_trainer(stack: ExitStack) -> Callable[..., Trainer]:
    """A trainer connected to a daemon; `counts` are float32 elements per tensor."""

    def start(daemon: Daemon, counts: list[int] | None = None, **options: object) -> Trainer:
        environment = options.pop("environment", {})
        trainer = stack.enter_context(Trainer(**environment))  # type: ignore[arg-type]
        options.setdefault("job", "job")
        trainer.open(counts or [300_000, 7, 90_001], socket=str(daemon.socket), **options)
        return trainer

    return start


@pytest.fixture
def start_node(stack: ExitStack) -> Callable[..., Node]:
    """A daemon with GPUs; see Node for the options."""

    def start(*flags: str, **options: object) -> Node:
        return stack.enter_context(Node(*SMALL, *flags, **options)).start()  # type: ignore[arg-type]

    return start
