"""Trainings with DeepSpeed, killed with SIGKILL, continue bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.forked import Forks, printed
from tests.support.daemon import Daemon

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.frameworks.deepspeed_training") as forks:
        yield forks


@pytest.fixture
def run(forks: Forks, daemon: Daemon, tmp_path: Path) -> Callable[..., list[list[str]]]:
    """Runs a training; what each rank printed. All runs of a test have one daemon."""

    def run(
        *,
        code: int = 0,
        with_daemon: bool = True,
        ranks: int = 1,
        stopping: bool = False,
        **options: Any,
    ) -> list[list[str]]:
        if with_daemon:
            options["socket"] = str(daemon.socket)
        if stopping:
            options["daemon"] = daemon.pid
        options.setdefault("folder", str(tmp_path / "checkpoints"))
        output = tmp_path / "printed"
        codes = forks.run(output, ranks=ranks, **options)
        said = [printed(output, rank) for rank in range(ranks)]
        assert codes == [code] * ranks, "\n".join(line for lines in said for line in lines)
        return said

    return run


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {"stage": 1, "half": True}, id="ZeRO-1 in bfloat16, 2 ranks"),
        pytest.param(2, {"stage": 2}, id="ZeRO-2, 2 ranks"),
        pytest.param(2, {"stage": 3}, id="ZeRO-3, 2 ranks"),
        pytest.param(1, {"stage": 0, "half": True}, id="no ZeRO"),
    ],
)
def test_a_killed_training_continues_with_the_same_numbers(
    run: Callable[..., list[list[str]]], tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    plain = run(with_daemon=False, ranks=ranks, folder=str(tmp_path / "plain"), **options)
    killed = run(ranks=ranks, kill_at=5, code=KILLED, **options)
    assert [only("FROM", lines) for lines in killed] == [["FROM 0 None"]] * ranks
    resumed = run(ranks=ranks, **options)
    for before, after in zip(plain, resumed, strict=True):
        assert only("FROM", after)[0].startswith("FROM 4 /global_step4/")
        assert only("LOSS", after) == only("LOSS", before)[8:]
    assert len(only("LOSS", plain[0])) > 20


@pytest.mark.parametrize("between", ["counted", "chosen"])
def test_a_checkpoint_between_micro_batches_is_skipped(
    run: Callable[..., list[list[str]]], tmp_path: Path, between: str
) -> None:
    """So a run that saves there, too, resumes from a whole step."""
    plain = run(with_daemon=False, folder=str(tmp_path / "plain"), ranks=2, stage=2)
    killed = run(kill_at=4, code=KILLED, ranks=2, stage=2, between=between)
    for lines in killed:
        assert sum("between the micro-batches of a step" in line for line in lines) == 1
    resumed = run(ranks=2, stage=2)
    for before, after in zip(plain, resumed, strict=True):
        assert only("FROM", after)[0].startswith("FROM 4 /global_step4/")
        assert only("LOSS", after) == only("LOSS", before)[8:]


def test_a_checkpoint_is_that_of_its_step_although_it_is_copied_later(
    run: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    """The next update waits for the copy. What changes before that is copied at once: buffers, and
    tensors of the script."""
    options = {"stage": 2, "hidden": 40_000}
    plain = run(with_daemon=False, folder=str(tmp_path / "plain"), **options)[0]
    lines = run(stopping=True, stop_at=5, **options)[0]
    order = [line.split()[0] for line in lines if line.startswith(("SAVE", "GATE", "UPDATE"))]
    assert order == ["GATE", *["UPDATE", "UPDATE", "SAVE", "GATE"] * 2, "UPDATE"]
    resumed = run(**options)[0]
    assert "FROM 4 /global_step4/mp_rank_00_model_states.pt" in resumed
    assert only("LOSS", resumed) == only("LOSS", plain)[8:]


def test_tags_and_what_stays_in_the_folder(
    run: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    """DeepSpeed's own checkpoints are loaded until PCcheck has one, and later by their tags."""
    run(with_daemon=False, stop_at=2)
    folder = tmp_path / "checkpoints"
    before = {path.name for path in folder.iterdir()}
    lines = run(kill_at=4, code=KILLED)[0]
    assert only("FROM", lines) == ["FROM 2 /global_step2/mp_rank_00_model_states.pt"]
    assert {path.name for path in folder.iterdir()} == before
    assert (folder / "latest").read_text() == "global_step2"
    lines = run(load={"tag": "global_step4"}, stop_at=6)[0]
    assert "FROM 4 /global_step4/mp_rank_00_model_states.pt" in lines
    assert "0.weight" in torch.load(folder / "weights.pt")
    lines = run(load={"tag": "global_step2"}, stop_at=2)[0]
    assert "FROM 2 /global_step2/mp_rank_00_model_states.pt" in lines


def test_what_is_wrong_is_said(run: Callable[..., list[list[str]]]) -> None:
    """Also that parameters alone can be loaded: the rest of the state stays as it is."""
    lines = "\n".join(run(own=True, code=1)[0])
    assert "call engine.save_checkpoint(directory) on every rank" in lines
    lines = "\n".join(run(unnamed=True, code=1)[0])
    assert "mp_rank_00_model_states.pt.given: a value of type argparse.Namespace cannot" in lines
    lines = "\n".join(run(closed=True, stop_at=4)[0])
    assert "training continues WITHOUT checkpoints" in lines and "LOSS 4" in lines
    saved = run(stage=2, stop_at=4)[0]
    lines = "\n".join(run(stage=2, unnamed=True, code=1)[0])
    assert "mp_rank_00_model_states.pt.given was an object of argparse.Namespace" in lines
    assert "install(engine, classes=[...])" in lines
    lines = "\n".join(run(stage=2, load={"tag": "best"}, code=1)[0])
    assert "job 'deepspeed' has no checkpoint with the tag 'best'" in lines
    lines = run(stage=2, load={"load_module_only": True}, stop_at=2)[0]
    assert only("FROM", lines)[0].startswith("FROM 0 /global_step4/")
    assert only("LOADED", lines)[0].split()[-1] == only("SAVE 4", saved)[0].split()[-1]
    lines = "\n".join(line for lines in run(stage=2, ranks=2, code=1) for line in lines)
    assert "start the job with 1 rank" in lines


def only(what: str, lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(what)]
