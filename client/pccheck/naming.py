"""Who this process is: job, rank and launch, from arguments, PCCHECK_JOB, torchrun or Slurm."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pccheck_wire.errors import UsageError
from pccheck_wire.messages import JOB_PATTERN, RANKS_MAX


@dataclass(frozen=True, slots=True)
class Identity:
    """The key of a volume is (uid, job, rank). Ranks of one start share `launch`."""

    job: str
    rank: int
    world_size: int
    local_world_size: int
    launch: str


def identify(
    job: str | None,
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Identity:
    """Arguments first, then the environment. Raises UsageError."""
    name = job or environ.get("PCCHECK_JOB") or _script_name()
    if not re.fullmatch(JOB_PATTERN, name):
        raise UsageError(
            f"{name[:140]!r} cannot be a job's name",
            hint="use letters, digits, '.', '_' and '-', at most 128, and no '.' or '-' in front",
        )
    size = _number("WORLD_SIZE", 1, environ) if world_size is None else world_size
    mine = _number("RANK", 0, environ) if rank is None else rank
    if not 0 <= mine < size <= RANKS_MAX:
        raise UsageError(
            f"rank {mine} with world_size {size}",
            hint="rank counts from 0 and is below world_size; torchrun sets RANK and WORLD_SIZE",
        )
    local = min(max(1, _number("LOCAL_WORLD_SIZE", size, environ)), size)
    return Identity(name, mine, size, local, _launch(environ))


def _script_name() -> str:
    """`python -m a.b` and `python a/b.py` are both "b"; an interactive session is "python"."""
    path = Path(sys.argv[0] if sys.argv else "")
    stem = path.parent.name if path.name == "__main__.py" else path.stem
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-")
    return cleaned[:128] or "python"


def _number(name: str, default: int, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None


def _launch(environ: Mapping[str, str]) -> str:
    """Equal for the ranks of one start of the job, different for the next; "" when unknown."""
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchelastic-{run}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"[:200]
    if run := environ.get("SLURM_JOB_ID"):
        step = environ.get("SLURM_STEP_ID", "")
        return f"slurm-{run}-{environ.get('SLURM_RESTART_COUNT', '0')}-{step}"[:200]
    return ""
