"""torch.distributed.checkpoint: reading, by pccheck.Reader."""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pccheck.client import PCcheckClient
from pccheck.reader import Reader
from pccheck.restoring.opened import OpenCheckpoint, Wanted
from pccheck.restoring.reading import RestoreResult
from pccheck_wire.errors import NoCheckpointError, PccheckError, UsageError

from .index import Index, WithoutId, require_one_node

#: How much host memory is used at once for tensors that are not read in place: those on a GPU.
_BATCH_BYTES = 256 << 20


def load(
    state_dict: dict[str, Any],
    *,
    job: str | None = None,
    step: int | None = None,
    client: PCcheckClient | None = None,
    storage: str | os.PathLike[str] | None = None,
    socket: str | os.PathLike[str] | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> RestoreResult:
    """Fills `state_dict` in place, as torch's `load` does, from the newest checkpoint that all
    ranks have, or from that of `step`. All ranks of `process_group` call it, in any number and any
    mesh; without torch.distributed one process does.

    With a `client` its job is read, as `client.restore()` does: what is in memory only, too; and
    counts as restored. Otherwise `job`, `storage` and `socket` are those of `pccheck.Reader`, which
    sees only what is durable.

    Returns what was loaded; a falsy result, with nothing changed, when the job has no checkpoint.
    Raises on all ranks what one rank meets: NoCheckpointError without a complete checkpoint of that
    step, StateMismatchError for a tensor of which some blocks are missing, DaemonUnreachableError
    and the like; and torch's CheckpointException for a state that does not fit.
    """
    reader = PCcheckReader(job, storage=storage, socket=socket, step=step, client=client)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            torch_load(
                state_dict, storage_reader=reader, planner=planner, process_group=process_group
            )
        result = reader.result
    except CheckpointException as error:
        ours = [one for one, _ in error.failures.values() if isinstance(one, PccheckError)]
        found = sorted(ours, key=lambda one: isinstance(one, _NothingError))
        if not found:
            raise
        if not isinstance(found[0], _NothingError):
            raise found[0] from error
        if dist.is_initialized() and len(error.failures) < dist.get_world_size(process_group):
            raise NoCheckpointError(
                f"ranks {sorted(error.failures)} find no checkpoint, and the other ranks find one",
                hint="give all ranks the same daemon or storage",
            ) from error
        result = RestoreResult()
    finally:
        reader.close()
    if result and client is not None:
        client.adopt()
    return result


def _require_readable(client: PCcheckClient) -> None:
    """Raises UsageError for a job whose checkpoints this process should or can not load."""
    require_one_node(client)
    if client.has_guessed_job:
        raise UsageError(
            f"the name of job {client.place[0]!r} comes from the script only: another command "
            "may have saved its checkpoints",
            hint="set PCCHECK_JOB, or PCcheckClient(job=...)",
        )


class _NothingError(NoCheckpointError):
    """The job has no checkpoint at all."""


class PCcheckReader(WithoutId, StorageReader):
    """For `torch.distributed.checkpoint.load(state, storage_reader=PCcheckReader(job))`; arguments
    as of `pccheck.Reader`, and a `step` (None: the newest that all ranks have). With a `client`
    its job is read, and what is in memory only is written first; `client.adopt()` afterwards says
    that this run continues the job.

    Reads what `save`, PCcheckWriter, `client.checkpoint(state)` and attached clients have saved.
    Names are paths with dots, as `pccheckctl show` prints them: what was attached as `model=` has
    the names `model.0.weight`; the state of an attached optimizer has the numbers of its own
    state_dict(), `optimizer.state.0.exp_avg`, and if it was made of named_parameters() also their
    names, `optimizer.state.0.weight.exp_avg`. Only the bytes that this rank needs are read. A value
    that several ranks have saved is that of the rank of the same number, else of the first one.
    """

    id_hint = "leave it out: PCcheckReader(job, step=step) says what is read"

    def __init__(
        self,
        job: str | None = None,
        *,
        storage: str | os.PathLike[str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        step: int | None = None,
        client: PCcheckClient | None = None,
    ) -> None:
        if client is not None:
            if job not in (None, client.place[0]) or storage is not None or socket is not None:
                raise UsageError(
                    "client= was given together with another job=, with storage= or socket=",
                    hint="leave client= out to read what another job has saved",
                )
            _require_readable(client)
            job, socket = client.place[0], client.where()
        self.result = RestoreResult()  #: what was read
        self._client = client
        self._place: dict[str, Any] = {"job": job, "storage": storage, "socket": socket}
        self._step = step
        self._reader: Reader | None = None
        self._opened: OpenCheckpoint | None = None
        self._index = Index({}, 0)
        self._error: PccheckError | None = None

    def close(self) -> None:
        """Closes the checkpoint. May be called again."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._opened = None

    def read_metadata(self, *_args: Any, **_more: Any) -> Metadata:
        """Leaves errors to `set_up_storage_reader`: torch replaces what is raised here."""
        self._error = None
        try:
            if self._client is not None:
                self._client.settle()  # also gates: a checkpoint in flight may read the tensors
            self._open(self._step)
        except PccheckError as error:
            self._error = error
            self.close()
            return Metadata({})
        return Metadata(self._index.items, planner_data=self._index.paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_more: Any
    ) -> None:
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self.result.sequence)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """While the job saves, ranks may have opened different checkpoints: all read the oldest."""
        sequence = min(plan.storage_data for plan in plans)
        return [replace(plan, storage_data=sequence) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if plan.storage_data != self.result.sequence:
            planned = self._index
            self._open(None, plan.storage_data)
            self._index.require_same(planned, (item.storage_index.fqn for item in plan.items))
        assert self._opened is not None
        batch = _Batch(self._opened, planner)
        by_name = self._index.is_by_name(item.storage_index.fqn for item in plan.items)
        for item in plan.items:
            path, rank = self._index.source(item.storage_index, by_name=by_name)
            if item.type != LoadItemType.BYTE_IO:
                batch.add(item, path, rank, self._index.items[item.storage_index.fqn])
                continue
            value = self._opened.read(path, rank=rank)
            made = io.BytesIO(value if self._index.planned else b"")
            if not self._index.planned:  # torch's planners read a pickle
                torch.save(value, made)
                made.seek(0)
            planner.load_bytes(item, made)
        batch.read()
        self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self, step: int | None, sequence: int | None = None) -> None:
        self.close()
        self._reader = Reader(**self._place)
        if step is None and not self._reader.steps():
            raise _NothingError(f"job {self._reader.job!r} has no checkpoint")
        opened = self._reader.open(step, sequence=sequence)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        ranks = sorted(opened.ranks, key=lambda one: (one != rank, one))
        self._index = Index({one: opened.describe(one) for one in ranks}, opened.step)
        self._opened = opened
        self.result = RestoreResult(opened.step, opened.sequence, metadata=opened.metadata)


class _Batch:
    """Reads what lies close together at once."""

    def __init__(self, opened: OpenCheckpoint, planner: LoadPlanner) -> None:
        self._opened, self._planner = opened, planner
        self._wanted: list[tuple[ReadItem, torch.Tensor, Wanted]] = []
        self._bytes = 0  # of memory beside the targets

    def add(self, item: ReadItem, path: str, rank: int, saved: TensorStorageMetadata) -> None:
        target = memory = self._planner.resolve_tensor(item).detach()
        dtype = saved.properties.dtype
        if target.device.type != "cpu" or target.dtype != dtype:
            memory = torch.empty(item.lengths, dtype=dtype, device="cpu")
            self._bytes += memory.nbytes
        self._wanted.append((item, target, Wanted(path, memory, rank, item.storage_offsets)))
        if self._bytes >= _BATCH_BYTES:
            self.read()

    def read(self) -> None:
        self._opened.read_many(wanted for _, _, wanted in self._wanted)
        for item, target, wanted in self._wanted:
            if wanted.dest is not target:
                target.copy_(wanted.dest)
            self._planner.commit_tensor(item, target)
        self._wanted, self._bytes = [], 0
