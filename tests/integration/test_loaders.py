"""A training that is killed in the middle of an epoch resumes with the same numbers, although its
loader draws from the generators when it makes an iterator. With another number of ranks, all ranks
begin the epoch again."""

from __future__ import annotations

import functools
import importlib.util
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tests.support.programs import Program, script
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


EARLY = """
import sys
from torchdata.stateful_dataloader import StatefulDataLoader
from pccheck import PCcheckClient

loader = StatefulDataLoader(list(range(40)), batch_size=4)
early = iter(loader)
with PCcheckClient(job="early", socket=sys.argv[1]) as client:
    client.attach(loader=loader)
    first = client.restore().step + 1
    batches = early if sys.argv[2] == "early" else loader
    for step, batch in zip(range(first, first + 3), batches):
        print("HAD", batch[0].item())
        client.checkpoint(step=step).wait_durable(60)
"""


@TORCHDATA
@pytest.mark.parametrize("when", ["early", "late"])
def test_an_iterator_from_before_a_restore_is_named(daemon: Daemon, when: str) -> None:
    had, said = [], []
    for _ in range(2):
        with script(EARLY, daemon.socket, when) as run:
            said.append(run.finish())
        assert run.returncode == 0, said
        had.append([line for line in said[-1].splitlines() if line.startswith("HAD")])
    assert had[0] == ["HAD 0", "HAD 4", "HAD 8"]
    assert had[1] == (had[0] if when == "early" else ["HAD 12", "HAD 16", "HAD 20"])
    assert OUTDATED not in said[0]
    assert said[1].count(OUTDATED) == (when == "early")


OUTDATED = "an iterator of loader that was made before restore() continues its own batches"


class Ahead:
    """Fetches one batch ahead, from an iterator of its own."""

    def __init__(self, loader: Any, again: bool) -> None:
        self.loader, self.batches, self.again = loader, iter(loader), again
        self.next = next(self.batches)

    def draw(self) -> int:
        batch, self.next = self.next, next(self.batches)
        return int(batch[0])

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        if self.again:
            self.batches = iter(self.loader)
            self.next = next(self.batches)


def cycle(loader: Any) -> Iterator[int]:
    while True:
        for batch in loader:
            yield int(batch[0])


def made(workers: int, *, persistent: bool = False) -> Any:
    torchdata = importlib.import_module("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(
        list(range(24)), batch_size=4, num_workers=workers, persistent_workers=persistent
    )


def nodes() -> Any:
    library = importlib.import_module("torchdata.nodes")
    return library.Loader(library.Batcher(library.IterableWrapper(range(24)), batch_size=4))


def drawn_after(daemon: Daemon, loader: Any, draw: Callable[[], int]) -> tuple[list[int], int]:
    """What a run gets that continues after two batches, and how many warnings."""
    with (
        warnings.catch_warnings(record=True) as caught,
        PCcheckClient("job", socket=daemon.socket) as client,
    ):
        warnings.simplefilter("always")
        client.attach(loader=loader)
        assert client.restore().step == 2
        got = [draw(), draw()]
    return got, sum(OUTDATED in str(one.message) for one in caught)


def save_two(daemon: Daemon, loader: Any, draw: Callable[[], int]) -> None:
    with PCcheckClient("job", socket=daemon.socket) as client:
        client.attach(loader=loader)
        for _ in range(2):
            draw()
        client.checkpoint(step=2).wait_durable(60)


@TORCHDATA
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_was_read_before_a_restore_goes_on(daemon: Daemon, workers: int) -> None:
    """A whole pass, or an iterator that nobody has any more: nothing is outdated."""
    before = made(workers)
    save_two(daemon, before, functools.partial(next, cycle(before)))
    for persistent in {False, workers > 0}:
        loader = made(workers, persistent=persistent)
        assert len(list(loader)) == 6
        next(iter(loader))
        later = cycle(loader)
        assert drawn_after(daemon, loader, lambda drawn=later: next(drawn)) == ([8, 12], 0)  # type: ignore[misc]


@TORCHDATA
@pytest.mark.parametrize("persistent", [False, True])
def test_a_cycle_that_had_begun_is_outdated(daemon: Daemon, persistent: bool) -> None:
    before = made(0)
    save_two(daemon, before, functools.partial(next, cycle(before)))
    loader = made(2 if persistent else 0, persistent=persistent)
    endless = cycle(loader)
    assert next(endless) == 0
    assert drawn_after(daemon, loader, lambda: next(endless)) == ([4, 8], 1)


@TORCHDATA
@pytest.mark.parametrize(("again", "got"), [(True, ([12, 16], 0)), (False, ([0, 4], 1))])
def test_a_prefetcher_with_an_early_iterator_is_outdated(
    daemon: Daemon, again: bool, got: tuple[list[int], int]
) -> None:
    """Unless it makes an iterator of the restored state. It has fetched the third batch."""
    ahead = Ahead(made(0), again)
    save_two(daemon, ahead, ahead.draw)
    ahead = Ahead(made(0), again)
    assert drawn_after(daemon, ahead, ahead.draw) == got


@TORCHDATA
def test_a_loader_in_two_attached_things_is_named_once(daemon: Daemon) -> None:
    """As in Accelerate: its own name is used, and not that of the object that counts."""

    class Counts:
        def __init__(self, loader: Any) -> None:
            self.loaders, self.first = [loader], loader

        def state_dict(self) -> Any:
            return {"count": 1}

        def load_state_dict(self, state: Any) -> None:
            pass

    for again in (False, True):
        with (
            warnings.catch_warnings(record=True) as caught,
            PCcheckClient("job", socket=daemon.socket) as client,
        ):
            warnings.simplefilter("always")
            loader = made(0)
            batches = iter(loader)
            client.attach(counts=Counts(loader), data=loader)
            client.restore()
            next(batches)
            client.checkpoint(step=1 + again).wait_durable(60)
        found = [str(one.message) for one in caught if "was made before" in str(one.message)]
        assert len(found) == again and all("iterator of data that" in one for one in found)


@TORCHDATA
@pytest.mark.parametrize("early", [False, True])
def test_a_loader_of_nodes_continues_after_its_batches(daemon: Daemon, early: bool) -> None:
    """torchdata would return the iterator that attach() has made to ask for the state."""
    before = nodes()
    save_two(daemon, before, functools.partial(next, cycle(before)))
    loader = nodes()
    endless = cycle(loader)
    assert not early or next(endless) == 0
    got = drawn_after(daemon, loader, lambda: next(endless))
    assert got == (([4, 8], 1) if early else ([8, 12], 0))
