"""Ranks of one job, started by torchrun in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

from .daemon import Daemon
from .programs import ROOT, Program


def variables(daemon: Daemon, job: str) -> dict[str, str]:
    return {"PCCHECK_SOCKET": str(daemon.socket), "PCCHECK_JOB": job, "OMP_NUM_THREADS": "1"}


def torchrun(daemon: Daemon, job: str, ranks: int, module: str) -> subprocess.Popen[str]:
    """The command itself. Both outputs go to a pipe."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "-m", module,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | variables(daemon, job) | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def started(
    daemon: Daemon, job: str, ranks: int, module: str, *words: object, output: IO[str] | None = None
) -> Program:
    """Does the same without importing torch for each rank."""
    number = None if output is None else output.fileno()
    return Program(module, *words, ranks=ranks, environment=variables(daemon, job), output=number)
