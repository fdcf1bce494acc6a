"""torch.distributed.checkpoint: what its names stand for. Makes its Metadata when a checkpoint is
read, from what all ranks have saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pccheck.restoring.opened import TensorInfo
from pccheck_wire.errors import StateMismatchError

#: The root of what PCcheckWriter saves has this key.
PLANNED = "torch.distributed.checkpoint"


class Index:
    """What torch's names stand for in the states of all ranks."""

    def __init__(self, states: Mapping[int, Any], step: int) -> None:
        """Of a value that several ranks have saved, the first of `states` counts. Raises
        StateMismatchError."""
        self.items: dict[str, Any] = {}  # torch's metadata, by name
        self.paths: dict[str, Any] = {}  # the keys that a name consists of
        self.planned = any(PLANNED in state for state in states.values())
        self._step = step
        self._sources: dict[MetadataIndex, tuple[str, int]] = {}
        for rank, state in states.items():
            for name, keys, path, value in _named(state):
                self.paths.setdefault(name, keys)
                if _is_tensor(value):
                    self._add(name, value, (path, rank))
                elif name not in self.items:
                    self.items[name] = BytesStorageMetadata()
                    self._sources[MetadataIndex(name)] = path, rank
        for name, item in self.items.items():
            self._require_whole(name, item)

    def source(self, index: MetadataIndex) -> tuple[str, int]:
        """The path and the rank of a block or a value."""
        return self._sources[index]

    def require_same(self, other: Index, names: Iterable[str]) -> None:
        """Raises StateMismatchError if `other`, which was planned for, differs in `names`."""
        for name in names:
            if self.items.get(name) != other.items.get(name):
                raise StateMismatchError(
                    f"{name} differs between step {self._step}, which all ranks have, and step "
                    f"{other._step}, which this rank has found first",
                    hint="load again, or name the step",
                )

    def _add(self, name: str, info: TensorInfo, source: tuple[str, int]) -> None:
        """Adds a block. Of replicas only the first is added."""
        assert isinstance(info.dtype, torch.dtype)
        properties = TensorProperties(dtype=info.dtype, requires_grad=info.requires_grad)
        made = TensorStorageMetadata(properties, torch.Size(info.whole_shape), [])
        known = self.items.setdefault(name, made)
        index = MetadataIndex(name, info.offsets)
        if (
            isinstance(known, TensorStorageMetadata)
            and (known.size, known.properties.dtype) == (made.size, info.dtype)
            and 0 not in info.shape and index not in self._sources and _missing(known)
        ):  # fmt: skip
            chunk = ChunkStorageMetadata(torch.Size(info.offsets), torch.Size(info.shape))
            known.chunks.append(chunk)
            self._sources[index] = source

    def _require_whole(self, name: str, item: Any) -> None:
        if isinstance(item, TensorStorageMetadata) and (missing := _missing(item)):
            raise StateMismatchError(
                f"{name}: the ranks saved all but {missing} of the {item.size.numel()} elements of "
                f"this tensor in step {self._step}",
                hint="save on every rank that holds a part; see: pccheckctl show",
            )


def _named(state: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Every value of a rank: its name, the keys of that name, its path, and the value."""
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"the checkpoint has a {type(state).__name__}, and torch.distributed.checkpoint loads "
            "only dicts",
            hint="read it with pccheck.Reader",
        )
    if PLANNED in state:
        keys = state["paths"] or {}
        for name, value in state["tensors"].items():
            for number, block in enumerate(listed(value)):
                path = f"tensors.{name}.{number}" if isinstance(value, list) else f"tensors.{name}"
                yield name, keys.get(name), path, block
        for name, value in state["bytes"].items():
            yield name, keys.get(name), f"bytes.{name}", value
        return
    found: dict[str, tuple[Any, Any]] = {}

    def add(keys: Any, value: object) -> None:
        name = ".".join(map(str, keys))
        if name in found:
            raise StateMismatchError(
                f"two values of the state have the name {name}, which torch.distributed.checkpoint "
                "cannot tell apart",
                hint="rename one of them; pccheck.Reader reads the checkpoint as it is",
            )
        found[name] = keys, value

    traverse_state_dict(dict(state), add, _is_tensor)
    for name, (keys, value) in found.items():
        yield name, keys, name, value


def _is_tensor(value: object) -> bool:
    return isinstance(value, TensorInfo) and isinstance(value.dtype, torch.dtype)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _missing(item: TensorStorageMetadata) -> int:
    return int(item.size.numel() - sum(math.prod(chunk.sizes) for chunk in item.chunks))
