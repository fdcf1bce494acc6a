"""A job without a name takes its script's, where there is a script."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pccheck.job.naming import identify
from pccheck_wire.errors import UsageError


@pytest.mark.parametrize(
    ("script", "name"),
    [("/a/train.py", "train"), ("run me.py", "run-me"), ("/a/pkg/__main__.py", "pkg")],
)
def test_the_script_names_the_job(script: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    made = identify(None, None, None, {})
    assert (made.job, made.guessed) == (name, True)
    assert identify(None, None, None, {"PCCHECK_JOB": "x"}).guessed is False


@pytest.mark.parametrize(
    "script",
    ["", "-c", "-", "/x/ipykernel_launcher.py", "/x/ray/_private/workers/default_worker.py"],
)
def test_without_a_script_the_job_must_be_named(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(UsageError, match="PCCHECK_JOB"):
        identify(None, None, None, {})
    assert identify("run7", None, None, {}).job == "run7"


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(UsageError, match='job=""'):
        identify("", None, None, {"PCCHECK_JOB": "x"})


def test_the_process_group_gives_the_rank_that_nothing_else_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = {"is_available": True, "is_initialized": True, "get_rank": 2, "get_world_size": 4}
    fake = SimpleNamespace(**{name: lambda value=value: value for name, value in group.items()})
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    made = identify("x", None, None, {})
    assert (made.rank, made.world_size, made.local_world_size) == (2, 4, 4)
    assert identify("x", None, None, {"LOCAL_WORLD_SIZE": "3"}).local_world_size == 3
    assert identify("x", None, None, {"WORLD_SIZE": "4"}).rank == 2  # a child of Lightning's Fabric
    for rank, world_size, environ, solo in (
        (0, 1, {}, False), (0, None, {}, False), (None, 1, {}, False), (None, None, {}, True),
        (None, None, {"RANK": "0", "WORLD_SIZE": "1"}, False),
    ):  # fmt: skip
        assert identify("x", rank, world_size, environ, solo=solo).world_size == 1
    fake.is_initialized = lambda: False
    assert identify("x", None, None, {}).world_size == 1
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert identify("x", None, None, {}).world_size == 1


@pytest.mark.parametrize(("rank", "world_size"), [("0", 1), (0, "1"), (0.0, 1), (0, None)])
def test_a_rank_that_is_no_int_is_refused(rank: object, world_size: object) -> None:
    world = {"WORLD_SIZE": "x"} if world_size is None else {}
    with pytest.raises(UsageError, match="is not a"):
        identify("x", rank, world_size, world)  # type: ignore[arg-type]


SRUN = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environ", "local"),
    [
        ({}, 5),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 5),
        ({"PMI_SIZE": "5", "MPI_LOCALNRANKS": "2"}, 2),
        (SRUN, 2),
        (SRUN | {"SLURM_NODEID": "2"}, 1),
        (SRUN | {"SLURM_NODEID": "3"}, 5),
        (SRUN | {"SLURM_NODEID": ""}, 5),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5"}, 5),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, 5),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),x"}, 5),
        # One task per node, which is torchrun, or a script that starts its ranks.
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 5),
        (SRUN | {"LOCAL_WORLD_SIZE": "4"}, 4),
    ],
)
def test_the_ranks_of_this_node_are_those_that_the_launcher_names(
    environ: dict[str, str], local: int
) -> None:
    assert identify("x", 0, 5, environ).local_world_size == local


def test_a_restart_of_one_node_leaves_one_launch_id() -> None:
    """torchrun counts a restart only on the node whose worker has failed."""
    run = {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert identify("x", 0, 2, run | {"LOCAL_WORLD_SIZE": "2"}).launch == "torchelastic-r-2"
    assert identify("x", 0, 2, run | {"LOCAL_WORLD_SIZE": "1"}).launch == "torchelastic-r"
