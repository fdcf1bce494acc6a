"""The codec: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import tracemalloc
import types
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_wire import codec, messages, packing
from pccheck_wire.errors import ProtocolError

MESSAGES = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
]
_SCALARS: dict[object, st.SearchStrategy[object]] = {
    bool: st.booleans(),
    str: st.text(max_size=40),
    bytes: st.binary(max_size=40),
    float: st.floats(allow_nan=False),
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**40) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def values(hint: object, name: str) -> st.SearchStrategy[object]:
    """Allowed values of a field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        if name in ("step", "newest_step", "newer_step"):
            return st.integers(-(2**63), 2**63 - 1)
        limits = {"rank": (0, 100), "world_size": (1, 100), "local_world_size": (1, 9)}
        return st.integers(*limits.get(name, (0, 2**32 - 2)))
    if hint in _SCALARS:
        return _SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    if origin is types.UnionType:
        return st.one_of(*(values(item, name) for item in arguments))
    if hint is types.NoneType:
        return st.none()
    if origin is list:
        return st.lists(values(arguments[0], name), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), _JSON, max_size=3)
    assert isinstance(hint, type)
    return instances(hint)


def instances(kind: type) -> st.SearchStrategy[object]:
    hints = typing.get_type_hints(kind)
    return st.builds(
        kind, **{f.name: values(hints[f.name], f.name) for f in dataclasses.fields(kind)}
    )


def request(body: object, **more: object) -> bytes:
    return msgpack.packb({"t": "request", "number": 1, "token": b"t", "body": body} | more)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_wire(kind: type, data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    assert codec.decode(codec.encode(message), kind) == message


@settings(max_examples=600, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(data, messages.Request)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary()
    | st.text(max_size=9) | st.sampled_from([m.TAG for m in MESSAGES]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["t", "number", "token", "body", "snapshot", "step"]) | st.text(max_size=4),
        inner, max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(plain=_ANYTHING)
def test_well_formed_nonsense_is_decoded_exactly_or_refused(plain: object) -> None:
    for kind in (messages.Request, messages.Hello, messages.Reply):
        try:
            found = codec.decode(msgpack.packb(plain), kind)
        except ProtocolError:
            continue
        assert codec.decode(codec.encode(found), kind) == found


@settings(max_examples=300, deadline=None)
@given(message=instances(messages.Request), data=st.data())
def test_a_flipped_byte_never_crashes(message: messages.Request, data: st.DataObject) -> None:
    damaged = bytearray(codec.encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        codec.decode(bytes(damaged), messages.Request)


PIN = {"t": "pin", "step": 2}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (request(PIN | {"step": "7"}), r"\$\.body\.step: an integer is expected, not str"),
        (request(PIN | {"step": True}), r"\$\.body\.step: an integer is expected, not bool"),
        (request(PIN | {"step": 2**63}), r"\$\.body\.step: .* outside"),
        (request({"t": "describe", "snapshot": -1}), r"\$\.body\.snapshot: -1 is outside"),
        (request(PIN | {"extra": 1}), r"\$\.body\.extra: no such field"),
        (request({"t": "pin"}), r"\$\.body\.step: missing"),
        (request({"t": "hello"}), r"\$\.body\.t: one of"),
        (request({"t": ["pin"]}), r"\$\.body\.t: one of"),
        (request(None), r"\$\.body: a map is expected"),
        (request(PIN, number=1.0), r"\$\.number: an integer"),
        (request(PIN, token="t"), r"\$\.token: bytes is expected"),
        (msgpack.packb({1: 2}), r"\$: a map key|strict_map_key|not a message"),
        (b"\x82\xa1t\xa1a\xa1t\xa1b", r"the key 't' comes twice"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), r"\$: (extension|not a message)"),
        (msgpack.packb({"t": msgpack.Timestamp(1)}), r"\$: (extension|not a message)"),
        (b"\x91" * 60000 + b"\x90", r"\$: not a message"),
        (b"\xdd\xff\xff\xff\xff", r"\$: not a message"),
        (b"\xc6\xff\xff\xff\xff", r"\$: not a message"),
        (request({"t": "list", "job": "x" * 5000}), r"\$: not a message"),
        (b"\xc0" * (packing.REQUEST_BYTES_MAX + 1), r"the limit is"),
        (b"", r"\$: not a message"),
        (b"\xc0\xc0", r"\$: not a message"),
    ],
)
def test_the_error_names_the_offender(data: bytes, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        codec.decode(data, messages.Request)


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ([{}] * 60_000, "exceeds max_array_len"),
        ({f"{number:x}": 0 for number in range(10_000)}, "exceeds max_map_len"),
        ({"t": "expose", "map": 1, "data": [b""] * 32_600}, "exceeds max_array_len"),
        ([[[[{}] * 30] * 30] * 30], "a request of more than 32 lists and maps"),
    ],
    ids=["maps", "keys", "pieces", "nested"],
)
def test_a_request_of_many_small_items_is_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch, plain: object, told: str
) -> None:
    """They are cheap to send, and every user waits while they are built."""
    built = []

    def unique(pairs: list[tuple[object, object]]) -> dict[object, object]:
        built.append(pairs)
        return dict(pairs)

    monkeypatch.setattr(packing, "_unique", unique)
    data = msgpack.packb(plain)
    assert len(data) <= packing.REQUEST_BYTES_MAX
    with pytest.raises(ProtocolError, match=told):
        packing.unpack(data)
    assert len(built) <= packing.REQUEST_ITEMS_MAX
    packing.unpack(data, bytes_max=packing.REPLY_BYTES_MAX)  # a reply may have many


