"""Who this process is, by arguments, PCCHECK_JOB, torchrun, Slurm or torch.distributed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pccheck_wire.errors import UsageError
from pccheck_wire.messages import RANKS_MAX, require_job_name

#: What `sys.argv[0]` comes to where no script runs: `python -c` and a prompt, notebooks, workers.
_NO_SCRIPTS = ("", "c", "ipython", "ipykernel_launcher", "colab_kernel_launcher", "default_worker")
#: Variables of Open MPI, and of MPICH and Intel MPI: all ranks, and those of this node.
_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
)
#: The number of a rank on its node: of torchrun, Open MPI, MPICH and Intel MPI, Slurm.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True, slots=True)
class Identity:
    """The key of a volume is (uid, job, rank). Ranks of one start share `launch`."""

    job: str
    rank: int
    world_size: int
    local_world_size: int
    launch: str
    guessed: bool = False  #: the job has no name but the script's
    local_rank: int = 0  # among the ranks of this node

    @property
    def is_wide(self) -> bool:
        """Some ranks of the job are on other nodes."""
        return self.local_world_size < self.world_size

    @property
    def part(self) -> tuple[int, int, int]:
        """Which part of a node's one copy of replicated state this rank stores, of how many, and
        which rank of the job stores the first. Launchers number the ranks of a node in a row; the
        daemon refuses a start whose ranks are otherwise."""
        return self.local_rank, self.local_world_size, self.rank - self.local_rank


def identify(
    job: str | None,
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str] = os.environ,
    *,
    solo: bool = False,
) -> Identity:
    """Arguments, else the environment, else torch.distributed unless `solo`. Raises UsageError."""
    if job == "":
        raise UsageError(
            'job="" is not a name', hint="leave job= out to use PCCHECK_JOB or the script's name"
        )
    if job is not None and not isinstance(job, str):
        raise UsageError(f"job={job!r} is not a str", hint='job="NAME", or leave it out')
    given = job or environ.get("PCCHECK_JOB")
    name = given or _script_name()
    require_job_name(name)
    if rank is None and world_size is None and not (solo or environ.get("RANK")):
        rank, world_size = _in_process_group()  # Lightning's children have WORLD_SIZE, and no RANK
    size = _number("WORLD_SIZE", 1, environ) if world_size is None else world_size
    mine = _number("RANK", 0, environ) if rank is None else rank
    for argument, value in (("rank", mine), ("world_size", size)):
        if not isinstance(value, int):
            raise UsageError(
                f"{argument}={value!r} is not an int", hint=f"{argument}=int(...), or leave it out"
            )
    if not 0 <= mine < size <= RANKS_MAX:
        raise UsageError(
            f"rank must be from 0 to world_size - 1, not {mine} with world_size {size}",
            hint="see RANK and WORLD_SIZE, which torchrun sets, or pass rank= and world_size=",
        )
    local = min(max(1, _local_world_size(size, environ)), size)
    launch = _launch(environ, one_node=local == size)
    place = _local_rank(mine, local, environ)
    return Identity(name, mine, size, local, launch, guessed=not given, local_rank=place)


def _in_process_group() -> tuple[int, int] | tuple[None, None]:
    """Rank and size of torch's default group, which mp.spawn's processes make from arguments."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None, None
    return distributed.get_rank(), distributed.get_world_size()


def _script_name() -> str:
    """`python -m a.b` and `python a/b.py` are both "b". Raises UsageError where there is no script
    of the user's: all notebooks would be one job."""
    path = Path(sys.argv[0] if sys.argv else "")
    stem = path.parent.name if path.name == "__main__.py" else path.stem
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-")[:128]
    if cleaned in _NO_SCRIPTS:
        raise UsageError(
            "the job has no name: in a notebook, an interactive session, `python -c` or a worker "
            "there is no script to name it after",
            hint='use PCcheckClient(job="NAME"), or set PCCHECK_JOB',
        )
    return cleaned


def _number(name: str, default: int, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(
            f"{name}={text!r} in the environment is not a number",
            hint=f"unset {name}, or set it as torchrun does",
        ) from None


def _local_world_size(size: int, environ: Mapping[str, str]) -> int:
    """How many of the job's `size` ranks run on this node; all, unless the launcher tells. The
    variables of mpirun and srun count if they are about as many ranks: srun may start one torchrun
    for each node."""
    if environ.get("LOCAL_WORLD_SIZE"):
        return _number("LOCAL_WORLD_SIZE", size, environ)
    for total, local in _MPI:
        if environ.get(local) and _number(total, 0, environ) == size:
            return _number(local, size, environ)
    if _number("SLURM_STEP_NUM_TASKS", 0, environ) == size:
        tasks = _slurm_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = _number("SLURM_NODEID", -1, environ)
        if sum(tasks) == size and 0 <= node < len(tasks):
            return tasks[node]
    return size


def _local_rank(rank: int, local: int, environ: Mapping[str, str]) -> int:
    """This rank's number among those of its node."""
    known = (name for name in _LOCAL_RANKS if environ.get(name))
    found = _number(next(known, "LOCAL_RANK"), rank % local, environ)
    return found if 0 <= found < local else rank % local


def _slurm_tasks(text: str) -> list[int]:
    """By node: "4(x2),1" is [4, 4, 1]. [] for another text."""
    tasks: list[int] = []
    for run in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", run)
        if found is None:
            return []
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def _launch(environ: Mapping[str, str], *, one_node: bool) -> str:
    """Equal for the ranks of one start of the job, on one node different for the next; "" when
    unknown. torchrun counts a restart only on the node whose worker has failed."""
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        count = f"-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if one_node else ""
        return f"torchelastic-{run}{count}"[:200]
    if run := environ.get("SLURM_JOB_ID"):
        step = environ.get("SLURM_STEP_ID", "")
        return f"slurm-{run}-{environ.get('SLURM_RESTART_COUNT', '0')}-{step}"[:200]
    return ""
