"""Strided views without torch, held against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_store.safetensors_layout import Piece, gather
from pccheck_store.selection import contiguous_strides
from pccheck_wire.tree import Tensor

ITEMS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4),
    st.sampled_from(sorted(ITEMS)),
)
def test_gather_is_what_numpy_sees(dims: list[tuple[int, int]], item: int) -> None:
    shape, strides = [d for d, _ in dims], [s for _, s in dims]
    reach = 0 if 0 in shape else sum((d - 1) * s for d, s in dims) + 1
    data = np.random.default_rng(1).bytes(reach * item)
    array = np.frombuffer(data, ITEMS[item]) if reach else np.empty(0, ITEMS[item])
    view = np.lib.stride_tricks.as_strided(array, shape, [s * item for s in strides])
    made = bytearray(view.nbytes)
    gather(data, item, shape, strides, memoryview(made))
    assert made == view.tobytes()


def test_contiguous_strides() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((2, 3, 4), order="F") == (1, 2, 6)
    assert contiguous_strides(()) == ()


@pytest.mark.parametrize(
    ("shape", "strides", "same"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((1, 3), (99, 1), True), ((), (), True),
     ((2,), (2,), False), ((2, 2), (0, 1), False)],
)  # fmt: skip
def test_same_layout(shape: tuple[int, ...], strides: tuple[int, ...], same: bool) -> None:
    tensor = Tensor(list(shape), list(strides), "float32", 0, 0, 0)
    assert Piece("x", tensor, 0).contiguous is same
