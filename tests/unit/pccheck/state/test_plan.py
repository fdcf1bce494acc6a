"""The cached plan is never stale: whatever changed is in the next snapshot."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pccheck.options import Options
from pccheck.saving.planner import Planner
from pccheck.state.extents import DevicePart, Shape
from pccheck.state.gating import Gating
from pccheck.state.plan import FROZEN_MIN, AttachedPlan, Snapshot, plan_state
from pccheck_wire import parts, tree
from pccheck_wire.errors import UnsupportedStateError
from pccheckctl.commands.show import tensors_of
from tests.support.payload import round_trip, tree_of
from tests.unit.pccheck.state.test_flatten import same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("skipped", torch.ones(3), persistent=False)
        self.register_parameter("nothing", None)


class Kit:
    """A model, an optimizer with state, and the plan for both."""

    def __init__(self, mode: str = "auto", **more: Any) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.attached = {"model": self.model, "optimizer": self.optimizer} | more
        self.plan = AttachedPlan(self.attached, mode=mode)

    def update(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()

    def expected(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self.attached.items()}

    def check(self) -> Snapshot:
        """The snapshot holds exactly what state_dict() says."""
        made = self.plan.snapshot(3, None)
        assert same(self.expected(), round_trip(made))
        return made


@pytest.fixture
def kit() -> Kit:
    torch.manual_seed(1)
    made = Kit()
    made.update()
    made.check()
    return made


def test_an_unchanged_state_keeps_its_plan(kit: Kit) -> None:
    for _ in range(5):
        kit.update()
        kit.check()
    assert kit.plan.rebuilt == 1


def test_optimizer_state_appears() -> None:
    kit = Kit()
    small = kit.check()
    kit.update()
    large = kit.check()
    assert large.payload_bytes > 2 * small.tree_offset
    assert kit.plan.rebuilt == 2


def swap_data(kit: Kit) -> None:
    kit.model.body[0].weight.data = torch.randn(4, 4)


def swap_data_transposed(kit: Kit) -> None:
    weight = kit.model.body[0].weight
    weight.data = weight.data.t()


def swap_data_dtype(kit: Kit) -> None:
    weight = kit.model.body[0].weight
    weight.data = weight.data.view(torch.int32).view(torch.float32).double()


def swap_data_same_place(kit: Kit) -> None:
    kit.model.norm.running_mean.data = kit.model.norm.running_mean.data.view(torch.int32)


def column_to_row(kit: Kit) -> None:
    kit.model.body[0].register_buffer("extra", torch.randn(6, 1))
    kit.check()
    kit.model.body[0].extra.data = kit.model.body[0].extra.data.t()  # same strides, same count


def shrink(kit: Kit) -> None:
    kit.model.body[1].bias.data.resize_(2)


def shrink_itself(kit: Kit) -> None:
    kit.model.norm.running_mean.resize_(2)


def grow(kit: Kit) -> None:
    kit.model.norm.running_var = torch.ones(4)  # one that NumPy has not seen: it can grow
    kit.plan.snapshot(1, None)
    kit.model.norm.running_var.resize_(4000).fill_(1)


def replace_parameter(kit: Kit) -> None:
    kit.model.body[0].weight = nn.Parameter(torch.randn(4, 4))


def replace_buffer(kit: Kit) -> None:
    kit.model.norm.running_mean = torch.randn(4)


def replace_module(kit: Kit) -> None:
    kit.model.body[1] = nn.Linear(4, 7)


def add_module(kit: Kit) -> None:
    kit.model.body.append(nn.Linear(2, 2))


def remove_module(kit: Kit) -> None:
    del kit.model.body[2]


def remove_buffer(kit: Kit) -> None:
    del kit.model.norm.num_batches_tracked


def rename(kit: Kit) -> None:
    kit.model.tail = kit.model.head
    del kit.model.head


def untie(kit: Kit) -> None:
    kit.model.head.weight = nn.Parameter(kit.model.embed.weight.detach().clone())


def persist(kit: Kit) -> None:
    kit.model._non_persistent_buffers_set.clear()


def hook(kit: Kit) -> None:
    def rename_all(_module: object, state: dict[str, Any], prefix: str, _meta: object) -> None:
        state[prefix + "added"] = torch.ones(2)

    kit.model.body[0]._register_state_dict_hook(rename_all)


def fill_none(kit: Kit) -> None:
    kit.model.nothing = nn.Parameter(torch.ones(3))


def drop_optimizer_state(kit: Kit) -> None:
    kit.optimizer.state.pop(kit.model.body[0].weight)


def replace_optimizer_tensor(kit: Kit) -> None:
    entry = kit.optimizer.state[kit.model.body[0].weight]
    entry["exp_avg"] = entry["exp_avg"].double()


def reload_optimizer(kit: Kit) -> None:
    kit.optimizer.load_state_dict(kit.optimizer.state_dict())


def add_group(kit: Kit) -> None:
    kit.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 5.0})


def change_groups(kit: Kit) -> None:
    kit.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    kit.optimizer.param_groups[0]["new"] = (1, None)


def scalar_in_state(kit: Kit) -> None:
    kit.optimizer.state[kit.model.body[0].weight]["count"] = 0.0
    kit.check()
    kit.optimizer.state[kit.model.body[0].weight]["count"] = -0.0


def half(kit: Kit) -> None:
    kit.model.half()


CHANGES: list[Callable[[Kit], None]] = [
    swap_data, swap_data_transposed, swap_data_dtype, swap_data_same_place, column_to_row, shrink,
    shrink_itself, grow, replace_parameter, replace_buffer, replace_module, add_module,
    remove_module, remove_buffer, rename, untie, persist, hook, fill_none, drop_optimizer_state,
    replace_optimizer_tensor, reload_optimizer, add_group, change_groups, scalar_in_state, half,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "slow"])
def test_every_change_is_in_the_next_snapshot(
    kit: Kit, change: Callable[[Kit], None], quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not quick:
        monkeypatch.setattr("pccheck.state.watch._EXCHANGE", None)
        kit = Kit()
        kit.update()
        kit.check()
    change(kit)
    kit.check()
    kit.check()


def test_what_becomes_unsupported_is_refused_by_path(kit: Kit) -> None:
    kit.model.norm.running_mean = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedStateError, match=r"model\.norm\.running_mean"):
        kit.plan.snapshot(1, None)
    kit.model.norm.running_mean = torch.ones(4)
    kit.check()


def test_a_module_whose_state_dict_fails_is_refused_by_name(kit: Kit) -> None:
    kit.model.body[1].bias = nn.UninitializedParameter()
    with pytest.raises(UnsupportedStateError, match=r"model: its state_dict.*uninitialized"):
        kit.plan.snapshot(1, None)
    kit.model.body[1].bias = nn.Parameter(torch.ones(7))
    kit.check()


def test_tied_weights_are_one_extent_and_come_back_tied(kit: Kit) -> None:
    back: Any = round_trip(kit.check())
    assert back["model"]["head.weight"].data_ptr() == back["model"]["embed.weight"].data_ptr()


class Odd(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"mine": self.weight.detach() * 2}


class Extra(nn.Linear):
    count = 0

    def get_extra_state(self) -> dict[str, int]:
        self.count += 1
        return {"count": self.count}


@pytest.mark.parametrize("part", [Odd(2, 2), Extra(2, 2)])
def test_custom_modules_are_asked_every_time(part: nn.Module) -> None:
    attached = {"model": part, "optimizer": torch.optim.SGD(part.parameters())}
    plan = AttachedPlan(attached, mode="auto")
    for _ in range(3):
        part.weight.data.add_(1)  # type: ignore[union-attr, operator]
        back: Any = round_trip(plan.snapshot(1, None))["model"]  # type: ignore[index]
        if isinstance(part, Odd):
            assert torch.equal(back["mine"], part.weight * 2)
        else:
            assert back["_extra_state"] == {"count": part.count}


class Loose:
    """A state that shares memory with the model, and grows."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


