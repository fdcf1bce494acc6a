"""torch.distributed.checkpoint: what its names stand for, and its Metadata, made for a read."""

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

from pccheck.client import PCcheckClient
from pccheck.restoring.opened import TensorInfo
from pccheck_wire.errors import StateMismatchError, UsageError

#: The root of what PCcheckWriter saves has this key.
PLANNED = "torch.distributed.checkpoint"
#: In an optimizer's state.
_GROUPS, _NAMES = "param_groups", "param_names"


class WithoutId:
    """A storage whose arguments name the checkpoint, as `id_hint` says."""

    id_hint: str

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Raises UsageError for a `checkpoint_id`."""
        if checkpoint_id is not None:
            raise UsageError(f"checkpoint_id={checkpoint_id!r} is not used", hint=self.id_hint)


def require_one_node(client: PCcheckClient) -> None:
    """torch's planners let one rank save or load for others. Raises UsageError if those may be on
    other nodes, whose disks this node does not read."""
    if client.spans_nodes:
        raise UsageError(
            f"the ranks of job {client.place[0]!r} are on several nodes, and "
            "torch.distributed.checkpoint would load what other nodes have saved",
            hint="attach model and optimizer, and use client.checkpoint(step=) and "
            "client.restore(), with DTensors, too; or torch's own FileSystemWriter and reader",
        )


class Index:
    """What torch's names stand for in the states of all ranks."""

    def __init__(self, states: Mapping[int, Any], step: int) -> None:
        """Of what several ranks have saved the first counts. Raises StateMismatchError."""
        self.items: dict[str, Any] = {}  # torch's metadata, by name
        self.paths: dict[str, Any] = {}  # the keys that a name consists of
        self.planned = any(PLANNED in state for state in states.values())
        self._lists: dict[str, str] = {}  # numbers of parameters, and the list of their names
        self._by_name: set[str] = set()  # names with those of parameters in place of numbers
        self._twofold: set[str] = set()  # of those, what is also a name with a number
        self._step = step
        self._sources: dict[MetadataIndex, tuple[str, int]] = {}
        for rank, state in states.items():
            for name, keys, path, value in _named(state):
                self.paths.setdefault(name, keys)
                self._enter(name, value, (path, rank))
        if not self.planned:
            for rank, state in states.items():
                self._add_by_name(rank, state)
        for name, item in self.items.items():
            self._require_whole(name, item)

    def source(self, index: MetadataIndex, *, by_name: bool = False) -> tuple[str, int]:
        """The path and the rank of a block or a value. `by_name` as `is_by_name` says."""
        path, rank = self._sources[index]
        return (self._lists.get(path, path) if by_name else path), rank

    def is_by_name(self, names: Iterable[str]) -> bool:
        """Whether the state that is loaded has parameters' names where an attached optimizer has
        numbers. Raises StateMismatchError for names that may be either."""
        wanted = set(names)
        if twofold := sorted(wanted & self._twofold):
            raise StateMismatchError(
                f"{twofold[0]} may mean two parameters: the one of this name, and the one that has "
                "this number in the optimizer",
                hint="restore it with client.restore(), or give the parameter a name with letters",
            )
        return bool(wanted & self._by_name)

    def require_same(self, other: Index, names: Iterable[str]) -> None:
        """Raises StateMismatchError if `other`, which was planned for, differs in `names`."""
        for name in names:
            if self.items.get(name) != other.items.get(name):
                raise StateMismatchError(
                    f"{name} differs between step {other._step}, which this rank found at first, "
                    f"and step {self._step}, the newest one that all ranks have",
                    hint="load again, or pass step= to choose one",
                )

    def _enter(self, name: str, value: Any, source: tuple[str, int]) -> None:
        if _is_tensor(value):
            self._add(name, value, source)
        elif name not in self.items:
            self.items[name] = BytesStorageMetadata()
            self._sources[MetadataIndex(name)] = source

    def _add_by_name(self, rank: int, state: Mapping[Any, Any]) -> None:
        """An attached optimizer that was made of named_parameters() has their names in its groups:
        its state also by those, as torch's get_state_dict() has it, flattened or not."""
        numbered = {name for name in self.paths if name not in self._by_name}
        for key, keys, path, value in _of_parameters(state):
            name = ".".join(map(str, keys))
            if name in numbered:
                if name != path:
                    self._twofold.add(name)
                continue
            self._by_name.add(name)
            self.paths.setdefault(name, keys)
            self._enter(name, value, (path, rank))
            for group in range(len(state[key][_GROUPS])):
                place = f"{key}.{_GROUPS}.{group}"
                self._lists[f"{place}.params"] = f"{place}.{_NAMES}"

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


def _of_parameters(state: Mapping[Any, Any]) -> Iterator[tuple[Any, tuple[Any, ...], str, Any]]:
    """What optimizers have of parameters whose names they know: the optimizer's key, keys with the
    name of the parameter, the path, and the value."""
    for key, found in state.items():
        inside = found if isinstance(found, Mapping) else {}
        moments, groups = inside.get("state"), inside.get(_GROUPS)
        if not isinstance(moments, Mapping) or not isinstance(groups, list):
            continue
        for number, group in enumerate(groups):
            for index, name in _names_of(group):
                entry = moments.get(index)
                for field, value in entry.items() if isinstance(entry, Mapping) else ():
                    yield key, (key, "state", name, field), f"{key}.state.{index}.{field}", value
                for field, value in group.items():
                    if field != "params":
                        path = f"{key}.{_GROUPS}.{number}.{field}"
                        yield key, (key, _GROUPS, name, field), path, value


def _names_of(group: Any) -> list[tuple[int, str]]:
    """The number and the name of each parameter of an optimizer's group, if it has both."""
    inside = group if isinstance(group, Mapping) else {}
    numbers, names = inside.get("params"), inside.get(_NAMES)
    if not isinstance(numbers, list) or not isinstance(names, list) or len(numbers) != len(names):
        return []
    known = all(isinstance(one, int) for one in numbers)
    return [*zip(numbers, map(str, names), strict=True)] if known else []


def _is_tensor(value: object) -> bool:
    return isinstance(value, TensorInfo) and isinstance(value.dtype, torch.dtype)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _missing(item: TensorStorageMetadata) -> int:
    return int(item.size.numel() - sum(math.prod(chunk.sizes) for chunk in item.chunks))
