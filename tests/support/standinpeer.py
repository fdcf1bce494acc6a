"""A process with the stand-in driver that obeys commands; for tests of the driver alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from . import standin
from .standin import Faults

ANSWER_LIMIT_S = 240.0


class Peer:
    """A process with the stand-in; `peer(function, ...)` calls function(cuda, ...) there."""

    def __init__(self, directory: Path, name: str, **options: Any) -> None:
        self.faults = Faults(directory / name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "pytest"])  # what tests import
        self._link, theirs = context.Pipe()
        environment = standin.environment(directory, faults=self.faults, **options)
        self.process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._link.send((function, arguments))
        assert self._link.poll(ANSWER_LIMIT_S), "the peer hangs"
        failed, answer = self._link.recv()
        if failed:
            raise AssertionError(answer)
        return answer

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._link.close()


def _serve(link: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    cuda = standin.load()
    while True:
        try:
            function, arguments = link.recv()
        except EOFError:
            return
        try:
            link.send((False, function(cuda, *arguments)))
        except Exception as error:
            link.send((True, repr(error)))
