"""Attached tensors with elements that share memory, where the checkpoint's may differ.

What shares memory now must have shared it when it was saved. One exception: weights that are tied
now and were not then, as in a checkpoint of other software, may have the same value; these values
alone are read and compared before anything is written. A tensor of a dict is refused without that:
it was a copy, and an update of the other tensor would change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from pccheck.state import devices
from pccheck.state.extents import pack
from pccheck.state.flatten import DTYPE_NAMES
from pccheck_wire import tree
from pccheck_wire.blocks import Block
from pccheck_wire.errors import StateMismatchError

from .rebuild import Loader, Memory

DEVICES = frozenset(("cpu", "cuda"))
NO_EXTENT = 1 << 62  # of values that are not the checkpoint's, or not as they were
_OWN_MEMORY = (
    "give each value of a dict its own memory (clone()), build the model as it was, or take what "
    "you need from recover()"
)


class Pair(NamedTuple):
    """What the checkpoint has, and the memory that it goes to."""

    path: str
    node: tree.Tensor
    live: torch.Tensor

    @property
    def lies_otherwise(self) -> bool:
        """Whether it was saved with another layout."""
        return list(self.live.stride()) != self.node.strides

    @property
    def place(self) -> tuple[int, ...]:
        """Equal for what shared memory in the same way when it was saved."""
        _, node, live = self
        if not self.lies_otherwise:
            return node.extent, live.data_ptr() - node.offset
        return node.extent, node.offset, *node.shape, *node.strides, live.data_ptr(), *live.stride()


class Cut(NamedTuple):
    """A local part that is another block than the one that this rank has saved. `memory` is loaded
    from many small pieces: the part itself, or for a part on a GPU host memory that is copied."""

    path: str
    live: torch.Tensor
    memory: torch.Tensor
    block: Block

    @classmethod
    def of(cls, path: str, live: torch.Tensor, whole: list[int], offsets: list[int]) -> Cut:
        memory = live
        if devices.device_of(live) != devices.HOST:
            memory = torch.empty(live.shape, dtype=live.dtype, device="cpu")
        dtype = str(live.dtype).removeprefix("torch.")
        block = Block(memory.data_ptr(), whole, memory.shape, offsets, memory.stride(), dtype)
        return cls(path, live, memory, block)


Target: TypeAlias = Pair | Cut


def alike(node: tree.Tensor | tree.Shard, live: torch.Tensor) -> bool:
    """Whether the tensor can take what the checkpoint has."""
    return (
        live.layout is torch.strided
        and live.device.type in DEVICES
        and DTYPE_NAMES.get(live.dtype) == node.dtype
        and list(live.shape) == node.shape
    )


def write(live: torch.Tensor, value: torch.Tensor) -> None:
    """`copy_`, which torch refuses where elements share memory (an expanded buffer), and outside of
    inference mode for tensors that were made there."""
    for dim, stride in enumerate(live.stride()):
        if stride == 0 and live.size(dim) > 1:
            live, value = live.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if live.is_inference():
        with torch.inference_mode():
            live.copy_(value)
    else:
        live.copy_(value)


def require_one_value(pairs: Sequence[Pair], extents: list[tree.Extent], load: Loader) -> None:
    """Raises StateMismatchError by path when the checkpoint has, or may have, different values for
    one place in memory. Calls `load` only for tied tensors that were not tied."""
    for numbers in _overlapping(pairs):
        first, *rest = [pairs[number] for number in numbers]
        if first.lies_otherwise and overlaps_itself(first.live):
            raise StateMismatchError(
                f"{first.path}: elements of the attached tensor share memory, as after expand(), "
                "and did not when it was saved",
                hint="attach a tensor with memory of its own (clone()), or take what you need from "
                "recover()",
            )
        other = next((pair for pair in rest if pair.place != first.place), None)
        if other is None:
            continue
        if any(_layout(pair.live) != _layout(first.live) for pair in rest):
            raise _shares(other.path, first.path)
        memory = Memory(extents, {pair.node.extent for pair in (first, *rest)})
        load(pack(memory.ranges))
        value = _bytes(memory.tensor(first.node))
        for pair in rest:
            if not torch.equal(_bytes(memory.tensor(pair.node)), value):
                raise StateMismatchError(
                    f"{first.path} shares memory with {pair.path}, as tied weights do, and the "
                    "checkpoint has different values for the two",
                    hint=_OWN_MEMORY,
                )


def require_shared(strict: Sequence[Pair], others: Sequence[Pair]) -> None:
    """Raises StateMismatchError when one of `strict` shares memory and did not when saved."""
    pairs = [*others, *strict]
    for numbers in _overlapping(pairs) if strict else ():
        one = pairs[max(numbers)]
        other = next((pairs[n].path for n in numbers if pairs[n].place != one.place), None)
        if other is not None and max(numbers) >= len(others):
            raise _shares(one.path, other)


def _shares(path: str, other: str) -> StateMismatchError:
    return StateMismatchError(
        f"{path} shares memory with {other}, and did not when it was saved", hint=_OWN_MEMORY
    )


def _overlapping(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """The numbers of tensors whose memory overlaps, or of one alone."""
    spans = sorted(
        (devices.device_of(live), live.data_ptr(), _end(live), index)
        for index, (_, node, live) in enumerate(pairs)
        if node.extent >= 0
    )
    group: list[int] = []
    before, end = -2, 0  # of the group
    for device, address, end_here, index in spans:
        if group and (device != before or address >= end):
            yield group
            group, end = [], 0
        group.append(index)
        before, end = device, max(end, end_here)
    if group:
        yield group


def overlaps_itself(live: torch.Tensor) -> bool:
    """Whether two elements may have one address: a stride stays in the inner dimensions."""
    reach = 0
    for stride, size in sorted(zip(live.stride(), live.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _end(live: torch.Tensor) -> int:
    if live.is_contiguous():
        return live.data_ptr() + live.nbytes
    span = tree.span_bytes(list(live.shape), list(live.stride()), live.element_size())
    return live.data_ptr() + span


def _layout(live: torch.Tensor) -> tuple[object, ...]:
    flags = live.is_conj(), live.is_neg()
    return live.data_ptr(), live.shape, live.stride(), live.dtype, *flags


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
