"""What attach() takes, takes off, and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pccheck.state.attaching import Values, checked
from pccheck.state.plan import AttachedPlan
from pccheck_wire.errors import UnsupportedStateError, UsageError

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Accelerate's shape: an Optimizer whose __init__ never ran."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return OPTIMIZER.state_dict()


class FabricOptimizer(torch.optim.Optimizer):
    """Fabric's shape: what it lacks is looked up in the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class AcceleratedScheduler:
    def __init__(self, scheduler: object) -> None:
        self.scheduler = scheduler


class Broken:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: object) -> None:
        pass


class Odd(torch.Tensor):
    """With data of its own."""


def one(name: str, thing: object) -> object:
    return checked({name: thing})[name]


def test_a_compiled_or_parallel_module_is_attached_without_its_wrapper() -> None:
    compiled = torch.compile(MODEL, backend="eager")
    assert one("model", compiled) is MODEL
    assert one("model", nn.DataParallel(MODEL)) is MODEL
    assert one("model", nn.DataParallel(compiled)) is MODEL


def test_an_optimizer_in_name_only_is_taken_off_what_it_wraps() -> None:
    assert one("optimizer", AcceleratedOptimizer(OPTIMIZER)) is OPTIMIZER
    assert one("o", AcceleratedOptimizer(AcceleratedOptimizer(OPTIMIZER))) is OPTIMIZER
    assert one("optimizer", FabricOptimizer(OPTIMIZER)) is OPTIMIZER
    with pytest.raises(UsageError, match=r"attach\(optimizer=...\): AcceleratedOptimizer"):
        one("optimizer", AcceleratedOptimizer(None))


def test_a_wrapped_scheduler_is_attached_without_its_wrapper() -> None:
    assert one("scheduler", AcceleratedScheduler(SCHEDULER)) is SCHEDULER
    assert one("scheduler", SCHEDULER) is SCHEDULER


def test_a_plain_data_loader_is_refused_with_the_one_that_has_a_state() -> None:
    with pytest.raises(UsageError, match="StatefulDataLoader"):
        one("loader", torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]


def test_a_state_dict_that_fails_is_found_at_attach() -> None:
    error = AttributeError("'DataLoader' object has no attribute 'dl_state_dict'")
    with pytest.raises(UsageError, match=r"dl_state_dict.*StatefulDataLoader"):
        one("loader", Broken(error))
    with pytest.raises(UnsupportedStateError, match=r"thing\.x"):
        one("thing", Broken({"x": object()}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dtype torch.qint8"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "lazily conjugated"),
        (Odd(), "subclass tests.unit.test_attaching.Odd"),
    ],
)  # fmt: skip
def test_a_buffer_that_cannot_be_stored_is_found_at_attach(value: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("table", value)
    with pytest.raises(UnsupportedStateError, match=rf"^model\.0\.table: .*{words}") as told:
        one("model", model)
    with pytest.raises(UnsupportedStateError) as later:
        AttachedPlan({"model": model}, mode="sync").snapshot(1, None)
    assert (told.value.message, told.value.hint) == (later.value.message, later.value.hint)
    model[0]._non_persistent_buffers_set.add("table")
    assert one("model", model) is model


def test_a_module_that_gets_its_memory_later_is_attached() -> None:
    with torch.device("meta"):
        one("model", nn.BatchNorm1d(3))
    one("model", nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()))


def test_a_dict_is_attached_by_its_items() -> None:
    values = {"epoch": 3, "best": 0.5}
    attached = one("progress", values)
    assert isinstance(attached, Values)
    values.update(epoch=9)
    assert attached.state_dict() == {"epoch": 9, "best": 0.5}


def test_what_has_no_state_is_refused() -> None:
    for thing in (3, "text", object()):
        with pytest.raises(UsageError, match="has no state_dict"):
            one("thing", thing)
    with pytest.raises(UsageError, match="rng"):
        one("rng", OPTIMIZER)
