"""Attached tensors with elements that share memory, where the checkpoint's may differ.

Expanded tensors, overlapping views, and weights that are tied now and were not when they were saved
can hold only one of the values. Where that is possible, those values alone are read and compared
before anything is written. A tensor of a dict is refused without that: it was a copy, and an update
of the other tensor would change it.
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
from pccheck_wire.tree import ITEM_BYTES

from .rebuild import Loader, Memory

DEVICES = frozenset(("cpu", "cuda"))
NO_EXTENT = 1 << 62  # of values that are not the checkpoint's, or not as they were


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
    """Raises StateMismatchError by path when the checkpoint has different values for one place in
    memory. Calls `load` only where that is possible."""
    for start, nbytes, some in _doubtful(pairs):
        memory = Memory(extents, {pair.node.extent for pair in some})
        load(pack(memory.ranges))
        _try(start, nbytes, some, memory)


def require_shared(strict: Sequence[Pair], copied: Sequence[Pair], others: Sequence[Pair]) -> None:
    """Raises StateMismatchError when one of `strict` shares memory with another pair and did not
    when it was saved; or one of `copied` with memory that keeps its value."""
    pairs = [*others, *strict, *copied]
    for _, _, numbers in _overlapping(pairs) if strict or copied else ():
        keeps = any(pairs[number].node.extent == NO_EXTENT for number in numbers)
        some = [n for n in numbers if keeps or n < len(others) + len(strict)]
        one = pairs[max(some, default=0)]
        other = next((pairs[n].path for n in some if pairs[n].place != one.place), None)
        if other is not None and max(some) >= len(others):
            raise StateMismatchError(
                f"{one.path} shares memory with {other}, and did not when it was saved",
                hint="give each value of a dict its own memory (clone()), build the model as it "
                "was, or take what you need from recover()",
            )


def _doubtful(pairs: Sequence[Pair]) -> Iterator[tuple[int, int, list[Pair]]]:
    """Tensors whose memory overlaps, with their first address and the bytes from there on. Not
    those that were saved with the same layout: their values are the same."""
    for start, nbytes, numbers in _overlapping(pairs):
        if len(numbers) == 1 and not pairs[numbers[0]].lies_otherwise:
            continue
        some = [pairs[number] for number in numbers]
        places = {pair.place for pair in some}
        if len(places) > 1 or any(p.lies_otherwise and overlaps_itself(p.live) for p in some):
            yield start, nbytes, some


def _overlapping(pairs: Sequence[Pair]) -> Iterator[tuple[int, int, list[int]]]:
    """The numbers of tensors whose memory overlaps, or of one alone, with their first address and
    the bytes from there on."""
    spans = sorted(
        (devices.device_of(live), live.data_ptr(), _end(live), index)
        for index, (_, node, live) in enumerate(pairs)
        if node.extent >= 0
    )
    first, end, before = 0, 0, -2  # of those that overlap, and their device
    for at, (device, address, end_here, _) in enumerate([*spans, (-2, 0, 0, 0)]):
        if at and device == before and address < end:
            end = max(end, end_here)
            continue
        if at > first:
            yield spans[first][1], end - spans[first][1], [span[3] for span in spans[first:at]]
        first, end, before = at, end_here, device


def overlaps_itself(live: torch.Tensor) -> bool:
    """Whether two elements may have one address: unless each stride leaves the inner dimensions
    behind."""
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


def _try(start: int, nbytes: int, some: list[Pair], memory: Memory) -> None:
    """Writes all into memory that overlaps alike, and looks at what is there afterwards."""
    there = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    tried: list[tuple[Pair, torch.Tensor, torch.Tensor]] = []
    for pair in some:
        item = ITEM_BYTES[pair.node.dtype]
        strides = [stride * item for stride in pair.live.stride()]
        place = there.as_strided(
            (*pair.live.shape, item), (*strides, 1), pair.live.data_ptr() - start
        )
        value = _bytes(pair, memory, item)
        write(place, value)
        if not torch.equal(place, value):
            raise StateMismatchError(
                f"{pair.path}: elements of the attached tensor share memory, as after expand(), "
                "and the checkpoint has different values for them",
                hint="attach a tensor with memory of its own (clone()), or take what you need from "
                "recover()",
            )
        tried.append((pair, place, value))
    for pair, place, value in tried:
        if not torch.equal(place, value):
            raise StateMismatchError(
                f"{pair.path} shares memory with {_other(pair, place, value, tried)}, as tied "
                "weights do, and the checkpoint has different values for the two",
                hint="build the model as it was, give each value of a dict its own memory "
                "(clone()), or take what you need from recover()",
            )


def _other(
    pair: Pair,
    place: torch.Tensor,
    value: torch.Tensor,
    tried: list[tuple[Pair, torch.Tensor, torch.Tensor]],
) -> str:
    """For a message: the path of a tensor with which it cannot be together."""
    for other, place_there, value_there in tried:
        write(place, value)
        write(place_there, value_there)
        if other is not pair and not torch.equal(place, value):
            return other.path
    raise AssertionError(pair.path)


def _bytes(pair: Pair, memory: Memory, item: int) -> torch.Tensor:
    """The value as it would lie in the attached tensor: one more dimension, of bytes."""
    value = memory.tensor(pair.node).detach()
    if pair.live.is_conj():
        value = value.conj()
    if pair.live.is_neg():
        value = value.neg()
    plain = value.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).view(*plain.shape, item)
