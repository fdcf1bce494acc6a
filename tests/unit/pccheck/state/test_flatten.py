"""States of every kind go into a payload and come back bit for bit; the rest is refused by path."""

from __future__ import annotations

import collections
import math
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck.state.flatten import DTYPE_NAMES
from pccheck.state.gating import Gating
from pccheck.state.plan import AttachedPlan, Snapshot, plan_state
from pccheck.state.rng import capture_rng, restore_rng
from pccheck_wire.errors import UnsupportedStateError
from pccheckctl.commands.show import tensors_of
from tests.support.payload import round_trip, tree_of


def snapshot(state: object) -> Snapshot:
    return plan_state(state, Gating({}, "sync"), 1, None)


def again(state: Any) -> Any:
    return round_trip(snapshot(state))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def same(one: Any, two: Any) -> bool:
    """Equal in type, structure, order and every bit."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride()
            and one.requires_grad == two.requires_grad and raw(one) == raw(two)
        )  # fmt: skip
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, np.generic):
        return one.dtype == two.dtype and one.tobytes() == two.tobytes()
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", two)
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, dict):
        if (
            isinstance(one, collections.defaultdict)
            and one.default_factory is not two.default_factory
        ):
            return False
        return len(one) == len(two) and all(
            same(k1, k2) and same(v1, v2)
            for (k1, v1), (k2, v2) in zip(one.items(), two.items(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def random_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Any bits, nan payloads included; bool stays 0 and 1."""
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,)).bool()
    item = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (count * item,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, (count,), (1,))


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    tensor = random_bits(dtype, count)
    tensor = torch.empty(0, dtype=dtype).set_(
        tensor.untyped_storage(), 0, shape, torch.empty(shape, device="meta").stride()
    )
    back = again({"t": tensor})["t"]
    assert (back.dtype, back.shape, back.stride()) == (dtype, tensor.shape, tensor.stride())
    if count:
        assert bytes(back.untyped_storage()) == bytes(tensor.untyped_storage())


STATE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.complex_numbers()
    | st.text(st.characters())
    | st.builds(torch.device, st.sampled_from(["cpu", "cuda:1", "meta"]))
    | st.sampled_from(list(DTYPE_NAMES))
    | st.builds(
        lambda dtype, shape: random_bits(dtype, math.prod(shape)).reshape(shape),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool,
                         torch.complex64, torch.int64, torch.uint16]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    )
    | st.builds(np.float32, st.floats(width=32)) | st.builds(np.int16, st.integers(-9, 9))
    | st.lists(st.integers(-9, 9), max_size=4).map(np.array)
    | st.lists(st.integers(0, 9), max_size=4).map(torch.Size),
    lambda inner: st.lists(inner, max_size=4)
    | st.lists(inner, max_size=4).map(tuple)
    | st.sets(st.integers() | st.text(max_size=3), max_size=4)
    | st.frozensets(st.booleans() | st.binary(max_size=3), max_size=4)
    | st.dictionaries(
        st.integers() | st.text(max_size=5) | st.none() | st.binary(max_size=3)
        | st.floats(allow_nan=False) | st.tuples(st.integers(), st.text(max_size=3)),
        inner, max_size=4,
    )
    | st.dictionaries(st.text(max_size=5), inner, max_size=4).map(collections.OrderedDict)
    | st.dictionaries(st.text(max_size=5), inner, max_size=4).map(
        lambda items: collections.defaultdict(list, items)
    )
    | st.dictionaries(st.text(max_size=5), st.integers(), max_size=4).map(collections.Counter),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(STATE)
def test_nested_states(state: object) -> None:
    made = snapshot(state)
    assert same(state, round_trip(made))
    assert snapshot(state).tree == made.tree  # deterministic


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[::2, 1::3],
        lambda base: base[1:, 2],
        lambda base: base[0].expand(7, 9),
        lambda base: torch.as_strided(base, (3, 4), (2, 1), 5),  # overlaps itself
        lambda base: base.reshape(2, 3, 3, 3).permute(3, 1, 0, 2),
        lambda base: base.reshape(1, 2, 3, 9).to(memory_format=torch.channels_last),
    ],
)
def test_strides(make: Any) -> None:
    view = make(torch.randn(6, 9))
    back = again([view])[0]
    assert back.stride() == view.stride() and torch.equal(back, view)


def test_aliases_survive() -> None:
    base = torch.arange(40.0)
    state = {
        "row": base[3:13], "overlap": base[10:20].reshape(2, 5),
        "bytes": base.view(torch.uint8)[41:44],
        "tied": [base[3:13], base[3:13]], "own": torch.arange(4.0),
    }  # fmt: skip
    back = again(state)
    assert same(state, back)
    back["overlap"][0, 0] = -1
    assert back["row"][7] == -1
    assert back["bytes"].data_ptr() - back["row"].data_ptr() == 41 - 12
    assert back["tied"][0].data_ptr() == back["tied"][1].data_ptr() == back["row"].data_ptr()
    assert back["own"].untyped_storage().data_ptr() != back["row"].untyped_storage().data_ptr()


def test_shared_bytes_are_stored_once() -> None:
    weight = torch.zeros(1000)
    made = snapshot([weight, weight, weight.view(10, 100), torch.from_numpy(weight.numpy())])
    assert made.tree_offset == 4032
    back = round_trip(made)
    assert len({t.data_ptr() for t in back}) == 1  # type: ignore[attr-defined]


def test_only_what_is_seen_is_stored() -> None:
    assert snapshot(torch.zeros(1_000_000)[5:15]).tree_offset == 64


