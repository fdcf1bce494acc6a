"""What was recovered goes straight into what is attached, or nothing is touched at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pccheck.restoring.inplace import Placement
from pccheck.state.plan import AttachedPlan, Snapshot
from pccheck.state.rng import capture_rng, restore_rng
from pccheck.warn import PccheckWarning
from pccheck_wire.errors import StateMismatchError
from tests.support import payload
from tests.unit.pccheck.state.test_flatten import same


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight


def make(
    seed: int, *, width: int = 4, steps: int = 0, cls: type = torch.optim.AdamW
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = cls(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        scheduler.step()
        model.norm(torch.randn(3, width))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def states(attached: dict[str, Any]) -> dict[str, Any]:
    return {name: thing.state_dict() for name, thing in attached.items()}


def save(attached: dict[str, Any]) -> Snapshot:
    return AttachedPlan(attached, mode="sync").snapshot(1, None)


def put(
    made: Snapshot, attached: dict[str, Any], only: list[str] | None = None
) -> list[tuple[int, int]]:
    """Restores; the (address, bytes) that were loaded."""
    loaded: list[tuple[int, int]] = []
    data = payload.build(made)

    def load(ranges: bytes, device_ranges: bytes = b"") -> None:
        assert not device_ranges
        for at in range(0, len(ranges), 24):
            address, _, nbytes = (
                int.from_bytes(ranges[at + i : at + i + 8], "little") for i in (0, 8, 16)
            )
            loaded.append((address, nbytes))
        payload.load(data, ranges)

    placement = Placement(payload.tree_of(made), attached, only=only)
    placement.targets.compare(load)
    placement.targets.load(load)
    return loaded


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_everything_comes_back(steps: int, cls: type) -> None:
    before, after = make(1, steps=3, cls=cls), make(2, steps=steps, cls=cls)
    put(save(before), after)
    assert same(states(before), states(after))
    assert after["optimizer"].param_groups[0]["params"][0] is after["model"].embed.weight
    for kit in (before, after):  # and goes on alike
        torch.manual_seed(9)
        for p in kit["model"].parameters():
            p.grad = torch.randn_like(p)
        kit["optimizer"].step()
    assert same(states(before), states(after))


def test_tensors_keep_their_memory_and_identity() -> None:
    before, after = make(1, steps=2), make(2, steps=1)
    model, optimizer = after["model"], after["optimizer"]
    moment = optimizer.state[model.body.weight]["exp_avg"]
    addresses = {p.data_ptr() for p in model.parameters()} | {moment.data_ptr()}
    loaded = put(save(before), after)
    assert addresses <= {address for address, _ in loaded}
    assert optimizer.state[model.body.weight]["exp_avg"] is moment
    assert model.head.weight is model.embed.weight


class Two(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


def named(seed: int, *, steps: int = 0, backwards: bool = False, prefix: str = "") -> Any:
    model = Two(seed)
    pairs = [(prefix + name, p) for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(pairs[::-1] if backwards else pairs, lr=0.1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_named_parameters_find_their_state_in_any_order(steps: int, prefix: str) -> None:
    before = named(1, steps=3)
    after = named(2, steps=steps, backwards=True, prefix=prefix)
    group = after["optimizer"].param_groups[0]
    names, parameters = list(group["param_names"]), list(group["params"])
    put(save(before), after)
    assert group["param_names"] == names
    assert all(a is b for a, b in zip(group["params"], parameters, strict=True))
    for p, q in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        assert same(before["optimizer"].state[p], after["optimizer"].state[q])
    put(save(after), before)  # and back again
    for p, q in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        assert same(before["optimizer"].state[p], after["optimizer"].state[q])


def test_an_optimizer_without_names_takes_the_order_and_the_names_of_the_checkpoint() -> None:
    before, after = named(1, steps=1), {"model": Two(2)}
    after["optimizer"] = torch.optim.AdamW(after["model"].parameters())  # type: ignore[assignment]
    put(save(before), after)
    saved, now = (kit["optimizer"].state_dict() for kit in (before, after))
    assert same(saved["state"], now["state"])
    names = now["param_groups"][0]["param_names"]
    assert names == saved["param_groups"][0]["param_names"]
    again = named(3)
    del before["optimizer"].param_groups[0]["param_names"]
    put(save(before), again)
    assert again["optimizer"].param_groups[0]["param_names"] == names


def other_parameters(kit: dict[str, Any]) -> None:
    pairs = [(f"net.{name}", p) for name, p in kit["model"].named_parameters()]
    kit["optimizer"] = torch.optim.AdamW(pairs[::-1])


def test_other_names_of_parameters_are_told() -> None:
    after = named(2)
    other_parameters(after)
    before = copy.deepcopy(states(after))
    text = "param_groups.0.param_names: only in the checkpoint: one.bias.*attached: net.one.bias"
    with pytest.raises(StateMismatchError, match=text):
        put(save(named(1, steps=1)), after)
    assert same(before, states(after))


ELEMENTWISE = [
    (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}), (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}), (torch.optim.Adamax, {}), (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}), (torch.optim.NAdam, {}), (torch.optim.RAdam, {}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options"), ELEMENTWISE)
@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_another_shape_than_its_parameter_is_refused(
    cls: Any, options: dict[str, Any], steps: int
) -> None:
    def kit(*, backwards: bool, steps: int) -> dict[str, Any]:
        model = nn.Linear(8, 4)
        parameters = list(model.parameters())
        optimizer = cls(parameters[::-1] if backwards else parameters, lr=0.1, **options)
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    after = kit(backwards=True, steps=steps)
    before = copy.deepcopy(states(after))
    with pytest.raises(StateMismatchError, match=r"optimizer.state.0.*for a parameter of \[4\]"):
        put(save(kit(backwards=False, steps=1)), after)
    assert same(before, states(after))


def test_optimizers_that_are_not_of_torch_keep_state_of_any_shape() -> None:
    class Factored(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, _closure: object = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["exp_avg_sq"] = torch.ones(p.numel() // 2, dtype=torch.uint8)

    before, after = (Factored([nn.Parameter(torch.ones(4, 4))]) for _ in range(2))
    before.step()
    put(save({"optimizer": before}), {"optimizer": after})
    assert same(before.state_dict(), after.state_dict())


def test_float32_moments_of_bfloat16_parameters_stay_float32() -> None:
    def kit() -> dict[str, Any]:
        made = make(1, steps=1)
        made["model"].bfloat16()
        for entry in made["optimizer"].state.values():
            entry["exp_avg"] = torch.randn(entry["exp_avg"].shape)
        return made

    before, after = kit(), kit()
    after["optimizer"].state.clear()
    put(save(before), after)
    assert same(states(before), states(after))
    assert after["optimizer"].state[after["model"].body.weight]["exp_avg"].dtype is torch.float32


class Float32(torch.optim.Optimizer):
    """Has float32 moments of bfloat16 parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float32)).add_(1 / 3)


