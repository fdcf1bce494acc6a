"""The tree's bytes: what goes in comes out, and nothing crooked gets in."""

from __future__ import annotations

import contextlib
import math
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_wire import tree
from pccheck_wire.errors import DamagedError, PccheckError, UnsupportedStateError
from pccheck_wire.tree import (
    Extent,
    Mapping,
    Named,
    Scalar,
    Sequence,
    Shard,
    Tag,
    Tensor,
    Tree,
)
from pccheckctl.commands.show import leaves_of, tensors_of


def make(root: tree.Node, extents: list[Extent] | None = None, step: int = 7) -> Tree:
    return Tree(step, None, False, extents or [], root)


def again(root: tree.Node, extents: list[Extent] | None = None) -> tree.Node:
    return tree.decode(tree.encode(make(root, extents))).root


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary()
    | st.text(st.characters()) | st.complex_numbers(allow_nan=False)
)  # fmt: skip
NODES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5).map(lambda items: Sequence(Tag.LIST, items))
        | st.dictionaries(st.text(max_size=9), inner, max_size=5).map(
            lambda items: Mapping(Tag.DICT, list(items.items()))
        )
    ),
    max_leaves=25,
)


@given(NODES)
def test_round_trip(root: tree.Node) -> None:
    data = tree.encode(make(root))
    assert tree.decode(data) == make(root)
    assert tree.encode(tree.decode(data)) == data


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1, 10**400, -(10**400), "\ud800x"])
def test_values_that_msgpack_has_no_form_for(value: int | str) -> None:
    assert again(value) == value


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF0000000000002, 0x7FF0000000000000])
def test_floats_keep_their_bits(bits: int) -> None:
    (value,) = struct.unpack("<d", bits.to_bytes(8, "little"))
    back = again(Sequence(Tag.LIST, [value, complex(value, -0.0)]))
    assert isinstance(back, Sequence)
    first, second = back.items
    assert isinstance(first, float) and isinstance(second, complex)
    assert struct.pack("<d", first) == bits.to_bytes(8, "little")
    assert struct.pack("<d", second.real) == bits.to_bytes(8, "little")
    assert math.copysign(1, second.imag) == -1


def test_sets_have_one_encoding() -> None:
    one = tree.encode_node(Sequence(Tag.SET, [3, "a", 1]))
    assert one == tree.encode_node(Sequence(Tag.SET, ["a", 1, 3]))


def test_containers_keep_kind_order_and_attributes() -> None:
    root = Mapping(
        Tag.ORDERED,
        [
            ("b", Sequence(Tag.SIZE, [1, 2])),
            (Sequence(Tag.TUPLE, [1, "x"]), Scalar("<f4", b"abcd")),
        ],
        attributes=Mapping(Tag.DEFAULT, [(True, Named(Tag.DTYPE, "bfloat16"))], factory="list"),
    )
    assert again(root) == root


def view(**changes: object) -> Tensor:
    values: dict[str, object] = {
        "shape": [2, 3], "strides": [3, 1], "dtype": "float32", "extent": 0, "offset": 8,
    }  # fmt: skip
    return Tensor(**(values | changes))  # type: ignore[arg-type]


EXTENTS = [Extent(0, 32), Extent(64, 100, 4)]


def test_a_view_inside_of_its_extent() -> None:
    assert again(view(), EXTENTS) == view()
    (shown,) = tensors_of(make(Mapping(Tag.DICT, [("w", view(extent=1))]), EXTENTS))
    assert (shown["path"], shown["offset"], shown["bytes"]) == ("w", 72, 24)
    assert (shown["shape"], shown["strides"]) == ([2, 3], [3, 1])


@pytest.mark.parametrize(
    "wrong",
    [
        view(extent=2),
        view(extent=-1),
        view(extent=-2),
        view(offset=12),  # ends behind the extent
        view(offset=2),  # not aligned
        view(offset=-8),
        view(shape=[2, 3, 1]),
        view(shape=[2**40, 2**40], strides=[0, 0]),
        view(shape=[2, 3], strides=[2**62, 2**62]),
        view(shape=[-1, 3]),
        view(shape=[1] * 65, strides=[1] * 65),
        view(dtype="quint8"),
        view(flags=16),
        view(shape=[2.0, 3]),
        view(shape=[0, 3]),  # no elements, but an extent
    ],
)
def test_views_that_point_elsewhere_are_refused(wrong: Tensor) -> None:
    with pytest.raises(PccheckError):
        again(wrong, EXTENTS)


def shard(**changes: object) -> Shard:
    values: dict[str, object] = {
        "local": view(), "shape": [5, 3], "offsets": [3, 0], "mesh": [2, 2], "names": ["dp", "tp"],
        "placements": ["S(0)", "R"],
    }  # fmt: skip
    return Shard(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "root",
    [
        shard(),
        shard(names=[]),
        shard(local=view(shape=[0, 3], extent=-1, offset=0), offsets=[0, 0]),
        shard(local=view(shape=[], strides=[]), shape=[], offsets=[], placements=["R", "R"]),
    ],
)
def test_a_block_of_a_larger_tensor(root: Shard) -> None:
    """Has a version that an older reader refuses by name; the other trees keep theirs."""
    whole = make(Mapping(Tag.DICT, [("w", root)]), EXTENTS)
    data = tree.encode(whole)
    assert tree.decode(data) == whole and whole.sharded()
    assert msgpack.unpackb(data)[1] == tree.VERSION_SHARDED == 3
    (shown,) = tensors_of(whole)
    assert (shown["path"], shown["whole_shape"]) == ("w", root.shape)
    assert shown["whole_offsets"] == root.offsets and leaves_of(whole) == []
    plain = make(view(), EXTENTS)
    assert not plain.sharded() and msgpack.unpackb(tree.encode(plain))[1] == tree.VERSION


