"""Trainings in processes of their own, without importing a framework for each of them.

    python -m tests.frameworks.forked MODULE

imports the module, then forks for every request (a line of JSON on stdin) and calls its `run` with
the request's options in the child, or in several that are ranks of one job.

Workers of pytest-xdist get that process as a fork of one that has imported all frameworks: an
import of torch and a framework takes five to seven seconds of CPU time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Self

import torch

from tests.support import workers
from tests.support.programs import ROOT

SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
#: With the frameworks: which of them are installed is the tests' business.
MODULES = (
    "tests.frameworks.deepspeed_training", "tests.frameworks.accelerate_training",
    "tests.frameworks.hf_training", "tests.frameworks.hf_shapes", "tests.support.lightningrun",
)  # fmt: skip


class Forks:
    """For tests: the process that forks."""

    def __init__(self, module: str, **variables: str) -> None:
        ours = {k: v for k, v in os.environ.items() if not k.startswith("PCCHECK_")}
        environment = ours | SETTINGS | variables
        requests, asks = os.pipe()
        answers, tells = os.pipe()
        self._asks, self._answers = os.fdopen(asks, "w"), os.fdopen(answers)
        self._process = None
        if place := os.environ.get(workers.PLACE):
            request = json.dumps([module, environment]).encode()
            workers.ask_for_frameworks(place, request, [requests, tells, 2])
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.frameworks.forked", module], cwd=ROOT,
                env=environment, stdin=requests, stdout=tells,
            )  # fmt: skip
        os.close(requests)
        os.close(tells)

    def run(self, output: Path, *, ranks: int = 1, **options: Any) -> list[int]:
        """The exit codes. What rank r prints goes to `output` with r as its suffix. A `socket` for
        each rank makes each rank a node."""
        self.start(output, ranks=ranks, **options)
        return self.wait()

    def start(self, output: Path, *, ranks: int = 1, **options: Any) -> list[int]:
        """The process ids of the ranks. `wait()` has to follow."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        request = {"output": str(output), "ranks": ranks, "port": port, "options": options}
        print(json.dumps(request), file=self._asks, flush=True)
        return self._answer()

    def wait(self) -> list[int]:
        """The exit codes."""
        return self._answer()

    def _answer(self) -> list[int]:
        numbers = json.loads(self._answers.readline())
        assert isinstance(numbers, list)
        return numbers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._asks.close()
        self._answers.read()  # until the process ends
        self._answers.close()
        if self._process is not None:
            self._process.wait()


def printed(output: Path, rank: int = 0) -> list[str]:
    return output.with_suffix(f".{rank}").read_text().splitlines()


def _child(request: dict[str, Any], rank: int, run: Any) -> int:
    with Path(request["output"]).with_suffix(f".{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["MASTER_PORT"] = str(request["port"])
    ranks, options = request["ranks"], request["options"]
    nodes = options.get("socket") if isinstance(options.get("socket"), list) else None
    if nodes is not None:
        options["socket"] = nodes[rank]
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
            LOCAL_RANK="0" if nodes else str(rank), LOCAL_WORLD_SIZE="1" if nodes else str(ranks),
        )  # fmt: skip
    try:
        run(**options)
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


def serve(control: socket.socket) -> None:
    """For all tests: forks the process of a `Forks` for each message, until `control` ends."""
    os.environ.update(SETTINGS)
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the forks automatically
    while True:
        request, given, _, _ = socket.recv_fds(control, 1 << 17, 3)
        if not request:
            return
        if os.fork() == 0:
            break
        for each in given:
            os.close(each)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, each in enumerate(given):
        os.dup2(each, number)
        os.close(each)
    module, environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    main(module)


def _freeze() -> None:
    """Accelerate, Lightning and DeepSpeed call gc.collect() again and again: in the children that
    leaves alone what was imported, a million objects."""
    gc.collect()
    gc.freeze()


def main(module: str) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some frameworks print while they are imported
    run = importlib.import_module(module).run
    importlib.import_module("torch._dynamo")  # optimizers import it
    if "accelerate" in sys.modules:  # which imports it
        with contextlib.suppress(ImportError):
            importlib.import_module("deepspeed")
    _freeze()
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(request, rank, run) for rank in range(request["ranks"])]
        print(json.dumps(children), file=answers, flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
