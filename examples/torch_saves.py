"""char_gpt.py with torch.save in place of PCcheck: what demo.py compares PCcheck with.

    CHECKPOINT=/mnt/disk/checkpoint.pt python -m examples.torch_saves

Each checkpoint is synced, then renamed over the previous one, so that a crash leaves a whole file.
"""

import os
import runpy
import time
from pathlib import Path

import torch

import pccheck


class TorchSaves:
    """The methods of PCcheckClient that char_gpt.py calls."""

    def __init__(self) -> None:
        self.path = Path(os.environ["CHECKPOINT"])

    def attach(self, *, rng: bool, **objects: torch.nn.Module) -> None:
        self.objects = objects

    def restore(self) -> None:
        """Every run begins at the start."""

    def checkpoint(self, *, step: int) -> None:
        state: dict[str, object] = {"step": step, "rng": torch.get_rng_state()}
        state |= {name: one.state_dict() for name, one in self.objects.items()}
        fresh = self.path.with_suffix(".new")
        with fresh.open("wb") as file:
            torch.save(state, file)
            if speed := float(os.environ.get("SLOW_DISK", "0")):
                time.sleep(file.tell() / speed)  # as slow_disk.c does to PCcheck
            os.fsync(file.fileno())
        fresh.rename(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def close(self) -> None:
        """The last checkpoint is durable already."""


if __name__ == "__main__":
    pccheck.PCcheckClient = TorchSaves  # type: ignore[assignment, misc]
    runpy.run_path(str(Path(__file__).with_name("char_gpt.py")), run_name="__main__")