def test_other_states_are_asked_every_time_and_may_alias() -> None:
    loose = Loose()
    kit = Kit(loose=loose)
    kit.update()
    for item in (
        1,
        torch.ones(5),
        kit.model.body[0].weight.data[1],
        "x",
        kit.model.norm.running_var,
    ):
        loose.items.append(item)
        kit.check()
        kit.update()
        kit.check()
    back: Any = round_trip(kit.plan.snapshot(1, None))
    weight = back["model"]["body.0.weight"]
    assert back["loose"]["items"][2].data_ptr() == weight[1].data_ptr()


def paths(made: Snapshot, which: bytes) -> set[str]:
    """Paths of the tensors whose bytes are in packed ranges."""
    offsets = {int.from_bytes(which[i + 8 : i + 16], "little") for i in range(0, len(which), 24)}
    return {str(t["path"]) for t in tensors_of(tree_of(made)) if t["offset"] in offsets}


BUFFERS = {"model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked"}


def test_what_no_gate_guards_is_copied_at_once(kit: Kit) -> None:
    kit.model.extra = nn.Parameter(torch.ones(3))  # not the optimizer's
    made = kit.check()
    assert paths(made, made.volatile) == {"model.extra"} | BUFFERS


def test_frozen_parameters_are_read_in_place_until_they_are_trained(kit: Kit) -> None:
    kit.model.extra = nn.Parameter(torch.ones(3), requires_grad=False)
    kit.model.body[0].weight.requires_grad_(False)  # from now on the optimizer leaves it alone
    made = kit.check()
    assert paths(made, made.volatile) == BUFFERS
    kit.model.extra.requires_grad_(True)  # it is not known what trains it
    made = kit.check()
    assert paths(made, made.volatile) == {"model.extra"} | BUFFERS