class Named(Float32):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state["common"] = {"count": 0, "norm": torch.ones(2)}  # type: ignore[index]


class OwnLoad(Float32):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)


class OwnBoth(OwnLoad):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict() | {"more": 1}


class Plain(Float32):
    """Its state of a parameter is no dict."""

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p] = torch.full_like(p, 1 / 3, dtype=torch.float32)  # type: ignore[assignment]


def trained(cls: type[Float32]) -> Float32:
    made = cls([nn.Parameter(torch.ones(5, dtype=torch.bfloat16))])
    made.step()
    return made


@pytest.mark.parametrize("cls", [Named, OwnLoad, OwnBoth, Plain])
@pytest.mark.parametrize("steps", [0, 1])
def test_no_state_is_cast_to_the_dtype_of_its_parameter(cls: type[Float32], steps: int) -> None:
    before, after = trained(cls), cls([nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))])
    if steps:
        after.step()
    put(save({"optimizer": before}), {"optimizer": after})
    assert same(before.state_dict(), after.state_dict())


class Halved(Float32):
    """Saves its moments in another form than it keeps them."""

    def state_dict(self) -> Any:  # type: ignore[override]
        made = super().state_dict()
        state = {number: {"m": entry["m"].bfloat16()} for number, entry in made["state"].items()}
        return {**made, "state": state}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for entry in self.state.values():
            entry["m"] = entry["m"].float()


class Copied(OwnLoad):
    def state_dict(self) -> Any:  # type: ignore[override]
        return copy.deepcopy(super().state_dict())


