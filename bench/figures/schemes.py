"""CheckFreq and GPM as their papers describe them, without this project's engine.

CheckFreq (FAST '21) copies the state to DRAM while the next forward and backward pass runs, and
persists the copy in the background, one checkpoint at a time: the next copy begins when the
previous checkpoint is on the disk. GPM (ASPLOS '22) stops training while the state is copied
straight into a mapped file and made durable there.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from bench.common import drop_cache, sync_path, tensors_of
from bench.figures.contender import Contender, bytes_of
from bench.figures.trainers import Trainer


class CheckFreq(Contender):
    """Two files in turn, each written by torch.save, synced, and renamed into place."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        super().__init__(trainer, directory)
        self.copied = threading.Event()
        self.copied.set()
        self._background = ThreadPoolExecutor(1, "CheckFreq")
        self._persisted: Future[None] | None = None
        self._snapshot: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        self._snapshot = {name: t.clone() for name, t in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.state.model, self.state.optimizer)

    def save(self, step: int) -> None:
        self.finish()
        self.copied.clear()
        self._persisted = self._background.submit(self._persist, step)

    def _persist(self, step: int) -> None:
        try:
            for name, tensor in self._tensors().items():
                self._snapshot[name].copy_(tensor)
        finally:
            self.copied.set()
        path = self._path(len(self._landed))
        fresh = path.with_suffix(".new")
        torch.save(self._snapshot, fresh)
        sync_path(fresh)
        fresh.rename(path)
        sync_path(self.directory)
        self._landed.append((step, time.monotonic()))

    def _path(self, number: int) -> Path:
        return self.directory / f"checkfreq-{number % 2}.pt"

    def gate(self) -> None:
        self.copied.wait()

    def finish(self) -> None:
        persisted, self._persisted = self._persisted, None
        if persisted is not None:
            persisted.result()

    def _newest(self) -> Path:
        return self._path(len(self._landed) - 1)

    def restart(self) -> None:
        drop_cache(self._newest())

    def load(self) -> None:
        saved = torch.load(self._newest(), mmap=True)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(saved[name])

    def stop(self) -> None:
        try:
            self.finish()
        finally:
            self._background.shutdown()
            for path in self.directory.glob("checkfreq-*"):
                path.unlink()


class Gpm(Contender):
    """Two mapped files in turn; a third one names the newest, and is written last."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        super().__init__(trainer, directory)
        self._maps: list[mmap.mmap] = []
        self._newest = -1

    def start(self) -> None:
        self._newest = os.open(self._path("newest"), os.O_RDWR | os.O_CREAT, 0o600)
        for number in range(2):
            with self._path(str(number)).open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, self.payload_bytes)
                self._maps.append(mmap.mmap(file.fileno(), self.payload_bytes))

    def _path(self, name: str) -> Path:
        return self.directory / f"gpm-{name}"

    def _parts(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of the state, each with its place in the map."""
        mapped = torch.frombuffer(self._maps[number], dtype=torch.uint8)
        parts, offset = [], 0
        for tensor in tensors_of(self.state.model, self.state.optimizer).values():
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            parts.append((flat, mapped[offset : offset + flat.numel()]))
            offset += flat.numel()
        return parts

    def save(self, step: int) -> None:
        number = len(self._landed) % 2
        for tensor, place in self._parts(number):
            place.copy_(tensor)
        self._maps[number].flush()
        os.pwrite(self._newest, struct.pack("<qq", number, step), 0)
        os.fdatasync(self._newest)
        self._landed.append((step, time.monotonic()))

    def finish(self) -> None:
        pass  # `save` has waited for the disk

    def restart(self) -> None:
        for number, mapped in enumerate(self._maps):
            mapped.madvise(mmap.MADV_DONTNEED)  # the cache keeps pages that are mapped
            drop_cache(self._path(str(number)))

    def load(self) -> None:
        number, _ = struct.unpack("<qq", os.pread(self._newest, 16, 0))
        with self._path(str(number)).open("rb", buffering=0) as file:
            for tensor, _ in self._parts(number):
                file.readinto(bytes_of(tensor))

    def stop(self) -> None:
        self._maps.clear()  # the last tensor over a map unmaps it
        if self._newest >= 0:
            os.close(self._newest)
        for path in self.directory.glob("gpm-*"):
            path.unlink()
