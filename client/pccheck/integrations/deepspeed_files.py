"""DeepSpeed: what it calls the files of a checkpoint, as items of the state that is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pccheck.client import PCcheckClient
from pccheck.reader import Reader
from pccheck.restoring.begin import Saved
from pccheck.restoring.reading import RestoreResult
from pccheck_wire.errors import StateMismatchError, UsageError

from .objects import rebuilt

#: The name under which they are attached.
NAME = "deepspeed"
#: What only an update changes. All else in a file is copied before save_checkpoint() returns.
_UPDATED = ("module", "optimizer", "optimizer_state_dict", "frozen_param_fragments")


class DeepspeedState:
    """The files of this rank, attached while DeepSpeed saves or loads them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module  # its buffers are copied at once
        self.files: dict[str, Any] = {}
        self.attached = self.saves = False

    def state_dict(self) -> dict[str, Any]:
        if self.attached and not self.saves:
            raise UsageError(
                "checkpoint() was called, and the engine has given it nothing to save",
                hint="call engine.save_checkpoint(directory) on every rank",
            )
        return {"files": self.files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.files = state["files"]


class DeepspeedSource:
    """What is loaded: this rank's files, and those that only other ranks of its node have saved."""

    def __init__(self, client: PCcheckClient, done: RestoreResult, mine: dict[str, Any]) -> None:
        self._mine = mine
        self._reader = Reader(client.place[0], socket=client.where())
        self._opened = self._reader.open(sequence=done.sequence, partial=True)
        self._ranks: dict[str, int] = {}
        for rank in self._opened.ranks:
            for name in self._opened.describe(rank)[NAME]["files"]:
                self._ranks.setdefault(name, rank)

    def close(self) -> None:
        self._reader.close()

    def make_names(self, folder: Path) -> None:
        """DeepSpeed looks for files before it loads them."""
        folder.mkdir()
        for name in self._ranks:
            (folder / name).touch()

    def read(self, name: str) -> Any:
        if name in self._mine:
            return self._mine[name]
        if name not in self._ranks:
            raise StateMismatchError(
                f"no rank of this node has saved {name} in step {self._opened.step}",
                hint="use as many ranks and the same ZeRO stage as the run that saved it",
            )
        return self._opened.read(f"{NAME}.files.{name}", rank=self._ranks[name])


def tags_of(client: PCcheckClient) -> dict[str, int]:
    """The step of each tag that can be restored; of several with one tag the newest."""
    found: dict[str, int] = {}
    newest: dict[int, Saved] = {}  # of each step: restore(step) gives this one
    client.settle()
    for saved in client.steps():
        newest.setdefault(saved.step, saved)
    with Reader(client.place[0], socket=client.where()) as reader:
        for saved in newest.values():
            with reader.open(sequence=saved.sequence, partial=True) as opened:
                found.setdefault(str((opened.metadata or {}).get("tag")), saved.step)
    return found


def settled(file: dict[str, Any]) -> dict[str, Any]:
    """A file whose tensors stay as they are until the next update."""

    def copied(value: Any, _path: str) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return {
        key: value if key in _UPDATED else rebuilt(value, copied, key)
        for key, value in file.items()
    }
