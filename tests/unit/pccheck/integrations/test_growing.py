"""A log as part of a state: each entry is encoded once, and no edit of the log is lost."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch

from pccheck.integrations import growing
from pccheck.integrations.growing import GrowingLog, text_of
from pccheck.state.extents import lay_out
from pccheck.state.flatten import Flattener
from pccheck.state.gating import Gating

PIECE = 8


class Kit:
    """A log beside other fields, as Trainer's state has it; counts what is encoded."""

    def __init__(self, entries: int) -> None:
        self.made = GrowingLog("log")
        self.entries: list[Any] = [{"loss": 0.1 * i, "step": i} for i in range(entries)]
        self.count = 0

    def append(self, count: int = 1) -> None:
        self.entries += [{"loss": -0.1 * i, "step": i} for i in range(count)]

    @property
    def fields(self) -> dict[str, Any]:
        return {"step": 7, "log": self.entries, "args": {"a": [1, "}"]}}

    def is_exact(self) -> bool:
        return bool(json.loads(text_of(self.made.encoded(self.fields))) == self.fields)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    """A log of two pieces and four more entries, encoded once."""
    monkeypatch.setattr(growing, "PIECE_ENTRIES", PIECE)
    encode = growing._encode
    kit = Kit(2 * PIECE + 4)

    def counted(value: object) -> str:
        kit.count += 1
        return encode(value)

    monkeypatch.setattr(growing, "_encode", counted)
    assert kit.is_exact() and kit.count == 1 + 2 * PIECE + 4  # the other fields count as one
    kit.count = 0
    return kit


@pytest.mark.parametrize("more", [0, 1, 3, 4, PIECE, 3 * PIECE + 1])
def test_entries_are_encoded_once_when_they_are_new(kit: Kit, more: int) -> None:
    for _ in range(5):
        kit.append(more)
        kit.count = 0
        assert kit.is_exact()
        assert kit.count == 1 + more


def test_full_pieces_are_the_same_arrays_in_the_next_state(kit: Kit) -> None:
    before = kit.made.encoded(kit.fields)["pieces"]
    kit.append(PIECE)
    after = kit.made.encoded(kit.fields)["pieces"]
    assert (len(before), len(after)) == (2, 3)
    assert all(one is other for one, other in zip(before, after, strict=False))


EDITS = {
    "an old one removed": lambda log: log.pop(1),
    "the newest removed": lambda log: log.pop(),
    "all but two removed": lambda log: log.__delitem__(slice(2, None)),
    "all removed": lambda log: log.clear(),
    "one inserted": lambda log: log.insert(3, {"note": "here"}),
    "an old one replaced": lambda log: log.__setitem__(0, {"loss": 9.0}),
    "order changed": lambda log: log.reverse(),
    "an array in one that replaces": lambda log: log.__setitem__(0, {"x": [1, 2]}),
    "a value of the newest": lambda log: log[-1].update(loss=5.5),
    "a key more in the newest": lambda log: log[-1].update(note="x"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_of_the_log_is_in_the_next_state(kit: Kit, edit: Any) -> None:
    edit(kit.entries)
    kit.append()
    assert kit.is_exact()
    kit.append()
    assert kit.is_exact()


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE - 1])
def test_a_value_in_an_old_entry_is_found_in_a_later_state(kit: Kit, at: int) -> None:
    kit.entries[at]["loss"] = 123.0
    assert any(kit.is_exact() for _ in range(3))
    assert kit.is_exact()


def test_a_log_that_is_another_list_of_equal_entries_is_not_lost(kit: Kit) -> None:
    kit.entries = copy.deepcopy(kit.entries)
    kit.append()
    for _ in range(4):
        assert kit.is_exact()


def test_an_entry_that_cannot_be_encoded_leaves_the_log_usable(kit: Kit) -> None:
    kit.entries.append({("a", "b"): 1})
    with pytest.raises(TypeError):
        kit.is_exact()
    kit.entries[-1] = {"loss": 1.0}
    assert kit.is_exact()


def test_odd_numbers_are_as_in_plain_json(kit: Kit) -> None:
    kit.entries += [
        {"loss": np.float32(0.1), "at": torch.tensor(3), "inf": float("inf"), "text": 'ü\n"}]'},
        {},
    ]
    text = text_of(kit.made.encoded(kit.fields))
    plain = json.dumps(kit.fields, default=lambda value: value.item())
    assert json.loads(text) == json.loads(plain)


def test_the_text_of_an_older_checkpoint_is_taken_as_it_is() -> None:
    assert text_of('{"log": []}') == '{"log": []}'


def test_pieces_are_read_in_place_and_what_can_change_is_copied() -> None:
    flattener = Flattener()
    data = b"x" * 1000
    can_change = np.frombuffer(bytearray(data), np.uint8)
    part = np.frombuffer(data, np.uint8)[1:]
    flattener.node([np.frombuffer(data, np.uint8), can_change, part.copy(), np.zeros(3)], "")
    Gating({}, "auto").mark(flattener.views, promised=False)
    assert [view.volatile for view in flattener.views] == [False, True, True, True]
    layout = lay_out(flattener.views)
    assert [item.nbytes for item in layout.gated] == [1000]
    assert layout.frozen == 1000
