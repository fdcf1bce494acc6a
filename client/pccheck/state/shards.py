"""DTensors: the block of the whole tensor that this rank holds.

torch.distributed.tensor takes long to import, so only a program that uses DTensors imports it.
"""

from __future__ import annotations

import math
import sys
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import distributed

from pccheck_wire.errors import UnsupportedStateError

_MODULE = "torch.distributed.tensor"
LOCAL = attrgetter("_local_tensor")


class DividingRanks(NamedTuple):
    """The ranks that store blocks once which they all hold: a row of the ranks of the job. They are
    all ranks; with replicated=True those of this node, which has a whole copy."""

    ranks: int = 1  # of the job
    first: int = 0
    size: int = 1

    @property
    def is_part(self) -> bool:
        return self.size < self.ranks


ALONE = DividingRanks()


class Shard(NamedTuple):
    """A rank's block of a tensor of `shape`: `tensor` has its elements from `offsets` on. What
    `recover()` returns for a DTensor; `checkpoint(state)` also saves one."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def is_sharded(value: object) -> TypeGuard[Any]:
    """Whether it is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(type(value), module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank: of a DTensor its local part, without autograd and communication."""
    return LOCAL(tensor) if is_sharded(tensor) else tensor


def offsets_of(tensor: torch.Tensor, path: str) -> list[int]:
    """Where the local part begins in the whole tensor, by dimension.

    Raises UnsupportedStateError if the local part is not one block of the whole tensor.
    """
    if not is_sharded(tensor):
        return [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None:
        raise UnsupportedStateError(
            f"{path}: this rank is not in the mesh of the DTensor, and holds nothing of it",
            hint="attach on each rank only what the rank holds",
        )
    if any(one.is_partial() for one in placements):
        raise UnsupportedStateError(
            f"{path}: a DTensor with the placements {placements} is not reduced yet",
            hint="redistribute it to Shard or Replicate",
        )
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(shape) != tuple(LOCAL(tensor).shape) or not _in_order(mesh.shape, placements):
        raise UnsupportedStateError(
            f"{path}: the local part of a DTensor with the placements {placements} on a mesh of "
            f"{tuple(mesh.shape)} is not one block of it",
            hint="redistribute it, or shard it in the order of the mesh's dimensions",
        )
    return list(offsets) if math.prod(shape) else [0] * len(shape)


def stored_part(
    tensor: Any, offsets: list[int], row: DividingRanks, path: str
) -> tuple[torch.Tensor, list[int]]:
    """What this rank stores of its local part, and where that begins in the whole tensor.

    Ranks of the row with the same block (replicas) store one part of it each, when all ranks of
    the job are in the mesh: else some of them may not save at all. Raises UnsupportedStateError if
    the row should hold the whole tensor, and does not.
    """
    part, mesh = LOCAL(tensor), tensor.device_mesh
    has_all = mesh.size() == row.ranks == distributed.get_world_size()
    if row.is_part and not (has_all and _holds_all(mesh.mesh, tensor.placements, row)):
        raise UnsupportedStateError(
            f"{path}: with replicated=True each node stores a whole copy. So the mesh of a DTensor "
            "must have all ranks of the job, and the ranks of a node must have all its blocks "
            f"(placements {tensor.placements}, mesh {tuple(mesh.shape)})",
            hint="shard within a node and replicate across nodes (HSDP), or leave replicated=True "
            "out",
        )
    alike = zip(mesh.get_coordinate(), tensor.placements, strict=True)
    place = tuple(slice(None) if one.is_replicate() else at for at, one in alike)
    replicas = mesh.mesh[place].flatten().tolist()
    sharers = [rank for rank in replicas if row.first <= rank < row.first + row.size]
    if len(sharers) < 2 or not has_all or not part.dim():
        return part, offsets
    index, count = sharers.index(distributed.get_rank()), len(sharers)
    # By the shape alone: the replicas may lie in memory in different orders. Of one that lies there
    # by rows each part is one run of bytes.
    dim = max(range(part.dim()), key=lambda dim: part.size(dim) > 1)
    first, end = (part.size(dim) * i // count for i in (index, index + 1))
    with torch.no_grad():
        mine = part.narrow(dim, first, end - first)
    if not mine.numel():
        return mine, [0] * len(offsets)
    return mine, [at + first * (d == dim) for d, at in enumerate(offsets)]


def _holds_all(mesh: torch.Tensor, placements: tuple[Any, ...], row: DividingRanks) -> bool:
    """Whether the ranks of the row have every block."""
    here = (mesh >= row.first) & (mesh < row.first + row.size)
    for dim in reversed([dim for dim, one in enumerate(placements) if one.is_replicate()]):
        here = here.any(dim)
    return bool(here.all())


def _in_order(sizes: tuple[int, ...], placements: tuple[Any, ...]) -> bool:
    """Whether every strided shard is the one that FSDP2 makes of what tensor parallelism has
    sharded: later dimensions of the mesh cut first, and the rank keeps one block."""
    for index, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        later = zip(sizes[index + 1 :], placements[index + 1 :], strict=True)
        if factor != math.prod(size for size, one in later if one.is_shard(placement.dim)):
            return False
    return True


def empty_like(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """A DTensor cut as the given one, or a plain tensor, in new, uninitialised memory."""
    part = local(tensor)
    made = torch.empty_strided(part.shape, part.stride(), dtype=dtype, device=part.device)
    if part is tensor:
        return made
    found: torch.Tensor = sys.modules[_MODULE].DTensor.from_local(
        made, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip
    return found
