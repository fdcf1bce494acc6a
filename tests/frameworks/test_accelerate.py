"""Training loops with Accelerate, killed with SIGKILL, continue bit for bit: with loaders that save
their place, and with skip_first_batches."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.forked import Forks, printed
from tests.support.daemon import Daemon

SKIPS = "between the micro-batches of a step"
EACH_WAY = pytest.mark.parametrize("stateful", [True, False], ids=["stateful", "skipping"])


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.frameworks.accelerate_training") as forks:
        yield forks


@pytest.fixture
def run(forks: Forks, daemon: Daemon, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a training; its losses, after the step from which it continues. All runs of a test have
    one daemon."""

    def run(
        *, code: int = 0, with_daemon: bool = True, ranks: int = 1, **options: Any
    ) -> list[str]:
        if with_daemon:
            options["socket"] = str(daemon.socket)
        output = tmp_path / "printed"
        codes = forks.run(output, ranks=ranks, **options)
        told = printed(output)
        assert codes == [code] * ranks, "\n".join(told)
        assert not any("has no state" in line for line in told)  # its order is set by attach()
        return [line for line in told if line.startswith(("FROM", "LOSS")) or SKIPS in line]

    return run


@EACH_WAY
def test_a_killed_training_continues_with_the_same_numbers(
    run: Callable[..., list[str]], stateful: bool
) -> None:
    """In the first epoch, after a second kill in the next one, and in the third to the end."""
    plain = run(with_daemon=False, stateful=stateful)
    assert len(plain) == 39
    killed = run(every=2, kill_at=5, stateful=stateful, code=-signal.SIGKILL)
    assert killed == ["FROM 0", *plain[:10]]
    again = run(every=2, kill_at=9, stateful=stateful, code=-signal.SIGKILL)
    assert again == ["FROM 4", *plain[8:17]]
    assert run(every=2, stateful=stateful) == ["FROM 8", *plain[15:]]


@EACH_WAY
def test_a_checkpoint_between_micro_batches_is_skipped(
    run: Callable[..., list[str]], stateful: bool
) -> None:
    """So a run that saves there, too, resumes from whole steps only."""
    plain = run(with_daemon=False, stateful=stateful)
    killed = run(every=2, kill_at=5, stateful=stateful, between=True, code=-signal.SIGKILL)
    assert sum(SKIPS in line for line in killed) == 1
    again = run(every=2, kill_at=8, stateful=stateful, between=True, code=-signal.SIGKILL)
    assert [line for line in again if SKIPS not in line] == ["FROM 4", *plain[8:16]]
    assert run(every=2, stateful=stateful) == ["FROM 8", *plain[15:]]


@pytest.mark.parametrize("seedable", [True, False])
def test_the_first_epoch_of_a_loader_with_worker_processes(
    run: Callable[..., list[str]], seedable: bool
) -> None:
    """Accelerate's prepare() starts the workers, which read ahead. Only this process has drawn that
    order, so a resumed one cannot have it."""
    options = {"stateful": True, "workers": 1, "seedable": seedable}
    plain = run(every=99, **options)[1:]
    assert len(plain) == 39
    killed = run(every=2, kill_at=5, code=-signal.SIGKILL, **options)
    assert killed == ["FROM 0", *plain[:10]]
    again = run(every=2, kill_at=9, code=-signal.SIGKILL, **options)
    assert again == ["FROM 4", *plain[8:17]]
    assert run(every=2, **options) == ["FROM 8", *plain[15:]]


@pytest.mark.parametrize(("stateful", "workers"), [(True, 0), (True, 1), (False, 0)])
def test_a_checkpoint_at_the_end_of_an_epoch(
    run: Callable[..., list[str]], stateful: bool, workers: int
) -> None:
    options = {"stateful": stateful, "workers": workers, "seedable": True}
    plain = run(every=99, **options)[1:]
    run(every=7, kill_at=7, code=-signal.SIGKILL, **options)
    assert run(every=7, **options) == ["FROM 7", *plain[13:]]


