"""What the campaign asks of a training, and the lines that the training prints for it:

FROM 6                    the step from which it continues
STEP 7 = 0x1.8p-3         numbers of a step, or of a part of it: STEP 7 validation = ...
END 3f2a...               the digest of the last parameters and buffers
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from pccheck import PCcheckClient, capture_rng, restore_rng

STEPS = 40
EVERY = 3
#: For each step after the one that follows the kill: the campaign kills from another process.
SLOW_S = 0.05


@dataclass
class Asked:
    """`saves` is "pccheck", "own" (the checkpoints of the framework, or torch.save), or empty for
    the run that is not interrupted. `folder` is this shape's own."""

    saves: str
    folder: Path
    socket: str
    kill_at: int = 0

    def began(self, step: int) -> None:
        print(f"FROM {step}", flush=True)

    def step(self, step: int, *numbers: float | torch.Tensor, part: str = "") -> None:
        values = " ".join(float(number).hex() for number in numbers)
        print(f"STEP {step} {part and part + ' '}= {values}", flush=True)
        if self.kill_at and step >= self.kill_at + 2:
            time.sleep(SLOW_S)

    def ended(self, *modules: nn.Module) -> None:
        digest = hashlib.sha256()
        for module in modules:
            for name, value in module.state_dict().items():
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                mine = value.to_local() if hasattr(value, "to_local") else value
                digest.update(mine.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        print(f"END {digest.hexdigest()}", flush=True)

    @property
    def options(self) -> dict[str, Any]:
        """Of a client, also of one that an integration makes."""
        return {"job": self.folder.name, "socket": self.socket}

    def saver(self, **options: Any) -> Saver:
        """Of a loop of one's own."""
        if self.saves == "pccheck":
            return PCcheckClient(**self.options, **options)
        return Files(self.folder / "own", writes=self.saves == "own")


class Saver(Protocol):
    """What a loop calls: PCcheckClient's own names."""

    def attach(self, *, rng: bool, **things: Any) -> None: ...
    def restore(self) -> Any: ...
    def checkpoint(self, *, step: int) -> Any: ...
    def should_checkpoint(self, step: int) -> bool: ...
    def gate(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


@dataclass
class Restored:
    step: int


class Files:
    """What a loop does without PCcheck: torch.save of each `state_dict()` and of the generators,
    one file for each rank; a new file replaces the old one when it is complete."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path.with_suffix(f".{os.environ.get('RANK', '0')}")
        self._writes = writes

    def attach(self, *, rng: bool, **things: Any) -> None:
        self._things = things

    def restore(self) -> Restored:
        if not self._path.exists():
            return Restored(0)
        saved = torch.load(self._path, weights_only=False)
        for name, thing in self._things.items():
            if isinstance(thing, dict):
                thing.update(saved[name])
            else:
                thing.load_state_dict(saved[name])
        restore_rng(saved["rng"])
        return Restored(saved["step"])

    def checkpoint(self, *, step: int) -> None:
        if not self._writes:
            return
        saved = {
            name: thing if isinstance(thing, dict) else thing.state_dict()
            for name, thing in self._things.items()
        }
        fresh = self._path.with_suffix(self._path.suffix + ".new")
        torch.save(saved | {"rng": capture_rng(), "step": step}, fresh)
        fresh.rename(self._path)

    def should_checkpoint(self, step: int) -> bool:
        return step % EVERY == 0

    def gate(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass
