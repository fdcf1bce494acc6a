"""Common alternatives, each at its best settings, and each synced: file, then directory.

A rival saves into a directory that is empty when the clock starts. `save` blocks for the caller's
stall and returns the rest of the work; calling that returns once the checkpoint is durable.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from bench.common import sync_path, tensors_of

KEPT = "DCP async_save, stager kept"
UNSYNCED = "torch.save without fsync"
SHM = "torch.save to /dev/shm"
TORCHSNAPSHOT = "torchsnapshot async"  # optional: pip install torchsnapshot
Finish = Callable[[], None]
Load = Callable[[Path], None]


def _sync_tree(path: Path) -> None:
    """Syncs directories only: every writer here has synced its files."""
    sync_path(path)
    sync_path(path.parent)


@dataclass(slots=True)
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def nested(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def put(self, nested: dict[str, Any]) -> None:
        self.model.load_state_dict(nested["model"])
        self.optimizer.load_state_dict(nested["optimizer"])


class KeptStager(DefaultStager):
    """A stager for many saves: torch 2.11 closes a part of it after the first one."""

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._close_part: Callable[[], None] = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def close(self) -> None:
        super().close()
        self._close_part()


def stager_kept(*, of_gpu: bool, shared: bool = False) -> DefaultStager:
    """Of a GPU it copies into pinned memory, beside the caller; `shared` with another process."""
    return KeptStager(
        StagingOptions(
            use_pinned_memory=of_gpu, use_shared_memory=shared, use_async_staging=of_gpu,
            use_non_blocking_copy=of_gpu,
        )
    )  # fmt: skip


class Rivals(AbstractContextManager["Rivals"]):
    """All rivals by name; owns the process group that DCP's async_save needs."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.stager: DefaultStager | None = None
        self.save: dict[str, Callable[[Path], Finish]] = {
            "torch.save": self._torch_save,
            "safetensors": self._safetensors,
            "DCP save": self._dcp_save,
            "DCP async_save": self._dcp_async,
            KEPT: self._dcp_async_kept,
        }
        #: Each puts back what the rival of the same name saved.
        self.load: dict[str, Load] = {
            "torch.save": self._torch_load,
            "safetensors": self._safetensors_load,
            "DCP save": self._dcp_load,
            "DCP async_save": self._dcp_load,
            KEPT: self._dcp_load,
            UNSYNCED: self._torch_load,
            SHM: self._torch_load,
        }
        if importlib.util.find_spec("torchsnapshot"):
            self.save[TORCHSNAPSHOT] = self._torchsnapshot
            self.load[TORCHSNAPSHOT] = self._torchsnapshot_load
        #: Not durable: lost in a power cut.
        self.unsynced = dict.fromkeys((UNSYNCED, SHM), self._torch_save_unsynced)

    def __enter__(self) -> Self:
        # One process is a group of its own; this store needs no port.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.stager is not None:
            self.stager.close()
        dist.destroy_process_group()

    def _torch_save(self, directory: Path) -> Finish:
        self._torch_save_unsynced(directory)
        sync_path(directory / "state.pt")
        _sync_tree(directory)
        return lambda: None

    def _torch_save_unsynced(self, directory: Path) -> Finish:
        torch.save(self.state.nested(), directory / "state.pt")
        return lambda: None

    def _safetensors(self, directory: Path) -> Finish:
        path = directory / "state.safetensors"
        save_file(tensors_of(self.state.model, self.state.optimizer), path)
        sync_path(path)
        _sync_tree(directory)
        return lambda: None

    def _torch_load(self, directory: Path) -> None:
        self.state.put(torch.load(directory / "state.pt", mmap=True))

    def _safetensors_load(self, directory: Path) -> None:
        with safe_open(directory / "state.safetensors", "pt") as file, torch.no_grad():
            for name, tensor in tensors_of(self.state.model, self.state.optimizer).items():
                tensor.copy_(file.get_tensor(name))

    def _dcp_load(self, directory: Path) -> None:
        nested = self.state.nested()
        load(nested, checkpoint_id=directory)
        self.state.put(nested)

    def _torchsnapshot(self, directory: Path) -> Finish:
        snapshots: Any = importlib.import_module("torchsnapshot")
        pending = snapshots.Snapshot.async_take(str(directory / "state"), self._stateful())

        def finish() -> None:
            pending.wait()
            for path in sorted(directory.rglob("*"), reverse=True):  # it syncs nothing itself
                sync_path(path)
            _sync_tree(directory)

        return finish

    def _torchsnapshot_load(self, directory: Path) -> None:
        snapshots: Any = importlib.import_module("torchsnapshot")
        snapshots.Snapshot(str(directory / "state")).restore(self._stateful())

    def _stateful(self) -> dict[str, Any]:
        return {"model": self.state.model, "optimizer": self.state.optimizer}

    def _dcp_writer(self, directory: Path) -> FileSystemWriter:
        return FileSystemWriter(
            directory, sync_files=True, thread_count=min(8, os.cpu_count() or 1)
        )

    def _dcp_save(self, directory: Path) -> Finish:
        save(self.state.nested(), storage_writer=self._dcp_writer(directory))
        _sync_tree(directory)
        return lambda: None

    def _async(self, directory: Path, stager: DefaultStager | None) -> Finish:
        # async_save takes a copy first, so the caller may change its tensors when it returns.
        return self._rest(directory, self._begin(directory, stager))

    def _begin(
        self,
        directory: Path,
        stager: DefaultStager | None,
        by: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    ) -> Any:
        return async_save(
            self.state.nested(), storage_writer=self._dcp_writer(directory), async_stager=stager,
            async_checkpointer_type=by,
        )  # fmt: skip

    def _rest(self, directory: Path, response: Any) -> Finish:
        def finish() -> None:
            getattr(response, "upload_completion", response).result()
            _sync_tree(directory)

        return finish

    def _dcp_async(self, directory: Path) -> Finish:
        return self._async(directory, None)

    def _dcp_async_kept(self, directory: Path) -> Finish:
        if self.stager is None:
            self.stager = stager_kept(of_gpu=False)
        return self._async(directory, self.stager)


class RivalSaver:
    """Saves to a new directory each time, waits for the previous save, keeps the newest two."""

    def __init__(self, save: Callable[[Path], Finish], directory: Path) -> None:
        self.save = save
        self.directory = directory
        self.made: list[Path] = []
        self.landed: list[tuple[int, float]] = []  #: steps, and when each was durable (monotonic)
        self._rest = ThreadPoolExecutor(1, "rest of a save")
        self._pending: Future[None] | None = None

    def __call__(self, step: int) -> None:
        self.finish()
        self.made.append(Path(tempfile.mkdtemp(prefix="rival-", dir=self.directory)))
        rest = self.save(self.made[-1])
        self._pending = self._rest.submit(self._complete, step, rest)

    def _complete(self, step: int, rest: Finish) -> None:
        rest()
        self.landed.append((step, time.monotonic()))
        for old in self.made[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del self.made[:-2]

    def finish(self) -> None:
        """Returns when what was saved is durable."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._rest.shutdown()
            for path in self.made:
                shutil.rmtree(path)
