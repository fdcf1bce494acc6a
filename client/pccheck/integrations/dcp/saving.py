"""torch.distributed.checkpoint: saving.

`save` and `async_save` need no plan and no communication: each rank stores its own blocks as they
are. PCcheckWriter takes part in torch's own `save`.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from pccheck.client import PCcheckClient
from pccheck.flight.in_flight import NOT_SAVED
from pccheck.saving.handle import Checkpoint
from pccheck.state.shards import Shard
from pccheck.warn import LOG
from pccheck_wire.errors import CheckpointFailedError, PccheckError, UsageError

from .index import PLANNED, WithoutId, listed, require_one_node

_SAVE_LIMIT_S = 300.0


def async_save(state_dict: dict[str, Any], *, client: PCcheckClient, step: int) -> Checkpoint:
    """Takes a snapshot of this rank's part of `state_dict`, and returns without waiting for a disk
    or another rank. Every rank of the job calls it for the same steps. Several may be in flight.

    Values with a `state_dict` are asked for it. When tensors may be changed, and what is raised, is
    as for `client.checkpoint(state)`: attach the optimizer to the client, and its `step()` waits
    for the copy; otherwise this returns when the copy is complete. A DTensor is stored as this
    rank's block, all else as this rank has it. Raises UsageError for a job with ranks on several
    nodes.
    """
    require_one_node(client)
    state = {
        name: value.state_dict() if isinstance(value, Stateful) else value
        for name, value in state_dict.items()
    }
    return client.checkpoint(state, step=step)


def save(
    state_dict: dict[str, Any], *, client: PCcheckClient, step: int, limit_s: float = _SAVE_LIMIT_S
) -> Checkpoint:
    """`async_save`, then waits until all ranks have the checkpoint, for `limit_s` at most.

    With `PCcheckClient(on_error="raise")` it raises when the checkpoint failed or the time is over.
    Otherwise it warns, and the handle has the reason.
    """
    handle = async_save(state_dict, client=client, step=step)
    _finish(client, handle, limit_s)
    return handle


def _finish(client: PCcheckClient, handle: Checkpoint, limit_s: float) -> None:
    try:
        handle.wait_global(limit_s)
    except PccheckError as error:
        if client.on_error == "raise":
            raise
        failed_here = isinstance(error, CheckpointFailedError) and handle.state in NOT_SAVED
        if not failed_here:  # of which the client warns
            LOG.warning("PCcheck: %s. Training continues", error)


class PCcheckWriter(WithoutId, StorageWriter):
    """For scripts that call `torch.distributed.checkpoint.save(state, storage_writer=...)`
    themselves, with any planner. One writer saves one step, and `checkpoint` is its handle.

    torch's `save` then returns, or raises, as `pccheck.integrations.dcp.save` does. What the
    planner hands over as bytes (torch's own planner pickles what is not a tensor) is stored as
    bytes. torch's `async_save` is refused: it would read the tensors in another thread, while
    training changes them. Raises UsageError for a job with ranks on several nodes.
    """

    id_hint = "leave it out: PCcheckWriter(client, step) says what is saved"

    def __init__(self, client: PCcheckClient, step: int, *, limit_s: float = _SAVE_LIMIT_S) -> None:
        require_one_node(client)
        self.checkpoint: Checkpoint | None = None
        self._client, self._step, self._limit_s = client, step, limit_s
        self._thread = threading.get_ident()

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_more: Any) -> None:
        """Raises UsageError in another thread than the writer's, and for a second save."""
        if threading.get_ident() != self._thread:
            raise UsageError(
                "torch's async_save() would read the tensors while training changes them",
                hint="use pccheck.integrations.dcp.async_save(state, client=client, step=step)",
            )
        if self.checkpoint is not None:
            raise UsageError(
                f"this writer has saved step {self._step} already",
                hint="make a PCcheckWriter(client, step) for each save",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keeps the items of this rank: torch may leave replicated items to another rank."""
        return replace(plan, storage_data=plan.items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Any] = {}
        opaque: dict[str, bytes] = {}
        for fqn, value in _resolved(plan, planner):
            if isinstance(value, bytes):
                opaque[fqn] = value
            else:  # a name may have several blocks
                tensors[fqn] = [*listed(tensors[fqn]), value] if fqn in tensors else value
        state = {PLANNED: 1, "paths": plan.planner_data, "tensors": tensors, "bytes": opaque}
        self.checkpoint = self._client.checkpoint(state, step=self._step)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.checkpoint is not None
        _finish(self._client, self.checkpoint, self._limit_s)


def _resolved(plan: SavePlan, planner: SavePlanner) -> Iterator[tuple[str, Shard | bytes]]:
    """What this rank stores, by name: its part of the plan; its own small values, also when another
    rank stores them; and empty blocks of what only other ranks store. So the state of each rank has
    all names, and an export is complete."""
    mine = {item.index.fqn for item in plan.items}
    others = [item for item in plan.storage_data or () if item.index.fqn not in mine]
    for item in (*plan.items, *others):
        fqn, data = item.index.fqn, item.tensor_data
        if data is None:
            value = planner.resolve_data(item)
            assert isinstance(value, io.BytesIO)
            yield fqn, value.getvalue()
            continue
        tensor = torch.empty([0] * len(data.size), dtype=data.properties.dtype)
        offsets = (0,) * len(data.size)
        if fqn in mine or not data.size:
            resolved = planner.resolve_data(item)
            assert isinstance(resolved, torch.Tensor)
            tensor, offsets = resolved.detach(), tuple(data.chunk.offsets)
        yield fqn, Shard(tensor, tuple(data.size), offsets)
