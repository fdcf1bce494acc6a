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
        (Odd(), "subclass tests.unit.pccheck.state.test_attaching.Odd"),
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


class Saves(nn.Linear):
    """With a way of its own to save, and torch's way to load."""

    def __init__(self, change: Any) -> None:
        super().__init__(2, 2)
        self.change = change

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.change(destination, prefix)


class Loads(Saves):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state.pop(f"{prefix}more", None)
        super()._load_from_state_dict(state, prefix, *args)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


class BothExtra(Extra):
    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def more(name: str, shape: tuple[int, ...] = (2,)) -> Any:
    return lambda state, prefix: state.update({prefix + name: torch.ones(shape)})


def unimplemented(_state: Any, _prefix: str) -> None:
    raise NotImplementedError("saving it")


REFUSED = [
    (lambda: Saves(more("weight.absmax")), "weight.absmax: .* beside its parameters"),
    (lambda: Saves(more("scale")), "scale: .* beside its parameters"),
    (lambda: Saves(lambda state, prefix: state.pop(f"{prefix}bias")), "bias: .* nothing under"),
    (lambda: Saves(more("weight", (4, 1))), "weight: .* another shape"),
    (lambda: Saves(lambda state, prefix: state.update({f"{prefix}bias": 3})), "bias: .* shape"),
    (lambda: Extra(2, 2), "_extra_state: .* Extra saves this key"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_refuses_its_own_state_is_refused(
    make: Any, words: str, inside: bool
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), make()) if inside else make()
    with pytest.raises(UnsupportedStateError, match=rf"^model\.{'1.' * inside}{words}") as told:
        one("model", model)
    assert "attach the adapters" in told.value.hint
    with pytest.raises(RuntimeError):  # torch agrees
        model.load_state_dict(model.state_dict())


def test_a_module_that_cannot_save_at_all_is_refused_at_attach() -> None:
    with pytest.raises(UnsupportedStateError, match="NotImplementedError: saving it"):
        one("model", nn.Sequential(Saves(unimplemented)))


def hooked(register: str, hook: Any) -> nn.Module:
    """A model in which a hook takes the key that its part saves."""
    model = nn.Sequential(Saves(more("more")))
    getattr(model, register)(hook)
    return model


def drop(state: Any) -> None:
    del state["0.more"]


class PopsAll(nn.Sequential):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k: v for k, v in state_dict.items() if k != "0.more"})


class Partly(nn.Sequential):
    """As a LightningModule, which Lightning loads."""

    strict_loading = False


class Changed(nn.Sequential):
    def on_load_checkpoint(self, checkpoint: Any) -> None:
        drop(checkpoint["state_dict"])


def test_a_module_that_lightning_loads_in_parts_is_attached() -> None:
    for kind in (Partly, Changed):
        model = kind(Saves(more("more")))
        assert one("model", model) is model


TAKEN = [
    lambda: Loads(more("more")),
    lambda: nn.Sequential(Loads(more("more")), nn.LazyLinear(2)),
    lambda: hooked("register_load_state_dict_pre_hook", lambda _m, state, *_: state.pop("0.more")),
    lambda: hooked("register_load_state_dict_post_hook", lambda _m, keys: keys[1].clear()),
    lambda: hooked("_register_state_dict_hook", lambda _m, state, *_: drop(state)),
    lambda: PopsAll(Saves(more("more"))),
    lambda: BothExtra(2, 2),
    lambda: Saves(lambda *_: None),
    lambda: nn.utils.parametrizations.weight_norm(Saves(lambda *_: None)),
    lambda: torch.ao.quantization.FakeQuantize(),  # type: ignore[no-untyped-call]
    lambda: torch.jit.script(nn.Linear(2, 2)),
]


@pytest.mark.parametrize("make", TAKEN)
def test_a_module_that_takes_its_own_state_is_attached(make: Any) -> None:
    model = make()
    model.load_state_dict(model.state_dict())
    before = [(tensor, tensor._version) for tensor in (*model.parameters(), *model.buffers())]
    assert one("model", model) is model
    assert all(tensor._version == version for tensor, version in before)  # nothing was loaded


def test_a_part_that_cannot_be_stored_is_found_beside_others() -> None:
    model = nn.Sequential(Saves(lambda *_: None), nn.Linear(2, 2))
    model[1].register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedStateError, match=r"^model\.1\.table: .*sparse"):
        one("model", model)


def test_a_load_state_dict_that_needs_more_is_refused() -> None:
    class Needs(Broken):
        def load_state_dict(self, state: object, model: object) -> None:  # type: ignore[override]
            pass

    class NeedsToo(nn.Linear):
        def load_state_dict(self, state: Any, *, device: str) -> Any:  # type: ignore[override]
            pass

    for thing in (Needs({}), NeedsToo(2, 2)):
        with pytest.raises(UsageError, match="cannot be called with the state alone"):
            one("thing", thing)
