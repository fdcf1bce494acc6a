"""Which stored checkpoint it is."""

from __future__ import annotations

import dataclasses

import pytest

from pccheck_native.group import Held
from pccheck_native.identity import UNKNOWN, CheckpointId
from pccheck_wire.messages import Opened

STORED = CheckpointId(7, "job", 1, 9, -4, 3, 2, bytes(range(16)), b"\xff" * 16)


@pytest.mark.parametrize("one", [STORED, STORED._replace(start=UNKNOWN, digest=b"")])
def test_a_document_gives_the_identity_back(one: CheckpointId) -> None:
    document = one.document()
    assert CheckpointId.of_document(document | {"more": 1}) == one
    assert document["start"] == ("000102030405060708090a0b0c0d0e0f" if any(one.start) else None)


def test_the_order_of_the_fields_is_that_of_the_slices() -> None:
    fields = CheckpointId._fields
    assert fields[:3] == ("uid", "job", "rank") and fields[3:5] == ("sequence", "step")
    assert fields[3:7] == Held._fields[:4]
    assert fields[2:] == tuple(one.name for one in dataclasses.fields(Opened))[:7]


def test_another_start_with_the_same_number_is_another_checkpoint() -> None:
    assert STORED._replace(start=bytes(range(1, 17))) != STORED


@pytest.mark.parametrize("bad", [{}, STORED.document() | {"start": "no digits"}])
def test_what_is_no_document_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        CheckpointId.of_document(bad)