def test_what_an_optimizer_makes_of_its_own_state_stays() -> None:
    before, after = trained(Halved), trained(Halved)
    put(save({"optimizer": before}), {"optimizer": after})
    assert next(iter(after.state.values()))["m"].dtype is torch.float32
    before, after = trained(Copied), trained(Copied)
    with pytest.warns(
        PccheckWarning, match=r"converted state\.0\.m from torch.float32 to torch.bfloat16"
    ):
        put(save({"optimizer": before}), {"optimizer": after})


def test_a_wrapper_that_shares_the_state_goes_on_sharing_it() -> None:
    before, after = make(1, steps=2), make(2)
    wrapper = torch.optim.Optimizer(after["model"].parameters(), {})
    inner = after["optimizer"]
    wrapper.state, wrapper.param_groups = inner.state, inner.param_groups
    put(save({"optimizer": before["optimizer"]}), {"optimizer": wrapper})
    assert wrapper.state is inner.state
    assert same(before["optimizer"].state_dict(), inner.state_dict())


def test_other_strides_are_copied() -> None:
    before, after = make(1), make(2)
    after["model"].body.weight.data = torch.zeros(8, 8)[::2, ::2]
    beside = after["model"].body.weight.data.untyped_storage()
    put(save(before), after)
    assert torch.equal(before["model"].body.weight, after["model"].body.weight)
    whole = torch.empty(0).set_(beside, 0, (8, 8))
    assert int(whole.count_nonzero()) == 16  # what lies between was not touched


def test_untied_now_tied_then() -> None:
    before, after = make(1), make(2)
    after["model"].head.weight = nn.Parameter(torch.zeros(5, 4))
    after["optimizer"] = torch.optim.AdamW(list(after["model"].parameters())[:-1])
    after["scheduler"] = torch.optim.lr_scheduler.StepLR(after["optimizer"], 2)
    put(save(before), after)
    assert torch.equal(after["model"].head.weight, before["model"].embed.weight)
    assert torch.equal(after["model"].embed.weight, before["model"].embed.weight)


class Buffers(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


def overlapping(values: torch.Tensor) -> torch.Tensor:
    return values.as_strided((3, 4), (1, 1))


ROWS = torch.arange(4.0).expand(3, 4)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (ROWS, torch.zeros(4).expand(3, 4)),
        (ROWS, torch.zeros(3, 4)),
        (overlapping(torch.arange(6.0)), overlapping(torch.zeros(6))),
        (torch.arange(8).view(2, 2, 2), torch.zeros(2, 2, 2, dtype=torch.int64).transpose(0, 2)),
    ],
)
def test_elements_that_share_memory_as_at_the_save_are_filled(
    saved: torch.Tensor, live: torch.Tensor
) -> None:
    put(save({"model": Buffers(b=saved)}), {"model": Buffers(b=live)})
    assert torch.equal(live, saved)


@pytest.mark.parametrize(
    "live",
    [torch.zeros(4).expand(3, 4), torch.zeros(3, 1).expand(3, 4), overlapping(torch.zeros(6))],
)
def test_elements_that_share_memory_since_the_save_are_refused(live: torch.Tensor) -> None:
    after = Buffers(a=torch.zeros(5), b=live)
    text = r"model\.b: elements of the attached tensor share memory"
    with pytest.raises(StateMismatchError, match=text):
        put(save({"model": Buffers(a=torch.ones(5), b=torch.ones(3, 4))}), {"model": after})
    assert not after.a.any() and not after.b.any()


def tied() -> Buffers:
    one = torch.zeros(4)
    return Buffers(a=one, b=one)


def overlapped() -> Buffers:
    whole = torch.zeros(8)
    return Buffers(a=whole[:4], b=whole[2:6])


def interleaved() -> Buffers:
    whole = torch.zeros(4, 2)
    return Buffers(a=whole[:, 0], b=whole[:, 1])


def test_weights_tied_since_the_save_get_one_value_or_are_refused() -> None:
    after = tied()
    with pytest.raises(
        StateMismatchError, match=r"model\.\w shares memory with model\.\w, as tied"
    ):
        put(save({"model": Buffers(a=torch.ones(4), b=torch.arange(4.0))}), {"model": after})
    assert not after.a.any()
    value = torch.tensor([1.0, 2.0, float("nan"), -0.0])
    put(save({"model": Buffers(a=value, b=value.clone())}), {"model": after})
    assert same(after.a, value)