def test_flags() -> None:
    state = [
        torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True), torch.nn.Buffer(torch.ones(2)),
    ]  # fmt: skip
    back = again(state)
    assert same(state, back)
    assert isinstance(back[3], torch.nn.Buffer) and back[2].is_leaf


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.asfortranarray(np.random.rand(3, 4)),
        np.random.rand(6, 6)[::2, ::-1],
        np.array(3.5), np.zeros((0, 4), np.complex64), np.array(["a", "bcd"]), np.array([b"x"]),
        np.array(["2020-01-01"], "datetime64[D]"), np.array([True, False]), np.float16(1.5),
        np.str_("text"), np.datetime64("2020-01-01"), np.longdouble(2) / 3,
    ],
)  # fmt: skip
def test_numpy(array: Any) -> None:
    back = again({"x": array})["x"]
    assert same(array, back)
    if isinstance(array, np.ndarray):
        assert back.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
        assert back.flags.writeable


def test_arrays_and_tensors_share_memory_as_before() -> None:
    array = np.zeros(8, np.float32)
    back = again({"array": array, "tensor": torch.from_numpy(array)[2:]})
    back["array"][3] = 5
    assert back["tensor"][1] == 5


def test_state_dict_metadata() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    assert again(state)._metadata == state._metadata  # type: ignore[attr-defined]


def test_generators() -> None:
    state = capture_rng()
    drawn = random.random(), np.random.rand(), torch.rand(1)
    back = again(state)
    assert same(state, back)
    restore_rng(back)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


def draws() -> tuple[float, float, float]:
    return random.gauss(0, 1), np.random.randn(), torch.randn(1).item()


@pytest.mark.parametrize("one_is_kept", [False, True])  # of two that a generator draws at once
def test_attached_generators_need_no_extent(one_is_kept: bool) -> None:
    if one_is_kept:
        draws()
    made = AttachedPlan({"rng": True}, mode="sync").snapshot(1, None)
    drawn = [draws() for _ in range(4)]
    assert not tree_of(made).extents
    back = round_trip(made)
    assert isinstance(back, dict)
    restore_rng(back["rng"])
    assert [draws() for _ in range(4)] == drawn


class Tagged(torch.Tensor):
    pass


class Raising:
    """A lazy object that is not bound: every use of it raises."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)

    __hash__ = __call__ = __repr__ = __getattribute__  # type: ignore[assignment]


def _freed(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _cycle() -> list[object]:
    loop: list[object] = []
    loop.append({"again": loop})
    return loop


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (torch.eye(3).to_sparse_csr(), "indices and values"),
        (torch.eye(3).to_mkldnn(), "to_dense()"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "int_repr()"),
    ],
)
def test_what_to_store_instead_of_a_tensor_of_another_layout(
    value: torch.Tensor, hint: str
) -> None:
    with pytest.raises(UnsupportedStateError) as raised:
        snapshot({"x": value})
    assert hint in raised.value.hint


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "negated"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.eye(3).to_sparse_csr(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2).as_subclass(Tagged), "subclass"),
        (torch.nn.UninitializedParameter(), "subclass"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quint8"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (_freed(0), "freed"),
        (_freed(396), "freed"),
        (object(), "object"),
        (lambda: None, "function"),
        (collections.namedtuple("Pair", "a b")(1, 2), "Pair"),
        (collections.defaultdict(lambda: 1), "defaultdict"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, "i4,f4"), "dtype"),
        (np.ma.masked_array([1]), "MaskedArray"),
        ({object(): 1}, "key"),
        ({(1, object()): 1}, "key"),
        ({torch.ones(1)}, "key"),
        (_cycle(), "itself"),
        (torch.qint8, "dtype"),
    ],
)
def test_refused_by_path(value: object, said: str) -> None:
    with pytest.raises(UnsupportedStateError, match=said) as error:
        snapshot({"model": [torch.ones(2), {"part": value}]})
    assert "model.1.part" in str(error.value)


def test_objects_that_raise_are_refused_by_path() -> None:
    for value in (Raising(), collections.defaultdict(Raising())):
        with pytest.raises(UnsupportedStateError, match=r"model\.part: .*Raising"):
            snapshot({"model": {"part": value}})


def test_depth_is_refused() -> None:
    state: object = 1
    for _ in range(200):
        state = [state]
    with pytest.raises(UnsupportedStateError, match="deep"):
        snapshot(state)


def test_the_limit_of_depth_can_be_read_back() -> None:
    state: object = torch.ones(1)
    for _ in range(94):
        state = {"x": state}
    assert same(state, again(state))


def test_misaligned_overlap_is_refused() -> None:
    buffer = bytearray(64)
    whole = torch.frombuffer(buffer, dtype=torch.float32)
    odd = torch.frombuffer(buffer, dtype=torch.float32, offset=2, count=4)
    with pytest.raises(UnsupportedStateError, match="clone"):
        snapshot([whole, odd])
    back = again([odd])
    assert torch.equal(back[0], odd)


def test_equal_states_at_other_addresses_give_equal_trees() -> None:
    def state() -> object:
        keep.append(torch.empty(random.randrange(1, 5000)))
        return {"a": torch.ones(100), "b": [torch.ones(7), torch.ones(3, 3).t()], "s": {3, "x"}}

    keep: list[torch.Tensor] = []
    assert len({snapshot(state()).tree for _ in range(5)}) == 1


def test_leaves_in_the_tree_view() -> None:
    made = snapshot({"a": torch.ones(3), "lr": 0.5})
    (shown,) = tensors_of(tree_of(made))
    about = (shown["path"], shown["dtype"], shown["offset"], shown["bytes"])
    assert about == ("a", "float32", 0, 12)
