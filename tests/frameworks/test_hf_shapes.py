"""Trainings with Hugging Face's Trainer that change something between two steps, killed with
SIGKILL, continue bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.forked import Forks, printed
from tests.support.daemon import Daemon

PLAIN: dict[str, list[str]] = {}  # what each shape prints without PCcheck


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.frameworks.hf_shapes") as forks:
        yield forks


@pytest.fixture
def run(forks: Forks, daemon: Daemon, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a training; what it printed. All runs of a test have one daemon."""
    count = iter(range(100))

    def run(shape: str, *, code: int = 0, with_daemon: bool = True, **options: Any) -> list[str]:
        output = tmp_path / f"printed-{next(count)}"
        socket = str(daemon.socket) if with_daemon else ""
        codes = forks.run(
            output, shape=shape, socket=socket, output_dir=str(tmp_path / "out"), **options
        )
        told = printed(output)
        assert set(codes) == {code}, "\n".join(told)
        return told

    return run


def numbers(told: list[str], after: int = 0) -> list[str]:
    """The losses and metrics of steps, and the end."""
    some = [line for line in told if line[:1].isdigit() and after < int(line.split()[0])]
    return some + [line for line in told if line.startswith("END")]


def resumes_exactly(
    run: Callable[..., list[str]], shape: str, kill_at: int, **options: Any
) -> list[str]:
    """What the killed and the resumed run printed."""
    plain = PLAIN.get(shape) or PLAIN.setdefault(shape, run(shape, with_daemon=False))
    killed = run(shape, kill_at=kill_at, code=-signal.SIGKILL, **options)
    assert numbers(killed) == numbers(plain)[: len(numbers(killed))]
    resumed = run(shape, **options)
    saved_at = int(next(line for line in resumed if line.startswith("RESUME")).split()[1])
    assert saved_at == kill_at
    assert numbers(resumed, saved_at) == numbers(plain, saved_at)
    assert len(numbers(plain, saved_at)) > 4
    return killed + resumed


@pytest.mark.parametrize("saver_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize(("shape", "kill_at"), [
    ("put back as a step begins", 9), ("put back as an epoch begins", 5),
    ("changed as a step begins", 7), ("changed as an epoch begins", 7),
    ("accumulation, changed between", 7),
])  # fmt: skip
def test_callbacks_that_change_weights_resume_in_both_orders(
    run: Callable[..., list[str]], shape: str, kill_at: int, saver_first: bool
) -> None:
    told = resumes_exactly(run, shape, kill_at, saver_first=saver_first)
    assert not any("failed" in line for line in told), "\n".join(told)


@pytest.mark.parametrize("saver_first", [True, False], ids=["before", "behind"])
def test_the_last_checkpoint_has_what_callbacks_did_at_the_end(
    run: Callable[..., list[str]], saver_first: bool
) -> None:
    first = run("put back as training ends", saver_first=saver_first)
    again = run("put back as training ends", saver_first=saver_first)
    assert "RESUME 20" in again and numbers(again) == numbers(first, 20)[-1:]


@pytest.mark.parametrize(("shape", "kill_at"), [
    ("a stream", 7), ("a stream with a worker", 13), ("a stream with accumulation", 4),
    ("a stream with accumulation", 13), ("epochs that end early", 7),
])  # fmt: skip
def test_passes_whose_length_trainer_does_not_know_resume(
    run: Callable[..., list[str]], shape: str, kill_at: int
) -> None:
    resumes_exactly(run, shape, kill_at)


@pytest.mark.parametrize("steps", [10, 12], ids=["after a pass", "in a pass"])
def test_a_finished_stream_that_gets_more_steps_goes_on(
    run: Callable[..., list[str]], steps: int
) -> None:
    settings: dict[str, Any] = {"lr_scheduler_type": "constant"}
    plain = run("a stream", with_daemon=False, settings=settings)
    run("a stream", settings=settings | {"max_steps": steps})
    resumed = run("a stream", settings=settings)
    assert f"RESUME {steps}" in resumed
    assert numbers(resumed, steps) == numbers(plain, steps)


def test_a_resume_with_another_batch_size_is_warned_of(run: Callable[..., list[str]]) -> None:
    run("a stream", settings={"max_steps": 7})
    resumed = run("a stream", settings={"per_device_train_batch_size": 2})
    assert "RESUME 7" in resumed
    assert sum("rows are left out or repeated" in line for line in resumed) == 1


def test_two_ranks_whose_callbacks_change_weights_resume(run: Callable[..., list[str]]) -> None:
    options: dict[str, Any] = {"ranks": 2, "settings": {"ddp_backend": "gloo"}}
    plain = run("changed as a step begins", with_daemon=False, **options)
    run("changed as a step begins", kill_at=3, code=-signal.SIGKILL, **options)
    resumed = run("changed as a step begins", **options)
    assert "RESUME 3" in resumed
    assert numbers(resumed, 3) == numbers(plain, 3)


@pytest.mark.parametrize("shape", [
    "schedule-free", "schedule-free, evaluated at the start", "layers that merge",
    "changed before the update", "changed as training begins",
])  # fmt: skip
def test_what_moves_weights_at_a_step_fails_no_checkpoint(
    run: Callable[..., list[str]], shape: str
) -> None:
    told = resumes_exactly(run, shape, 9)
    assert not any("failed" in line for line in told), "\n".join(told)


def test_adapters_are_saved_without_a_base_that_is_refused(run: Callable[..., list[str]]) -> None:
    """All of them, also a frozen one, and what is trained beside them; once said."""
    told = resumes_exactly(run, "adapters", 7)
    said = [line for line in told if "hold the adapters of this model (mine, reference)" in line]
    assert len(said) == 2  # in each process


def test_a_state_that_cannot_be_stored_ends_no_training(run: Callable[..., list[str]]) -> None:
    told = run("adapters", odd_optimizer=True, every=5)
    assert sum("training continues WITHOUT checkpoints from step 5" in line for line in told) == 1
    assert sum('save_strategy="steps"' in line for line in told) == 1
    assert any(line.startswith("END 20") for line in told)
