"""Data sets without a length and without a state: torchdata skips what was had, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from pccheck import PCcheckClient
from tests.support.daemon import Daemon

ITEMS, BATCH = 60, 2
PASS = ITEMS // BATCH


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(ITEMS)


class Placed(Stream):
    """Keeps its place."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        for item in range(self.place, ITEMS):
            self.place = item + 1
            yield item
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def drawn(daemon: Daemon, name: str, count: int, data: Stream, **options: Any) -> list[int]:
    """The first items of the next batches, in which a pass may end."""
    loader = StatefulDataLoader(data, BATCH, **options)
    found: list[int] = []
    with PCcheckClient("stream", socket=daemon.socket) as client:
        client.attach(**{name: loader})
        step = client.restore().step
        while len(found) < count:
            for batch in loader:
                found.append(int(batch[0]))
                if len(found) == count:
                    break
        client.checkpoint(step=step + count).wait_durable(60)
    return found


@pytest.mark.filterwarnings("ignore:.*an earlier client of this process")
@pytest.mark.parametrize("name", ["loader", "unlabelled"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in this process"),
        pytest.param({"num_workers": 1}, id="a worker"),
        pytest.param({"num_workers": 1, "snapshot_every_n_steps": 3}, id="few snapshots"),
    ],
)
@pytest.mark.parametrize("data", [Stream, Placed])
def test_each_resume_of_a_stream_gets_the_next_batch(
    daemon: Daemon, name: str, options: dict[str, Any], data: type[Stream]
) -> None:
    """After the second resume torchdata alone leaves out as many batches as were had before the
    first one."""
    found = [drawn(daemon, name, count, data(), **options) for count in (6, 4, 5, 18, 3)]
    wanted = [BATCH * (number % PASS) for number in range(36)]
    assert [item for part in found for item in part] == wanted