@EACH_WAY
@pytest.mark.parametrize("dispatch", [None, False])
def test_a_stream_continues_after_each_of_two_kills(
    run: Callable[..., list[str]], stateful: bool, dispatch: bool | None
) -> None:
    """Without dispatch_batches=False Accelerate reads an IterableDataset on rank 0, and sends each
    rank its part."""
    options = {"stateful": stateful, "stream": True, "dispatch": dispatch}
    plain = run(with_daemon=False, **options)
    assert len(plain) == 39
    killed = run(every=2, kill_at=3, code=-signal.SIGKILL, **options)
    assert killed == ["FROM 0", *plain[:6]]
    again = run(every=2, kill_at=5, code=-signal.SIGKILL, **options)
    assert again == ["FROM 2", *plain[4:10]]
    assert run(every=2, **options) == ["FROM 4", *plain[8:]]


@pytest.mark.parametrize(
    ("stateful", "more"),
    [
        (True, {"stream": True}),
        (False, {"stream": True}),
        (False, {}),
        (False, {"split": True}),
        (True, {"split": True, "workers": 1}),
    ],
)
def test_batches_dispatched_to_two_ranks_continue(
    run: Callable[..., list[str]], tmp_path: Path, stateful: bool, more: dict[str, Any]
) -> None:
    """Both ranks get the numbers that followed, dropout included."""
    options = {"stateful": stateful, "dispatch": True, "ranks": 2, "seedable": True, **more}
    output = tmp_path / "printed"

    def losses(rank: int) -> list[str]:
        return [line for line in printed(output, rank) if line.startswith("LOSS")]

    run(every=99, **options)
    plain = [losses(rank) for rank in range(2)]
    run(every=2, kill_at=2, code=-signal.SIGKILL, **options)
    for step, kill_at in ((2, 4), (4, 0)):
        code = -signal.SIGKILL if kill_at else 0
        assert run(every=2, kill_at=kill_at, code=code, **options)[0] == f"FROM {step}"
        for rank in range(2):
            found = losses(rank)
            later = [line for line in plain[rank] if int(line.split()[1]) > step]
            assert found and found == later[: len(found)]


@pytest.mark.parametrize("more", [{"workers": 1}, {"split": True}])
def test_a_state_with_another_count_of_batches_is_refused(
    run: Callable[..., list[str]], tmp_path: Path, more: dict[str, Any]
) -> None:
    run(stateful=True, dispatch=True, stream=True, ranks=2, code=1, **more)
    said = printed(tmp_path / "printed")[-1]
    assert "UsageError" in said and "DataLoaderConfiguration(dispatch_batches=False)" in said


def test_two_ranks_resume_one_step(run: Callable[..., list[str]]) -> None:
    plain = run(with_daemon=False, ranks=2)
    run(every=2, kill_at=6, ranks=2, code=-signal.SIGKILL)
    resumed = run(every=2, ranks=2)
    step = int(resumed[0].split()[1])
    assert step == 6
    assert resumed[1:] == [line for line in plain if int(line.split()[1]) > step]


def test_another_number_of_ranks_begins_the_epoch_again(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    """All ranks have the same order: together they get each item once. Then the first items are
    repeated, so that every rank has the same number."""
    run(every=2, kill_at=3, stateful=True, code=-signal.SIGKILL)
    assert run(every=99, stateful=True, ranks=2)[0] == "FROM 2"
    shares = [
        [float(line.split()[5]) for line in printed(tmp_path / "printed", rank)
         if line.startswith("LOSS") and line.split()[2] == "0"]
        for rank in range(2)
    ]  # fmt: skip
    assert [len(share) for share in shares] == [7, 7]
    dealt = [one for turn in zip(*shares, strict=True) for one in turn]
    assert len(set(dealt[:13])) == 13
    assert sum(dealt[:13]) == pytest.approx(0, abs=1e-4)  # as the sum of all items
