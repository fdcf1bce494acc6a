"""Trainings with Hugging Face's Trainer, killed with SIGKILL, continue bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.forked import Forks, printed
from tests.support.daemon import Daemon

KILLED = -signal.SIGKILL
EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}
BEST = EVALUATED | {
    "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1,
    "load_best_model_at_end": True, "restore_callback_states_from_checkpoint": True,
}  # fmt: skip
UNSEEDED = {"accelerator_config": {"use_seedable_sampler": False}}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.frameworks.hf_training") as forks:
        yield forks


@pytest.fixture
def run(forks: Forks, daemon: Daemon, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a training; what its first rank printed. All runs of a test have one daemon."""
    count = iter(range(100))

    def run(*, code: int = 0, with_daemon: bool = True, **options: Any) -> list[str]:
        options.setdefault("output_dir", str(tmp_path / ("killed" if with_daemon else "plain")))
        output = tmp_path / f"printed-{next(count)}"
        if with_daemon:
            options["socket"] = str(daemon.socket)
        codes = forks.run(output, **options)
        told = printed(output)
        assert codes == [code] * len(codes), "\n".join(told)
        return told

    return run


def numbers(told: list[str], first: int = 0, last: int = 10_000) -> list[str]:
    """The losses and metrics of steps."""
    some = [line for line in told if line[:1].isdigit()]
    return [line for line in some if first <= int(line.split()[0]) <= last]


def ends(told: list[str]) -> list[str]:
    return [line for line in told if line.startswith(("END", "BEST", "LOGS"))]


@pytest.mark.parametrize(
    ("settings", "every", "kill_at", "resumed_at"),
    [
        pytest.param(EVALUATED, 2, 9, 8, id="in mid-epoch, after an evaluation"),
        pytest.param(EVALUATED, 7, 8, 7, id="between two epochs"),
        pytest.param(UNSEEDED, 2, 11, 10, id="a sampler that draws from torch's generator"),
        pytest.param(UNSEEDED, 7, 15, 14, id="such a sampler, between two epochs"),
    ],
)
def test_a_killed_training_continues_with_the_same_numbers(
    run: Callable[..., list[str]],
    settings: dict[str, Any], every: int, kill_at: int, resumed_at: int,
) -> None:  # fmt: skip
    """With accumulation, a schedule, dropout, a shuffled loader, and a callback after ours that
    changes weights."""
    plain = run(with_daemon=False, settings=settings)
    killed = run(every=every, kill_at=kill_at, settings=settings, code=KILLED)
    assert "RESUME None" in killed
    assert numbers(killed) == numbers(plain, last=kill_at)
    resumed = run(every=every, settings=settings)
    assert f"RESUME checkpoint-{resumed_at}" in resumed
    assert numbers(resumed) == numbers(plain, first=resumed_at + 1)
    assert ends(resumed) == ends(plain)
    assert len(numbers(plain)) >= 21


def test_a_finished_training_trains_no_further_and_an_earlier_step_can_be_named(
    run: Callable[..., list[str]],
) -> None:
    plain = run(every=6)
    again = run(every=6)
    assert "RESUME checkpoint-21" in again and numbers(again) == []
    assert ends(again)[0] == ends(plain)[0]
    back = run(every=6, step=18)
    assert "RESUME checkpoint-18" in back
    assert numbers(back) == numbers(plain, first=19)


def test_a_second_run_in_one_process_is_warned_of(run: Callable[..., list[str]]) -> None:
    """A fold without a job name of its own gets the finished checkpoint of the fold before."""
    told = run(every=6, runs=2)
    assert [line for line in told if line.startswith("RESUME")] == [
        "RESUME None", "RESUME checkpoint-21",
    ]  # fmt: skip
    assert sum("an earlier client of this process saved" in line for line in told) == 1
    assert sum("job 'hf' continues from step 21" in line for line in told) == 1
    assert not any("an earlier client of this process saved" in line for line in run(every=6))


def test_best_model_early_stopping_and_checkpoints_of_trainer_itself(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Trainer keeps its own checkpoints as before; its best model and the patience of a callback
    are restored."""
    settings = BEST | {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    plain = run(with_daemon=False, settings=settings, patience=2)
    assert "BEST None None" not in plain and len(numbers(plain)) < 21
    run(kill_at=9, settings=settings, patience=2, code=KILLED)
    resumed = run(settings=settings, patience=2)
    assert "RESUME checkpoint-8" in resumed
    assert numbers(resumed) == numbers(plain, first=9)
    assert ends(resumed) == ends(plain)
    kept = [{path.name for path in (tmp_path / name).iterdir()} for name in ("plain", "killed")]
    assert kept[0] == kept[1]


def test_two_ranks_resume_one_step(run: Callable[..., list[str]], tmp_path: Path) -> None:
    """Each has its own random numbers: dropout and the batches differ between ranks."""

    def start(**options: Any) -> list[str]:
        return run(ranks=2, settings={"ddp_backend": "gloo"}, **options)

    plain = start(with_daemon=False)
    start(kill_at=5, code=KILLED)
    resumed = start()
    assert "RESUME checkpoint-4" in resumed
    assert numbers(resumed) == numbers(plain, first=5)
    assert ends(resumed) == ends(plain)


def test_one_client_for_a_job(run: Callable[..., list[str]]) -> None:
    """The callback uses the user's own client; a newer client ends the checkpoints, not the
    training."""
    run(client=True, every=4, kill_at=9, code=KILLED)
    clash = "\n".join(run(clash=True, every=4))
    assert "RESUME checkpoint-8" in clash
    assert "training continues WITHOUT checkpoints from step 12" in clash
    assert "PCcheckCallback(client=client)" in clash and "END 21" in clash
    plain = run(with_daemon=False)
    resumed = run(client=True, every=4)
    assert "RESUME checkpoint-8" in resumed and ends(resumed) == ends(plain)


def test_what_is_wrong_is_said(run: Callable[..., list[str]]) -> None:
    assert "every_n_steps=0 is not a number of steps" in "\n".join(run(every=0, code=1))
    run(every=6)
    assert "begins at step 0, although" not in "\n".join(run(every=6))
    ignored = "\n".join(run(every=6, ignored=True))
    assert "training begins at step 0, although pccheck_resume() found a checkpoint" in ignored