@pytest.mark.parametrize("make_live", [overlapped, interleaved])
def test_views_that_share_memory_since_the_save_are_refused(make_live: Any) -> None:
    after = make_live()
    ones = torch.ones(4)
    with pytest.raises(
        StateMismatchError, match=r"model\.\w shares memory with model\.\w, and did"
    ):
        put(save({"model": Buffers(a=ones, b=ones.clone())}), {"model": after})
    assert not after.a.any() and not after.b.any()
    put(save({"model": make_live()}), {"model": after})


def test_what_was_saved_tied_is_not_read_twice() -> None:
    before, after = make(1, steps=1), make(2, steps=1)
    whole = [torch.arange(8.0), torch.zeros(8)]
    for kit, memory in zip((before, after), whole, strict=True):
        kit["views"] = Buffers(all=memory, left=memory[:4], right=memory[2:])
    placement = Placement(payload.tree_of(save(before)), after)
    placement.targets.compare(lambda *_: pytest.fail("read"))
    put(save(before), after)
    assert torch.equal(whole[1], whole[0])


@pytest.mark.parametrize("make_live", [lambda: torch.zeros(3, 4), lambda: torch.zeros(4, 3).t()])
def test_tensors_of_inference_mode_are_filled(make_live: Any) -> None:
    with torch.inference_mode():
        live = make_live()
    values = ROWS.contiguous()
    put(
        save({"model": Buffers(a=values, b=values)}),
        {"model": Buffers(a=torch.zeros(3, 4), b=live)},
    )
    assert torch.equal(live, values) and live.is_inference()


def test_a_learning_rate_of_inference_mode_stays_the_same_object() -> None:
    before, after = make(1), make(2)
    with torch.inference_mode():
        rate = torch.tensor(0.25)
    before["optimizer"].param_groups[0]["lr"] = torch.tensor(0.5)
    after["optimizer"].param_groups[0]["lr"] = rate
    put(save(before), after)
    assert after["optimizer"].param_groups[0]["lr"] is rate and float(rate) == 0.5


def test_groups_that_begin_with_one_learning_rate_get_their_own() -> None:
    """An optimizer gives one tensor to all groups that name none."""

    def kit() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        return {"optimizer": torch.optim.AdamW(groups, lr=torch.tensor(0.1))}

    before, after = kit(), kit()
    before["optimizer"].param_groups[1]["lr"] = torch.tensor(0.5)
    first, second = after["optimizer"].param_groups
    rate = first["lr"]
    assert second["lr"] is rate
    put(save(before), after)
    assert first["lr"] is rate and [float(one["lr"]) for one in (first, second)] == [
        pytest.approx(0.1), 0.5
    ]  # fmt: skip
    same_rate = kit()
    put(save(kit()), same_rate)
    first, second = same_rate["optimizer"].param_groups
    assert first["lr"] is second["lr"]


class Assigns(nn.Linear):
    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        return super().load_state_dict(state, assign=True)


