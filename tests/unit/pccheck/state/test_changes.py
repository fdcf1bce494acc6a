"""Tensors that are changed, freed or moved while a snapshot reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pccheck.flight.in_flight import InFlight
from pccheck.flight.phases import UNREADABLE
from pccheck.flight.verdict import Verdict
from pccheck.saving.gate import Gate
from pccheck.state.changes import CHANGED, FREED, LOST, Moved, Reading, Tensors
from pccheck.state.flatten import Flattener
from pccheck_wire.messages import CheckpointState
from tests.support.fakelink import FakeConnection


def state() -> dict[str, Any]:
    base = torch.zeros(1000)
    return {"one": torch.zeros(500), "part": base[100:200], "array": np.zeros(300)}


def reading_of(made: dict[str, Any]) -> Reading:
    flattener = Flattener()
    flattener.node(made, "")
    return Reading([Tensors(flattener.views)])


CHANGES: dict[str, tuple[str, str, Callable[[dict[str, Any]], object]]] = {
    "freed": ("one", FREED, lambda made: made["one"].untyped_storage().resize_(0)),
    "storage grown": ("part", FREED, lambda made: made["part"].untyped_storage().resize_(90000)),
    "tensor grown": ("one", FREED, lambda made: made["one"].resize_(50000)),
    "shared": ("part", FREED, lambda made: made["part"].share_memory_()),
    "shared alias": ("one", FREED, lambda made: made["one"].view(5, 100).share_memory_()),
    "array grown": ("array", FREED, lambda made: made["array"].resize(5000, refcheck=False)),
    "array cut": ("array", FREED, lambda made: made["array"].resize(100, refcheck=False)),
    "in place": ("part", CHANGED, lambda made: made["part"].add_(1)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_the_first_tensor_that_is_not_as_it_was_is_named(how: str) -> None:
    made = state()
    reading = reading_of(made)
    assert reading.moved() is None
    path, what, change = CHANGES[how]
    change(made)
    assert reading.moved() == Moved(path, "", what)


def test_a_tensor_that_gets_another_storage_is_as_it_was() -> None:
    """The plan keeps the storage that it had."""
    made = state()
    reading = reading_of(made)
    made["one"].data = torch.ones(500)
    del made["part"]
    assert reading.moved() is None


def test_a_storage_of_another_size_at_its_old_address_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As malloc may give the same block again."""
    made = state()
    reading = reading_of(made)
    monkeypatch.setattr("pccheck.state.changes._NBYTES", lambda storage: storage.nbytes() // 2)
    moved = reading.moved()
    assert moved is not None and moved.what == FREED


def test_a_byte_that_cannot_be_read_is_named_by_its_address() -> None:
    made = state()
    reading = reading_of(made)
    last = made["part"].data_ptr() + 399
    assert reading.lost(last) == Moved("part", "", LOST)
    assert reading.lost(last + 1).path == "a tensor of the state"
    made["one"].untyped_storage().resize_(0)  # then that is why
    assert reading.lost(last) == Moved("one", "", FREED)


class Kit:
    """A snapshot of `state()` that a gate holds changes back from."""

    def __init__(self) -> None:
        self.connection: Any = FakeConnection()
        self.native = self.connection.native
        self.state = state()
        self.told: list[Moved] = []
        self.gate = Gate(5, lambda *_: None)
        number = next(self.connection.snapshots)
        self.native.request(number)
        self.native.provisional.add(number)
        self.checkpoint = InFlight(1, self.connection, number)
        self.checkpoint.verdict = Verdict(
            self.checkpoint, reading_of(self.state), lambda _, moved: self.told.append(moved)
        )
        self.gate.add(self.checkpoint, [], host=True, part=None)

    def while_it_waits(self, act: Callable[[], object]) -> None:
        def wait_read(snapshot: int, _deadline_ns: int, *, host_only: bool = False) -> bool:
            act()
            self.native.read.add(snapshot)
            return True

        self.native.wait_read = wait_read

    def failed(self) -> str:
        assert self.checkpoint.state is CheckpointState.FAILED
        assert self.native.provisional and len(self.told) == 1
        return self.checkpoint.reason


def test_memory_freed_while_the_gate_waits_fails_the_checkpoint() -> None:
    kit = Kit()
    kit.while_it_waits(kit.state["one"].share_memory_)
    kit.gate.wait()
    assert kit.failed().startswith("abandoned: one was freed or moved to other memory")


def test_memory_freed_before_the_gate_makes_no_step_wait() -> None:
    kit = Kit()
    kit.while_it_waits(lambda: pytest.fail("it waits for a copy of no use"))
    kit.state["one"].share_memory_()
    kit.native.wait = lambda *_: kit.checkpoint.state is CheckpointState.FAILED
    kit.gate.wait()
    assert "one was freed" in kit.failed()


def test_a_copy_that_met_missing_memory_is_told_once_by_path() -> None:
    kit = Kit()
    number = kit.checkpoint.snapshot

    def fault() -> None:
        kit.native.let_go(number, UNREADABLE)
        kit.native.faults[number] = kit.state["array"].__array_interface__["data"][0]

    kit.while_it_waits(fault)
    kit.gate.wait()
    assert kit.failed() == f"abandoned: array {LOST}"
    kit.gate.collect()
    assert kit.checkpoint.is_read() and len(kit.told) == 1


def test_an_unchanged_state_is_confirmed_after_the_wait() -> None:
    kit = Kit()
    kit.while_it_waits(lambda: kit.native.provisional or pytest.fail("too early"))
    kit.gate.wait()
    assert not kit.native.provisional and not kit.told