def test_the_largest_request_is_within_the_limits() -> None:
    assert len(dataclasses.fields(messages.Register)) < packing.REQUEST_ITEMS_MAX
    assert len(dataclasses.fields(messages.Hello)) < packing.REQUEST_ITEMS_MAX
    pieces = [b"x" * codec.PIECE_BYTES] * codec.PIECES_MAX
    codec.decode(
        codec.encode(messages.Request(1, b"t" * 16, messages.Expose(1, pieces))), messages.Request
    )


def test_operations_and_results_of_any_length_are_carried_in_pieces() -> None:
    several = [None, 7, b"x" * packing.VALUE_BYTES_MAX, [b"", None], ["error", "gone"]]
    cut = packing.pieces(several)
    assert max(map(len, cut)) == codec.PIECE_BYTES
    assert packing.joined(cut) == several
    assert packing.joined(packing.pieces([])) == packing.joined([]) == []
    most = messages.Carry(1, 2**40, cut[: codec.PIECES_MAX], at=2**21, more=True)
    codec.decode(codec.encode(messages.Request(1, b"t" * 16, most)), messages.Request)
    answer = messages.Reply(1, messages.Carried(1, cut))
    codec.decode(codec.encode(answer), messages.Reply, bytes_max=packing.REPLY_BYTES_MAX)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (msgpack.packb([[]] * 1000), "more than 129 lists"),
        (msgpack.packb([b"x" * (packing.VALUE_BYTES_MAX + 1)]), "exceeds max_bin_len"),
        (msgpack.packb([b"x" * packing.VALUE_BYTES_MAX] * 3), "are carried, the limit is"),
        (msgpack.packb([{"a": 1}]), "exceeds max_map_len"),
        (msgpack.packb([1, b"abc"])[:-1], "nothing that is carried"),
        (msgpack.packb(1), "a list is expected, not int"),
    ],
    ids=["lists", "value", "sum", "map", "cut", "number"],
)
def test_what_is_carried_has_limits(data: bytes, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        packing.joined([data])


def test_missing_optional_fields_take_their_defaults() -> None:
    plain = {"t": "hello", "protocol": 1, "role": "observer", "version": "", "pid": 7}
    assert codec.from_plain(plain, messages.Hello).uid == -1


def test_enums_are_not_taken_from_booleans() -> None:
    described = {"t": "described", "snapshot": 1, "state": True, "sequence": 1, "step": 1}
    with pytest.raises(ProtocolError, match=r"\$\.state"):
        codec.from_plain(described, messages.Described)


@pytest.mark.parametrize("length", [1, 65000, 65536, 131072 - 40, 131072, 300_000])
def test_long_replies_come_in_parts(length: int) -> None:
    for extra in range(40):  # so that one of them ends exactly at a packet's end
        reply = messages.Reply(9, messages.Report({"schema": 1, "text": "x" * (length + extra)}))
        parts = packing.packets(codec.encode(reply))
        assembler = packing.Reassembler()
        found = [assembler.feed(part) for part in parts]
        assert [item is None for item in found] == [True] * (len(parts) - 1) + [False]
        assert codec.from_plain(found[-1], messages.Reply) == reply


def test_a_reply_ends_where_its_map_ends() -> None:
    assembler = packing.Reassembler()
    with pytest.raises(ProtocolError, match="behind the end"):
        assembler.feed(codec.encode(messages.Done()) + b"\xc0")


def test_a_short_message_needs_little_memory() -> None:
    """So that a refusal for lack of memory can still be sent."""
    refusal = messages.Failure("refused", "no memory", "raise a limit", True)
    codec.encode(refusal)
    tracemalloc.start()
    try:
        codec.encode(refusal)
        assert tracemalloc.get_traced_memory()[1] < 4 * codec.BUFFER_BYTES
    finally:
        tracemalloc.stop()


def test_a_reply_has_a_limit() -> None:
    assembler = packing.Reassembler(bytes_max=100_000)
    message = codec.encode(messages.Report({"text": "x" * 200_000}))
    with pytest.raises(ProtocolError, match="more than 100000"):
        for part in packing.packets(message):
            assembler.feed(part)
