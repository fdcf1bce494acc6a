"""A training that is killed in the middle of an epoch resumes with the same numbers, although its
loader draws from the generators when it makes an iterator. With another number of ranks, all ranks
begin the epoch again."""

from __future__ import annotations

import importlib.util
import signal
import warnings
from pathlib import Path

import pytest
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pccheck import PCcheckClient
from tests.support.daemon import Daemon
from tests.support.programs import Program
from tests.support.torchrun import started

STEPS = 20  # of 8 in an epoch


def ran(*arguments: object, code: int = 0) -> list[str]:
    with Program("tests.support.loadertraining", *arguments) as program:
        said = program.finish()
    assert program.returncode == code, said
    return [line for line in said.splitlines() if line.startswith(("FROM ", "LOSS "))]


TORCHDATA = pytest.mark.skipif(not importlib.util.find_spec("torchdata"), reason="not installed")
TORCHDATAS = [pytest.param(name, marks=TORCHDATA) for name in ("torchdata", "three")]
LOADERS = ["plain", "wrapped", *TORCHDATAS]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", LOADERS)
def test_losses_are_equal_bit_for_bit(daemon: Daemon, loader: str, workers: int) -> None:
    socket = daemon.socket
    undisturbed = ran("", loader, workers, STEPS, 3)
    killed = ran(socket, loader, workers, STEPS, 3, 13, code=-signal.SIGKILL)
    assert killed[0] == "FROM 1" and killed[1:] == undisturbed[:13]
    resumed = ran(socket, loader, workers, STEPS, 3)
    assert resumed[0] == "FROM 13" and resumed[1:] == undisturbed[12:]


@pytest.mark.parametrize("loader", [item for item in LOADERS if item != "wrapped"])
def test_a_checkpoint_at_the_end_of_an_epoch(daemon: Daemon, loader: str) -> None:
    """The next iterator also draws in the undisturbed training."""
    socket = daemon.socket
    undisturbed = ran("", loader, 0, STEPS, 8)
    ran(socket, loader, 0, STEPS, 8, 9, code=-signal.SIGKILL)
    assert ran(socket, loader, 0, STEPS, 8) == ["FROM 9", *undisturbed[8:]]


@TORCHDATA
def test_a_sampler_without_a_state_is_told(tmp_path: Path) -> None:
    """torchdata skips what it has given, in another order."""

    class Own(WeightedRandomSampler):
        pass

    items, weights = range(8), [1.0] * 8
    draws = WeightedRandomSampler(weights, 8)
    for options, told in (
        ({"shuffle": True}, ""),
        ({"sampler": Own(weights, 8)}, ""),
        ({"sampler": draws}, "WeightedRandomSampler"),
        ({"sampler": RandomSampler(items)}, "RandomSampler"),
        ({"batch_sampler": BatchSampler(draws, 2, False)}, "WeightedRandomSampler"),
        ({"sampler": SubsetRandomSampler(items), "batch_size": None}, "SubsetRandomSampler"),
    ):
        loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
        with (
            warnings.catch_warnings(record=True) as caught,
            PCcheckClient("loaders", socket=tmp_path / "none") as client,
        ):
            warnings.simplefilter("always")
            client.attach(loader=loader(items, **options))
        found = [str(one.message) for one in caught if "has no state" in str(one.message)]
        assert len(found) == bool(told) and all(f" {told} has" in one for one in found), found


@TORCHDATA
@pytest.mark.parametrize(
    ("kind", "workers", "ranks", "again", "kill_after"),
    [("ddp", 0, 1, 2, 8), ("ddp", 1, 2, 3, 8), ("ddp", 0, 2, 1, 2), ("fsdp", 0, 1, 2, 14)],
)
def test_another_number_of_ranks_begins_the_epoch_again(
    daemon: Daemon, kind: str, workers: int, ranks: int, again: int, kill_after: int
) -> None:
    """The position of a loader is only valid for the same number of ranks. Every rank gets its part
    of the interrupted epoch, from the start and in the order of that epoch. Rank 0, which has
    saved, gets its generators back."""
    program = ("tests.support.loaderranks", kind, workers)
    with started(daemon, "job", ranks, *program, kill_after) as launcher:
        killed = launcher.finish()
    with started(daemon, "job", again, *program) as launcher:
        said = launcher.finish()
    assert launcher.returncode == 0, said
    epoch = (kill_after - 1) // (12 // ranks)
    for rank in range(again):
        first, _generators, *batches = words_of(said, rank)
        assert first == ["FROM", str(epoch), str(kill_after)]
        order = DistributedSampler(range(48), again, rank, seed=3)  # type: ignore[arg-type]
        for number in range(epoch, 3):
            order.set_epoch(number)
            had = [int(i) for _, when, *items in batches if when == str(number) for i in items]
            assert had == list(order), (rank, number, said)
    assert said.count("epoch begins again on every rank") == again, said
    assert said.count("keep the state of this process") == max(0, again - ranks), said
    assert words_of(said, 0)[1] == words_of(killed, 0)[-1]


def words_of(said: str, rank: int) -> list[list[str]]:
    start = f"RANK {rank} "
    return [line.split()[2:] for line in said.splitlines() if line.startswith(start)]


@TORCHDATA
def test_one_rank_that_saves_for_all_keeps_its_position(
    daemon: Daemon,
) -> None:
    socket = daemon.socket
    seen = []
    for step in (1, 2):
        loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
        batches = loader(list(range(12)), 2)
        with PCcheckClient("job", 0, 4, solo=True, socket=socket) as client:
            client.attach(loader=batches)
            client.restore()
            seen.append(next(iter(batches)).tolist())
            client.checkpoint(step=step)
            client.flush()
    assert seen == [[0, 1], [2, 3]]
