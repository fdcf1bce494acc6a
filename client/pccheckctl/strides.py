"""Strided views without torch or NumPy. Strides count elements and are never negative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

#: memoryview formats by item size: slicing with a step works on items.
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def contiguous_strides(shape: Sequence[int], *, order: str = "C") -> tuple[int, ...]:
    """Strides of an array without holes, last ("C") or first ("F") dimension fastest."""
    strides, step = [], 1
    for dim in reversed(shape) if order == "C" else shape:
        strides.append(step)
        step *= max(1, dim)
    return tuple(reversed(strides)) if order == "C" else tuple(strides)


def same_layout(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True when the elements lie in C order without holes; strides of length-1 dimensions and of
    empty tensors do not matter."""
    if 0 in shape:
        return True
    wanted = contiguous_strides(shape)
    return all(
        dim == 1 or have == want for dim, have, want in zip(shape, strides, wanted, strict=True)
    )


def gather(data: bytes, item: int, shape: Sequence[int], strides: Sequence[int]) -> bytearray:
    """The elements of a view in C order; `data` starts at its first element."""
    dims, steps = list(shape), list(strides)
    if item == 16:  # no such memoryview format: two items of 8
        dims, steps, item = [*dims, 2], [*(2 * step for step in steps), 1], 8
    items = memoryview(data).cast(_FORMATS[item])
    made = bytearray(math.prod(dims) * item)
    target = memoryview(made).cast(_FORMATS[item])
    if not made:
        return made
    if not dims:
        target[0] = items[0]
        return made
    length, step = dims.pop(), steps.pop()
    at = 0
    for start in _offsets(dims, steps):
        if step == 0:
            target[at : at + length] = memoryview(items[start : start + 1].tobytes() * length).cast(
                _FORMATS[item]
            )
        else:
            target[at : at + length] = items[start : start + (length - 1) * step + 1 : step]
        at += length
    return made


def _offsets(dims: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Where each innermost row starts, in C order."""
    starts = [0]
    for dim, step in zip(dims, steps, strict=True):
        starts = [start + index * step for start in starts for index in range(dim)]
    return starts
