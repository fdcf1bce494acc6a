"""The native looks at dicts and tensors: what they see, and what they refuse."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from pccheck.state.watch import GeometryWatch, _items
from pccheck_native import integers, same_geometry, same_items, same_values, tensor_geometry

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
exchange = pytest.mark.skipif(EXCHANGE is None, reason="torch is older than 2.10")


def dicts() -> list[dict[Any, Any]]:
    return [{"a": object(), "b": object()}, {}, collections.defaultdict(list, c=object())]


def move(some: list[dict[Any, Any]]) -> None:
    """The last item of one dict becomes the first one of the next."""
    some[1]["b"] = some[0].pop("b")


def swap(some: list[dict[Any, Any]]) -> None:
    some[0], some[1] = some[1], some[0]


def reorder(some: list[dict[Any, Any]]) -> None:
    some[0]["a"] = some[0].pop("a")


@pytest.mark.parametrize(
    "change",
    [
        move, swap, reorder, lambda some: some.pop(), lambda some: some.append({}),
        lambda some: some[0].pop("a"), lambda some: some[1].update(new=1),
        lambda some: some[0].update(a=object()), lambda some: some[2].update(c=None),
        lambda some: some.__setitem__(1, {}),
    ],
)  # fmt: skip
def test_every_change_of_items_is_seen(change: Any) -> None:
    some = dicts()
    then = _items(some)
    assert same_items(some, then)
    change(some)
    assert not same_items(some, then)


def test_values_of_some_keys() -> None:
    some: list[dict[Any, Any]] = [{"a": [], "b": 1, "x": 0}, {"a": [], "b": 1}]
    then = (some[0]["a"], 1, some[1]["a"], 1)
    some[0]["x"] = 5
    assert same_values(some, ("a", "b"), then)
    assert not same_values(some, ("a", "b"), then[:3])
    some[1]["a"] = []
    assert not same_values(some, ("a", "b"), then)
    assert not same_values(some, ("a", "missing"), then)


def test_what_is_not_a_dict_is_refused() -> None:
    with pytest.raises(TypeError):
        same_items([1], ())  # type: ignore[list-item]
    with pytest.raises((TypeError, SystemError)):
        same_values([1], ("a",), ())  # type: ignore[list-item]
    with pytest.raises(TypeError):
        same_values([{}], ([],), ())


def test_lists_are_compared_by_their_items_and_by_their_identity() -> None:
    one, other = object(), object()
    first, second = [one, other], [one]
    then = (one, other, first, one, second)
    assert same_items([first, second], then)
    assert not same_items([second, first], then)
    assert not same_items([first, [one]], then)
    second[0] = other
    assert not same_items([first, second], then)


def test_integers_are_those_of_each_tensor_and_errors_are_raised() -> None:
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3)), torch.ones(())]
    for tensor, times in zip(tensors, (0, 3, 300), strict=True):
        for _ in range(times):
            tensor.data.add_(1) if tensor.requires_grad else tensor.add_(1)
    tensors[1].detach().zero_()
    descriptor = vars(torch._C.TensorBase)["_version"]
    found = memoryview(integers(descriptor, tensors)).cast("q").tolist()
    assert found == [tensor._version for tensor in tensors] and found[2] == 300
    assert integers(descriptor, []) == b""
    with pytest.raises(TypeError):
        integers(descriptor, ["x"])
    with pytest.raises(TypeError):
        integers(7, tensors)
    with torch.inference_mode(), pytest.raises(RuntimeError):  # torch does not count there
        integers(descriptor, [torch.ones(2)])


@exchange
def test_geometry_sees_place_shape_strides_and_type() -> None:
    base = torch.arange(24.0)
    same = base.view(4, 6)
    others = [
        base.view(6, 4), base.view(4, 6)[:, :5], base.view(2, 2, 6), base.clone().view(4, 6),
        base.view(4, 6).t(), base.view(torch.int32).view(4, 6), base[1:],
    ]  # fmt: skip
    then = tensor_geometry(EXCHANGE, [same, base])
    assert same_geometry(EXCHANGE, [base.view(4, 6), base], then)
    for other in others:
        assert not same_geometry(EXCHANGE, [other, base], then)
    assert not same_geometry(EXCHANGE, [same], then)
    assert not same_geometry(EXCHANGE, [same, base, base], then)
    assert not same_geometry(EXCHANGE, [same, "x"], then)
    assert not same_geometry(EXCHANGE, [same, base], b"")


@exchange
def test_what_cannot_be_described_raises_or_is_a_no() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        tensor_geometry(EXCHANGE, ["x"])
    with pytest.raises(ValueError):
        tensor_geometry(object(), [])


def test_tensors_that_dlpack_has_no_name_for_are_watched_slowly() -> None:
    watch = GeometryWatch([torch.ones(3), torch.zeros(4, dtype=torch.uint8).view(torch.bits8)])
    assert watch.holds()
    watch._tensors[0].resize_(2)
    assert not watch.holds()
