"""Programs that import torch, in processes of their own. A server process that has imported torch
forks them, which makes hundreds of them cheap."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [f"tests.support.{name}" for name in ("trainer", "gputrainer", "frozen")]
)
inside = False  #: whether this process is such a program


class Program:
    """`python -m MODULE WORDS`, with the methods of subprocess.Popen. Calls `main` of the module.
    With `ranks` the process is torchrun, and starts that many. The end of the block kills it."""

    def __init__(
        self, module: str, *words: object, ranks: int = 0,
        environment: dict[str, str] | None = None, output: int | None = None, cwd: Path = ROOT,
    ) -> None:  # fmt: skip
        """stdout and stderr go to the file descriptor `output`, by default to `self.stdout`."""
        read, write = os.pipe() if output is None else (-1, os.dup(output))
        self.stdout = open(read) if output is None else None  # noqa: SIM115, PTH123
        theirs = Connection(write, readable=False)
        if inside:  # the same server serves this process, which would else start another
            forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PCCHECK_")}
        self._process = CONTEXT.Process(
            target=_start, args=(theirs, ours | (environment or {}), cwd, ranks, module, words)
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def line(self) -> str:
        """The next line that it prints."""
        assert self.stdout is not None
        return self.stdout.readline()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self.returncode

    def finish(self) -> str:
        """Waits for the end; returns what the program has printed."""
        assert self.stdout is not None
        said = self.stdout.read()
        self.wait()
        return said

    def terminate(self) -> None:
        self._process.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.kill()
        self._process.join()
        if self.stdout is not None:
            self.stdout.close()


def script(text: str, *words: object, environment: dict[str, str] | None = None) -> Program:
    """`python -c TEXT WORDS`."""
    return Program("tests.support.snippet", text, *words, environment=environment)


def python(
    what: str, *words: object, environment: dict[str, str] | None = None, cwd: Path = ROOT
) -> Program:
    """`python WHAT WORDS` for a file, `python -m WHAT WORDS` for a module."""
    return Program("tests.support.python", what, *words, environment=environment, cwd=cwd)


def _start(
    output: Connection, environment: dict[str, str], cwd: Path, ranks: int, module: str,
    words: tuple[object, ...],
) -> None:  # fmt: skip
    import torch

    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # inherited from the server
    global inside
    inside = True
    sys.argv = [module, *map(str, words)]
    main: Callable[[], None] = importlib.import_module(module).main
    try:
        _launch(main, ranks) if ranks else main()
    finally:
        atexit._run_exitfuncs()


def _launch(main: Callable[[], None], ranks: int) -> None:
    """Acts as `torchrun --standalone`, but forks the workers. The address is a number: a thread of
    the launcher that resolves a name when a worker is forked leaves glibc's lock held there."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    place: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    config = LaunchConfig(
        1, 1, ranks, run_id=str(uuid.uuid4()), max_restarts=0, start_method="fork",
        local_addr="127.0.0.1", **place,
    )  # fmt: skip
    elastic_launch(config, main)()