class Masters:
    """Parameters without a module, which are made again."""

    def __init__(self) -> None:
        self.masters = [nn.Parameter(torch.zeros(2))]

    def parameters(self) -> list[nn.Parameter]:
        return self.masters

    def state_dict(self) -> dict[str, Any]:
        return {"masters": list(self.masters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.masters = [nn.Parameter(one) for one in state["masters"]]


class Holder:
    """An object around a module."""

    def __init__(self) -> None:
        self.net = Assigns(2, 2)

    def parameters(self) -> Any:
        return self.net.parameters()

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)


@pytest.mark.parametrize("make_thing", [lambda: Assigns(2, 2), Masters, Holder])
def test_new_tensors_in_the_place_of_trained_ones_are_refused(make_thing: Any) -> None:
    """The optimizer would go on with the old ones."""

    def kit() -> dict[str, Any]:
        thing = make_thing()
        return {"thing": thing, "optimizer": torch.optim.SGD(thing.parameters(), 0.1)}

    with pytest.raises(StateMismatchError, match=r"thing: its load_state_dict\(\) put new tensors"):
        put(save(kit()), kit())
    thing = make_thing()
    put(save({"thing": make_thing()}), {"thing": thing})  # no optimizer is attached
    copies = {
        "thing": make_thing(),
        "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1),
    }
    put(save(copies), copies)


def rename(kit: dict[str, Any]) -> None:
    kit["net"] = kit.pop("model")


def reshape(kit: dict[str, Any]) -> None:
    kit["model"].body = nn.Linear(4, 6)


def recast(kit: dict[str, Any]) -> None:
    kit["model"].norm.double()


def add(kit: dict[str, Any]) -> None:
    kit["model"].more = nn.Linear(2, 2)


def regroup(kit: dict[str, Any]) -> None:
    kit["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def fewer(kit: dict[str, Any]) -> None:
    kit["optimizer"] = torch.optim.AdamW(list(kit["model"].parameters())[1:])


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (rename, "net"), (reshape, "model.body.weight"), (recast, "model.norm.weight"),
        (add, "more.bias"), (regroup, "optimizer.param_groups"),
        (fewer, r"optimizer.param_groups.0.params"),
    ],
)  # fmt: skip
def test_a_mismatch_names_its_path_and_touches_nothing(change: Any, path: str) -> None:
    made, after = save(make(1, steps=2)), make(2, steps=1)
    change(after)
    before = payload.round_trip(AttachedPlan(after, mode="sync").snapshot(1, None))
    with pytest.raises(StateMismatchError, match=path):
        put(made, after)
    assert same(before, states(after))


def test_a_given_state_cannot_be_put_in_place() -> None:
    from tests.unit.pccheck.state.test_flatten import snapshot

    with pytest.raises(StateMismatchError, match="recover"):
        put(snapshot({"model": torch.ones(1)}), make(1))


class Versioned(nn.Linear):
    """Has a state dict and a way to load it of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"v2.weight": self.weight.detach(), "bias": self.bias.detach()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            self.weight.copy_(state["v2.weight"])
            self.bias.copy_(state["bias"])


def test_custom_modules_load_their_own_way() -> None:
    before, after = {"model": Versioned(3, 3)}, {"model": Versioned(3, 3)}
    put(save(before), after)
    assert torch.equal(before["model"].weight, after["model"].weight)


def test_a_learning_rate_tensor_stays_the_same_object() -> None:
    before, after = make(1), make(2)
    for kit, value in ((before, 0.5), (after, 0.25)):
        kit["optimizer"].param_groups[0]["lr"] = torch.tensor(value)
    rate = after["optimizer"].param_groups[0]["lr"]
    put(save(before), after)
    assert after["optimizer"].param_groups[0]["lr"] is rate and float(rate) == 0.5


class Foreign:
    """A state of plain values that cannot be taken over."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("last_lr")


def test_no_tensor_is_changed_when_a_scheduler_refuses() -> None:
    before, after = make(1, steps=2), make(2, steps=1)
    there = copy.deepcopy(states({"model": after["model"], "optimizer": after["optimizer"]}))
    made = save(before | {"other": Foreign()})
    with pytest.raises(
        StateMismatchError, match=r"other: its load_state_dict.*KeyError: 'last_lr'"
    ):
        put(made, after | {"other": Foreign()})
    assert same(states({name: after[name] for name in there}), there)


def test_fewer_gpus_than_at_the_save_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    state = capture_rng() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    torch.rand(3)
    with pytest.warns(PccheckWarning, match="generators of 2 GPUs, and this process has 1"):
        restore_rng(state)
    assert torch.equal(torch.get_rng_state(), state["torch"])


def lazy(*, forward: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    if forward:
        step({"model": model, "optimizer": optimizer})
    return {"model": model, "optimizer": optimizer}


def step(kit: dict[str, Any]) -> None:
    kit["optimizer"].zero_grad()
    kit["model"](torch.arange(12.0).reshape(4, 3)).sum().backward()
    kit["optimizer"].step()


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_lazy_modules_get_their_shapes_from_the_checkpoint(order: tuple[str, str]) -> None:
    before, after, plain = lazy(forward=True), lazy(forward=False), lazy(forward=False)
    plain["model"].load_state_dict(before["model"].state_dict())
    plain["optimizer"].load_state_dict(copy.deepcopy(before["optimizer"].state_dict()))
    put(save(before), {name: after[name] for name in order})
    assert same(states(before), states(after))
    for kit in (before, after, plain):
        step(kit)
    assert same(states(before), states(after)) and same(states(plain), states(after))
