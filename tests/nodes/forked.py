"""torchrun in a host, forked with its workers from a process that has imported torch: what costs
seconds for each process happens once."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.support.hosts import ROOT, Host
from tests.support.programs import CONTEXT
from tests.support.waiting import until

_NAMESPACES = ("net", "uts", "mnt", "pid")


class Forked:
    """The launcher of one host, with the methods of a `Process`."""

    def __init__(
        self, host: Host, config: Mapping[str, Any], words: Sequence[object],
        environment: Mapping[str, str], output: Path,
    ) -> None:  # fmt: skip
        """`config` is that of LaunchConfig, `words` are the arguments of each rank."""
        assert host.apart is not None
        with Connection(os.open(output, os.O_WRONLY | os.O_CREAT), readable=False) as write:
            self._process = CONTEXT.Process(
                target=_enter,
                args=(host.apart.first.pid, write, dict(environment), dict(config),
                      [str(word) for word in words]),
            )  # fmt: skip
            self._process.start()

    @property
    def pid(self) -> int:
        """Of the launcher itself. Raises ProcessLookupError after its end."""
        outer = self._process.pid
        assert outer is not None
        found = until(lambda: psutil.Process(outer).children() or self.poll() is not None)
        if not isinstance(found, list):
            raise ProcessLookupError
        return found[0].pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _enter(
    first: int, output: Connection, environment: dict[str, str], config: dict[str, Any],
    words: list[str],
) -> NoReturn:  # fmt: skip
    """A child enters the namespaces of the host, and is the launcher."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    libc = ctypes.CDLL(None, use_errno=True)
    doors = [os.open(f"/proc/{first}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    for door in doors:
        if libc.setns(door, 0):
            raise OSError(ctypes.get_errno(), "setns")
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["tests.nodes.training", *words]
    code = 1
    try:
        _launch(config)
        code = 0
    except BaseException as error:
        print(repr(error), flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _launch(config: dict[str, Any]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from tests.nodes import training

    elastic_launch(LaunchConfig(**config, start_method="fork"), training.main)()
