"""Trainings in processes of their own, without importing a framework for each of them.

    python -m tests.frameworks.forked MODULE

imports the module, then forks for every request (a line of JSON on stdin) and calls its `run` with
the request's options in the child, or in several that are ranks of one job.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Self

import torch

from tests.support.programs import ROOT


class Forks:
    """For tests: the process that forks."""

    def __init__(self, module: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PCCHECK_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.frameworks.forked", module], cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, output: Path, *, ranks: int = 1, **options: Any) -> list[int]:
        """The exit codes. What rank r prints goes to `output` with r as its suffix."""
        self.start(output, ranks=ranks, **options)
        return self.wait()

    def start(self, output: Path, *, ranks: int = 1, **options: Any) -> list[int]:
        """The process ids of the ranks. `wait()` has to follow."""
        assert self._process.stdin is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        request = {"output": str(output), "ranks": ranks, "port": port, "options": options}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> list[int]:
        """The exit codes."""
        return self._answer()

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        numbers = json.loads(self._process.stdout.readline())
        assert isinstance(numbers, list)
        return numbers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def printed(output: Path, rank: int = 0) -> list[str]:
    return output.with_suffix(f".{rank}").read_text().splitlines()


def _child(request: dict[str, Any], rank: int, run: Any) -> int:
    with Path(request["output"]).with_suffix(f".{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["MASTER_PORT"] = str(request["port"])
    if request["ranks"] > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["ranks"]),
            LOCAL_WORLD_SIZE=str(request["ranks"]), MASTER_ADDR="127.0.0.1",
        )  # fmt: skip
    try:
        run(**request["options"])
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _fork(request: dict[str, Any], rank: int, run: Any) -> int:
    child = os.fork()
    if child == 0:
        os._exit(_child(request, rank, run))
    return child


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some frameworks print while they are imported
    run = importlib.import_module(sys.argv[1]).run
    importlib.import_module("torch._dynamo")  # optimizers import it
    if "accelerate" in sys.modules:  # which imports it
        with contextlib.suppress(ImportError):
            importlib.import_module("deepspeed")
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(request, rank, run) for rank in range(request["ranks"])]
        print(json.dumps(children), file=answers, flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    main()