def test_frozen_parameters_that_have_moved_are_copied_at_once(kit: Kit) -> None:
    average = Net().requires_grad_(False)
    attached = kit.attached | {"average": average}
    plan = AttachedPlan(attached, mode="auto", loose=frozenset({"average"}))
    made = plan.snapshot(1, None)
    volatile = paths(made, made.volatile)
    assert {f"average.{name}" for name, _ in average.named_parameters()} <= volatile
    assert not {f"model.{name}" for name, _ in kit.model.named_parameters()} & volatile


def test_ranks_divide_alike_when_frozen_parameters_have_moved_on_one(kit: Kit) -> None:
    attached = kit.attached | {"average": Net().requires_grad_(False)}
    trees = []
    for rank, loose in enumerate((frozenset({"average"}), frozenset[str]())):
        shape = Shape(rank=rank, world_size=2)
        made = AttachedPlan(attached, mode="auto", shape=shape, loose=loose).snapshot(1, None)
        trees.append(tree.decode(made.tree, made.payload_bytes))
    for rank, own in enumerate(trees):
        parts.merge(own, rank, trees.__getitem__)


def test_tensors_whose_changes_are_not_counted_are_copied_at_once() -> None:
    with torch.inference_mode():
        made = nn.Linear(2, 2).requires_grad_(False)
    taken = AttachedPlan({"model": made}, mode="auto").snapshot(1, None)
    assert not taken.ranges and not taken.in_place


def test_manual_gating_trusts_the_user_except_for_buffers() -> None:
    kit = Kit(mode="manual")
    kit.model.extra = nn.Parameter(torch.ones(3))
    kit.update()
    made = kit.check()
    assert "model.extra" in paths(made, made.ranges)
    assert paths(made, made.volatile) == BUFFERS


class Wrapper:
    """Something with a state that holds a module, as what saves shards does."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"local": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["local"])


@pytest.mark.parametrize("mode", ["manual", "auto"])
def test_manual_gating_covers_what_is_wrapped(mode: str) -> None:
    net = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))  # too large to be copied at once
    plan = AttachedPlan({"net": Wrapper(net)}, mode=mode)
    made = plan.snapshot(1, None)
    names = {f"net.local.{name}" for name in net.state_dict()}
    parameters = {f"net.local.{name}" for name, _ in net.named_parameters()}
    assert paths(made, made.ranges) == (parameters if mode == "manual" else set())
    assert paths(made, made.volatile) == names - paths(made, made.ranges)
    assert bool(made.in_place) == (mode == "manual")
    assert same({"net": {"local": net.state_dict()}}, round_trip(made))


def test_a_given_state_is_sorted_by_memory(kit: Kit) -> None:
    gating = Gating(kit.attached, "auto")
    state = {"net": kit.model.state_dict(), "own": torch.ones(2)}
    made = plan_state(state, gating, 1, None)
    volatile = paths(made, made.volatile)
    assert "own" in volatile and "net.norm.running_mean" in volatile
    assert "net.body.0.weight" not in volatile


def test_memory_that_is_read_is_kept(kit: Kit) -> None:
    made = kit.plan.snapshot(1, None)
    expected = kit.expected()
    expected = dict(expected.items())
    copy = round_trip(made)
    for p in kit.model.parameters():
        p.data = torch.zeros_like(p)
    kit.plan.snapshot(2, None)
    assert same(copy, round_trip(made))


def test_metadata_and_step(kit: Kit) -> None:
    made = tree_of(kit.plan.snapshot(41, 5))
    assert (made.step, made.metadata, made.attached) == (41, 5, True)


def test_a_plan_of_many_tensors_is_made_without_the_garbage_collector() -> None:
    """It took longer than the plan itself, and looked at every object of the script each time."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(3000)])
    planner = Planner(Options())
    planner.attach({"model": model}, rng=False)
    runs: list[str] = []
    gc.collect()
    gc.callbacks.append(lambda phase, _: runs.append(phase))
    try:
        planner.snapshot(1 << 20, None, 1, None)
    finally:
        gc.callbacks.pop()
    assert len(runs) <= 2  # one begins and ends when all is done
    assert gc.isenabled()


def test_only_host_memory_is_offered() -> None:
    """A GPU's memory is not read in place."""
    host = Snapshot(b"", b"", b"tree", 2 * FROZEN_MIN, [], frozen=FROZEN_MIN)
    assert host.worth_a_base == host.offered == FROZEN_MIN
    small = replace(host, frozen=FROZEN_MIN - 1)
    assert small.worth_a_base == small.offered == 0
    gpu = replace(host, device=DevicePart([], 4096, [], all_staged=False))
    assert (gpu.worth_a_base, gpu.offered) == (FROZEN_MIN, 0)
