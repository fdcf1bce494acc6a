"""Training with dropout over a shuffled loader; prints every loss with all digits.

    python -m tests.support.loadertraining SOCKET LOADER WORKERS STEPS EVERY [KILL_AFTER]

Without a socket it trains undisturbed. After step KILL_AFTER it waits until the newest checkpoint
is durable, and kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from pccheck import PCcheckClient

ITEMS, BATCH, WIDTH = 64, 8, 16


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(-1, 1, WIDTH) * (index + 1) / ITEMS


class Order(Sampler[int]):
    """Another order in every epoch, from a generator of its own."""

    def __init__(self) -> None:
        self.epoch = 0
        self.skip = 0  # batches of the next epoch that were already returned

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        first, self.skip = self.skip * BATCH, 0
        yield from order[first:]


class Plain(DataLoader[torch.Tensor]):
    """torch's loader with a state, as StatefulDataLoader has one: its iterators draw a seed."""

    def __init__(self, workers: int) -> None:
        self.order, self.given = Order(), 0
        super().__init__(Items(), BATCH, sampler=self.order, num_workers=workers)

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return self._counted(batches)

    def _counted(self, batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for batch in batches:
            self.given += 1
            yield batch
        self.order.epoch, self.given = self.order.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.order.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.order.epoch = state["epoch"]
        self.order.skip = self.given = state["given"]


class Wrapped:
    """A wrapper of the script around a loader."""

    def __init__(self, workers: int) -> None:
        self.inner = Plain(workers)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.inner

    def state_dict(self) -> dict[str, int]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.inner.load_state_dict(state)


def torchdata(workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]

    return StatefulDataLoader(Items(), BATCH, shuffle=True, num_workers=workers)


LOADERS: dict[str, Any] = {
    "plain": Plain, "wrapped": Wrapped, "torchdata": torchdata, "three": torchdata,
}  # fmt: skip


def train(
    socket: str, name: str, workers: int, steps: int, every: int, kill_after: int, first: int = 1
) -> None:
    torch.manual_seed(5)  # some loaders draw already here
    loader = LOADERS[name](workers)
    # Drawn from in turn with the first one, and from start to end now and then.
    others = ["second", "validation"] if name == "three" else []
    more = {other: torchdata(workers) for other in others}
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if more:
        for each in (loader, *more.values()):
            each.state_dict()  # draws; attach() asks for it, too
    client = PCcheckClient("loaders", socket=socket) if socket else None
    if client is not None:
        client.attach(rng=True, loader=loader, model=model, optimizer=optimizer, **more)
        first = client.restore().step + 1
        print(f"FROM {first}", flush=True)
    while first <= steps:
        for batch, *_ in zip(loader, *(more[other] for other in others[:1]), strict=False):
            loss = model(batch).square().mean() + model(batch).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"LOSS {first} {loss.item().hex()}", flush=True)
            if more and first % 4 == 0:
                list(more["validation"])
            if client is not None and first % every == 0:
                last = client.checkpoint(step=first)
            if client is not None and first == kill_after:
                last.wait_durable(60)
                os.kill(os.getpid(), signal.SIGKILL)
            first += 1
            if first > steps:
                break


def main() -> None:
    socket, name, workers, steps, every, *kill_after = sys.argv[1:]
    torch.set_num_threads(1)
    train(socket, name, int(workers), int(steps), int(every), int([*kill_after, 0][0]))


if __name__ == "__main__":
    main()
