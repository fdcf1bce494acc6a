"""Blocks of tensors in another cut, against NumPy."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import struct
from typing import Any

import numpy as np
import pytest

from pccheck_wire import parts, tree
from pccheck_wire.blocks import Block, Blocks
from pccheck_wire.errors import StateMismatchError

Box = tuple[list[int], list[int]]  # offsets and sizes


def cut(shape: list[int], rng: random.Random) -> list[Box]:
    """Boxes that together are the whole, uneven and some of them empty."""
    edges = [
        sorted([0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 2)))])
        for size in shape
    ]
    axes = [[(a, b - a) for a, b in itertools.pairwise(one)] for one in edges]
    return [([at for at, _ in box], [size for _, size in box]) for box in itertools.product(*axes)]


def strided(sizes: list[int], item: int, rng: random.Random) -> np.ndarray[Any, Any]:
    """An array of random bytes whose dimensions lie in any order in memory, with holes."""
    order = rng.sample(range(len(sizes)), len(sizes))
    room = [sizes[dim] + rng.randint(0, 1) for dim in order]
    base = np.frombuffer(bytearray(rng.randbytes(math.prod(room) * item)), f"V{item}")
    base = base.reshape(room)[(..., *(slice(sizes[dim]) for dim in order))]
    return base.transpose([order.index(dim) for dim in range(len(sizes))])


def node_of(array: np.ndarray[Any, Any], dtype: str, offset: int) -> tree.Tensor:
    strides = [stride // array.itemsize for stride in array.strides]
    empty = 0 in array.shape
    return tree.Tensor(
        list(array.shape), strides, dtype, 0, -1 if empty else 0, 0 if empty else offset
    )


def window(box: Box) -> tuple[Any, ...]:
    return ..., *(slice(at, at + size) for at, size in zip(*box, strict=True))


def saved(
    whole: np.ndarray[Any, Any], boxes: list[Box], dtype: str, rng: random.Random
) -> tuple[dict[int, tree.Tree], list[bytes]]:
    """A tree for each box, and the payload."""
    trees, payloads = {}, []
    for rank, box in enumerate(boxes):
        part = strided(box[1], whole.itemsize, rng)
        part[...] = whole[window(box)]
        lead = 8 * rng.randint(0, 3)
        span = 0
        if part.size:
            span = sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True))
            span += part.itemsize
        address = part.__array_interface__["data"][0]
        payloads.append(bytes(lead) + ctypes.string_at(address, span))
        shard = tree.Shard(
            node_of(part, dtype, lead), list(whole.shape), box[0], [len(boxes)], [], ["S(0)"]
        )
        extents = [tree.Extent(0, lead + span)] if part.size else []
        root = tree.Mapping(tree.Tag.DICT, [("w", shard)])
        trees[rank] = tree.Tree(1, None, True, extents, root)
    return trees, payloads


def fill(ranges: bytes, payloads: list[bytes]) -> None:
    for address, offset, nbytes in struct.iter_unpack("<QQQ", ranges):
        rank, offset = parts.placed(offset)
        ctypes.memmove(address, payloads[rank][offset : offset + nbytes], nbytes)


def wanted(array: np.ndarray[Any, Any], shape: list[int], at: list[int], dtype: str) -> Block:
    strides = [stride // array.itemsize for stride in array.strides]
    address = array.__array_interface__["data"][0]
    return Block(address, shape, array.shape, at, strides, dtype)


@pytest.mark.parametrize("seed", range(120))
def test_any_cut_becomes_any_other(seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice(["uint8", "bfloat16", "float32", "complex128"])
    shape = [rng.randint(0 if rng.random() < 0.1 else 1, 9) for _ in range(rng.randint(0, 4))]
    whole = strided(shape, tree.ITEM_BYTES[dtype], rng)
    trees, payloads = saved(whole, cut(shape, rng), dtype, rng)
    blocks = Blocks(trees)
    for box in cut(shape, rng):
        live = strided(box[1], whole.itemsize, rng)
        live[...] = np.zeros((), live.dtype)
        memory: Any = live
        while isinstance(memory, np.ndarray):
            memory = memory.base
        before = bytes(memory)
        fill(blocks.ranges("w", wanted(live, shape, box[0], dtype)), payloads)
        assert live.tobytes() == whole[window(box)].tobytes()
        live[...] = np.zeros((), live.dtype)
        assert bytes(memory) == before  # what lies between its elements


def test_contiguous_rows_are_one_range() -> None:
    whole = np.arange(48, dtype="<f4").reshape(12, 4).view("V4")
    trees, _ = saved(whole, [([0, 0], [12, 4])], "float32", random.Random(8))
    (node,) = (n.local for _, n in tree.walk(trees[0].root) if isinstance(n, tree.Shard))
    node.strides = [4, 1]
    live = np.zeros((3, 4), "V4")
    found = Blocks(trees).ranges("w", wanted(live, [12, 4], [6, 0], "float32"))
    assert [item[2] for item in struct.iter_unpack("<QQQ", found)] == [48]
    live = np.zeros((12, 2), "V4")
    found = Blocks(trees).ranges("w", wanted(live, [12, 4], [0, 1], "float32"))
    assert [item[2] for item in struct.iter_unpack("<QQQ", found)] == [8] * 12


def test_replicas_are_read_once() -> None:
    whole = np.arange(10, dtype="<f4").view("V4")
    rng = random.Random(1)
    trees, payloads = saved(whole, [([0], [10])] * 3, "float32", rng)
    live = np.zeros(10, "V4")
    found = Blocks(trees).ranges("w", wanted(live, [10], [0], "float32"))
    assert sum(item[2] for item in struct.iter_unpack("<QQQ", found)) == 40
    fill(found, payloads)
    assert live.tobytes() == whole.tobytes()


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_block_is_a_mismatch(missing: int) -> None:
    whole = np.zeros(10, "V4")
    boxes: list[Box] = [([0], [4]), ([4], [4]), ([8], [2])]
    trees, _ = saved(whole, boxes, "float32", random.Random(1))
    del trees[missing]
    live = np.zeros(10, "V4")
    with pytest.raises(StateMismatchError, match=r"w: the ranks saved [268]+ of the 10 elements"):
        Blocks(trees).ranges("w", wanted(live, [10], [0], "float32"))
    with pytest.raises(StateMismatchError, match="v: the ranks saved 0 of"):
        Blocks(trees).ranges("v", wanted(live, [10], [0], "float32"))


@pytest.mark.parametrize(
    ("shape", "dtype"), [([10, 1], "float32"), ([11], "float32"), ([10], "float64")]
)
def test_a_rank_that_saved_another_tensor_under_the_name_gives_nothing(
    shape: list[int], dtype: str
) -> None:
    """Nothing is written, also not past the end of the memory that is filled."""
    whole = np.zeros(shape, f"V{tree.ITEM_BYTES[dtype]}")
    trees, _ = saved(whole, [([0] * len(shape), shape)], dtype, random.Random(1))
    live = np.zeros(10, "V4")
    with pytest.raises(StateMismatchError, match="saved 0 of the 10"):
        Blocks(trees).ranges("w", wanted(live, [10], [0], "float32"))
