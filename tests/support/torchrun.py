"""Ranks of one job, started by torchrun in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from .daemon import Daemon

ROOT = Path(__file__).parents[2]


def torchrun(
    daemon: Daemon, job: str, ranks: int, *words: str, output: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """`words`: a program or "-m" and a module, and its flags. Both outputs go to `output`."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), *words,
    ]  # fmt: skip
    environment = os.environ | {
        "PCCHECK_SOCKET": str(daemon.socket), "PCCHECK_JOB": job, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
    )
