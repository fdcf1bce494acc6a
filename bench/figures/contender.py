"""What every way to checkpoint offers to the benches, and the ways of common libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from bench.common import drop_cache
from bench.figures.trainers import Trainer
from bench.rivals import Rivals, RivalSaver

Landed = list[tuple[int, float]]


class Contender(ABC):
    """One way to checkpoint a trainer's state. `save` and `gate` are called by the training thread,
    `save` after an update, `gate` before the next one."""

    #: Checkpoints after which nothing is made for the first time.
    warm_saves = 2

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self.trainer = trainer
        self.state = trainer.state
        self.payload_bytes = trainer.payload_bytes
        self.directory = directory
        self._landed: Landed = []

    @abstractmethod
    def start(self) -> None:
        """Makes what is kept from save to save."""

    @abstractmethod
    def save(self, step: int) -> None: ...

    def gate(self) -> None:  # noqa: B027 (most have copied the state when `save` returns)
        """Returns when the state may change."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when everything that was saved is as safe as this contender makes it."""

    def landed(self) -> Landed:
        """Steps of the checkpoints that a restart could get, and since when (monotonic)."""
        return self._landed

    def kept(self) -> Landed:
        """The same for a restart after the death of the training process alone."""
        return self.landed()

    @abstractmethod
    def restart(self) -> None:
        """What comes before a load and is not timed: caches are empty, processes are new."""

    def reconnect(self) -> None:  # noqa: B027 (a file is there, and in the page cache)
        """The same after the death of the training process alone."""

    @abstractmethod
    def load(self) -> None:
        """Puts back what a restart gets."""

    @abstractmethod
    def stop(self) -> None:
        """Ends processes and threads and removes files; also after a failure in `start`."""


class Library(Contender):
    """A rival of bench/rivals.py: one save at a time, into new files; the newest two saves stay."""

    def __init__(self, trainer: Trainer, directory: Path, rivals: Rivals, name: str) -> None:
        super().__init__(trainer, directory)
        self.rivals, self.name = rivals, name
        self.saver = RivalSaver((rivals.save | rivals.unsynced)[name], directory)
        self._landed = self.saver.landed

    def start(self) -> None:
        pass

    def save(self, step: int) -> None:
        self.saver(step)

    def finish(self) -> None:
        self.saver.finish()

    def restart(self) -> None:
        drop_cache(self.saver.made[-1])

    def load(self) -> None:
        self.rivals.load[self.name](self.saver.made[-1])

    def stop(self) -> None:
        self.saver.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory; the tensor is contiguous and on the CPU."""
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