@pytest.mark.parametrize(
    "wrong",
    [
        shard(local=1),
        shard(local=shard()),  # a block of a block
        shard(local=view(offset=12)),  # ends behind the extent
        shard(local=view(dtype="quint8")),
        shard(shape=[4, 3]),  # the block ends behind its tensor
        shard(shape=[5, 2]),
        shard(shape=[5, 3, 1]),
        shard(shape=[2**40, 2**40]),
        shard(offsets=[3]),
        shard(offsets=[-1, 0]),
        shard(offsets=[2**64, 0]),
        shard(mesh=[2]),
        shard(mesh=[2, -2]),
        shard(mesh=[1] * 65, names=[], placements=["R"] * 65),
        shard(names=["dp"]),
        shard(names=["dp", 1]),
        shard(placements=["R"]),
        shard(placements=["R", b"R"]),
    ],
)
def test_crooked_blocks_are_refused(wrong: Shard) -> None:
    data = packed(None, version=3, extents=b"".join(map(Extent.packed, EXTENTS)))
    bad = data[:-1] + tree.encode_node(wrong)
    with pytest.raises(PccheckError):
        tree.decode(bad)
    tree.decode(data[:-1] + tree.encode_node(shard()))


@pytest.mark.parametrize(
    "extents",
    [
        [Extent(0, 0)],
        [Extent(0, 64), Extent(32, 64)],
        [Extent(64, 8), Extent(0, 8)],
        [Extent(0, 8, 16)],
        [Extent(2**63, 8)],
        [Extent(96, 8)],
    ],
)
def test_extents_that_overlap_or_lie_outside_are_refused(extents: list[Extent]) -> None:
    with pytest.raises(DamagedError):
        tree.decode(tree.encode(make(None, extents)), payload_bytes=100)


def packed(root: object, **changes: object) -> bytes:
    top = {"magic": tree.MAGIC, "version": 1, "step": 0, "metadata": None, "attached": False,
           "extents": b""} | changes  # fmt: skip
    data: bytes = msgpack.packb([*top.values(), root])
    return data


@pytest.mark.parametrize(
    "root",
    [
        {"a": 1},
        [],
        [0],
        [99, []],
        [True, []],
        [1],
        [1, 2],
        [1, [], []],
        [6, [1]],
        [6, [1, 1, 1, 2]],  # a key twice
        [6, [[1, []], 1]],  # a list as key
        [3, [1, 1]],
        [3, [[6, []]]],
        [5, ["x"]],
        [9, [], "eval"],
        [10, "x"],
        [11, b"123"],
        [12, b"\xff"],
        [13, "object"],
        [15, 0, 0],
        [16, 0, 0, 8, "<f8", [1], "A"],
        msgpack.ExtType(1, b""),
        msgpack.Timestamp(1),
    ],
)
def test_crooked_nodes_are_refused(root: object) -> None:
    with pytest.raises(PccheckError):
        tree.decode(packed(root))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", packed(None)[:-1], packed(None) + b"\x00", packed(None, magic="x"),
     b"\xdd\xff\xff\xff\xff",
     packed(None, step="1"), packed(None, attached=1), packed(None, extents=b"123"),
     packed(None, extents=[]), b"\x91" * 100_000 + b"\xc0"],
)  # fmt: skip
def test_crooked_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedError):
        tree.decode(data)


def test_a_newer_version_is_not_called_damage() -> None:
    with pytest.raises(PccheckError, match="newer") as error:
        tree.decode(packed(None, version=tree.VERSION_SHARDED + 1))
    assert not isinstance(error.value, DamagedError)


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_give_a_tree_or_a_refusal(junk: bytes, where: int, value: int) -> None:
    good = bytearray(tree.encode(make(Sequence(Tag.LIST, [view(), "text", 2**70]), EXTENTS)))
    good[where % len(good)] = value
    for data in (junk, bytes(good)):
        with contextlib.suppress(PccheckError):
            tree.decode(data, payload_bytes=1000)


def test_depth_is_limited() -> None:
    node: tree.Node = None
    for _ in range(tree.DEPTH_MAX + 1):
        node = Sequence(Tag.LIST, [node])
    with pytest.raises(DamagedError, match="deep"):
        again(node)


def test_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "TREE_BYTES_MAX", 1000)
    with pytest.raises(UnsupportedStateError, match="1000"):
        tree.encode(make("x" * 1000))


def test_leaves_of_a_tree_have_path_type_and_text() -> None:
    root = Mapping(Tag.DICT, [("lr", 0.1), ("t", view()), ("n", Sequence(Tag.TUPLE, [None]))])
    assert leaves_of(make(root)) == [
        {"path": "lr", "kind": "float", "text": "0.1"},
        {"path": "n.0", "kind": "NoneType", "text": "None"},
    ]
