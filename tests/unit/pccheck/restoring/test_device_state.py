"""State on GPUs: into the payload, out of it, and back onto whichever device it is wanted on."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
import torch
from torch import nn

from pccheck.restoring.inplace import Placement
from pccheck.restoring.rebuild import Memory
from pccheck.state import devices
from pccheck.state.attaching import Values
from pccheck.state.extents import Shape
from pccheck.state.gating import Gating
from pccheck.state.plan import AttachedPlan, Snapshot, plan_state
from pccheck.state.rng import capture_rng
from pccheck_store.reading.loads import devices_of
from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError
from tests.support import payload
from tests.support.payload import FakeDevices, round_trip, tree_of
from tests.unit.pccheck.state.test_flatten import same

CHUNK = 4096


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeDevices:
    return FakeDevices().install(monkeypatch)


class Kit:
    """A model with state, some or all of it on GPUs."""

    def __init__(self, fakes: FakeDevices, *, steps: int = 2, seed: int = 1, gpu: bool = True):
        torch.manual_seed(seed)
        self.fakes, self.gpu = fakes, gpu
        self.model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 7))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        self.attached: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        for _ in range(steps):
            self.update()
        self.move()

    def update(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()
        self.model[1](torch.randn(5, 40))

    def move(self) -> None:
        """All but the counters of the optimizer, as torch has it."""
        if self.gpu:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self.fakes.put(tensor)
            for entry in self.optimizer.state.values():
                self.fakes.put(entry["exp_avg"])
                self.fakes.put(entry["exp_avg_sq"])

    def plan(self, mode: str = "auto", *, aside: bool = False) -> AttachedPlan:
        return AttachedPlan(self.attached, mode=mode, shape=Shape(CHUNK, aside))

    def state(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self.attached.items()}


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("mode", ["auto", "manual", "sync"])
def test_what_is_on_a_gpu_comes_back(fakes: FakeDevices, mode: str, aside: bool) -> None:
    kit = Kit(fakes)
    plan = kit.plan(mode, aside=aside)
    made = plan.snapshot(1, None)
    assert same(kit.state(), round_trip(made))
    assert made.device and made.device.nbytes % CHUNK == 0
    assert bool(made.device.staged) is (mode != "sync")  # BatchNorm's buffers
    assert bool(made.device.aside) is aside
    assert not made.ranges  # the counters are copied at once: no gate waits on the CPU
    kit.update()
    again = plan.snapshot(2, None)
    assert plan.rebuilt == 1 and again.device is made.device
    assert same(kit.state(), round_trip(again))


def test_where_tensors_lay_is_in_the_tree(fakes: FakeDevices) -> None:
    state = {
        "gpu": fakes.put(torch.ones(3), 2),
        "cpu": torch.ones(3),
        "p": nn.Parameter(torch.ones(1)),
    }
    fakes.put(state["p"], 2)
    made = plan_state(state, Gating({}, "sync"), 1, None, Shape(CHUNK))
    flags = {path: node.flags for path, node in tree.walk(tree_of(made).root)
             if isinstance(node, tree.Tensor)}  # fmt: skip
    assert flags == {
        "gpu": tree.ON_DEVICE, "cpu": 0,
        "p": tree.ON_DEVICE | tree.PARAMETER | tree.REQUIRES_GRAD,
    }  # fmt: skip
    assert made.device and made.device.devices == (2,)
    back: Any = round_trip(made)
    assert same(state, back) and devices.device_of(back["gpu"]) == devices.HOST


def test_a_tensor_that_is_asked_every_time_takes_the_slow_path(fakes: FakeDevices) -> None:
    kit = Kit(fakes)
    rate = fakes.put(torch.tensor(0.5))
    kit.optimizer.param_groups[0]["lr"] = rate
    plan = kit.plan()
    for value in (0.5, 0.25):
        rate.fill_(value)
        made = plan.snapshot(1, None)
        assert same(kit.state(), round_trip(made))
        assert made.device and made.device.staged
    kit.optimizer.param_groups[0]["lr"] = 0.125
    made = plan.snapshot(1, None)
    assert same(kit.state(), round_trip(made))
    assert plan.snapshot(1, None).device is made.device  # fast again


def test_two_gpus_and_the_host(fakes: FakeDevices) -> None:
    kit = Kit(fakes, gpu=False)
    for tensor in kit.model[0].parameters():
        fakes.put(tensor, 1)
    for tensor in kit.model[2].parameters():
        fakes.put(tensor, 3)
    made = kit.plan().snapshot(1, None)
    assert made.device and made.device.devices == (1, 3) and made.device.mask == 0b1010
    assert same(kit.state(), round_trip(made))


@pytest.mark.parametrize(("device", "said"), [(16, "beyond 16 GPUs"), (40, "CUDA_VISIBLE_DEVICES")])
def test_too_many_gpus_are_refused_by_path(fakes: FakeDevices, device: int, said: str) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"a\.b: .*{said}"):
        plan_state({"a": {"b": fakes.put(torch.ones(1), device)}}, Gating({}, "sync"), 1, None)


def test_generators_are_host_memory() -> None:
    state = capture_rng() | {"cuda": [torch.get_rng_state()]}
    made = plan_state(state, Gating({}, "sync"), 1, None)
    assert made.device is None and same(state, round_trip(made))


# -- back into place ---------------------------------------------------------------------------


def put(made: Snapshot, attached: dict[str, Any]) -> tuple[bytes, bytes]:
    loaded: list[tuple[bytes, bytes]] = []
    data = payload.build(made)

    def load(ranges: bytes, device_ranges: bytes = b"") -> None:
        loaded.append((ranges, device_ranges))
        payload.load(data, ranges, device_ranges)

    Placement(tree_of(made), attached).targets.load(load)
    assert len(loaded) == 1
    return loaded[0]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_it_goes_where_the_tensors_are_now(
    fakes: FakeDevices, then: bool, now: bool, steps: int
) -> None:
    before, after = Kit(fakes, gpu=then), Kit(fakes, gpu=now, steps=steps, seed=2)
    model = list(after.model.parameters())
    ranges, device_ranges = put(before.plan().snapshot(1, None), after.attached)
    assert same(before.state(), after.state())
    for packed, size in ((ranges, 24), (device_ranges, 32)):
        assert len(packed) % size == 0
    targets = {item[0] for item in struct.iter_unpack("<QQQII", device_ranges)}
    assert {p.data_ptr() for p in model} <= (
        targets if now else {item[0] for item in struct.iter_unpack("<QQQ", ranges)}
    )
    assert devices_of(device_ranges) == ([0] if now else [])
    assert fakes.synchronized == ([0] if now else [])
    for p in model:
        entry = after.optimizer.state[p]
        assert (devices.device_of(entry["exp_avg"]) == 0) is now  # new tensors, too
        assert (entry["exp_avg"].data_ptr() in targets) is now
        assert devices.device_of(entry["step"]) == devices.HOST


def test_state_that_was_kept_off_the_gpu_stays_off_it(fakes: FakeDevices) -> None:
    before, after = Kit(fakes), Kit(fakes, steps=0, seed=2)
    parameter = before.model[0].weight
    before.optimizer.state[parameter]["exp_avg"] = torch.randn(40, 30)
    put(before.plan().snapshot(1, None), after.attached)
    assert same(before.state(), after.state())
    entry = after.optimizer.state[after.model[0].weight]
    assert devices.device_of(entry["exp_avg"]) == devices.HOST
    assert devices.device_of(entry["exp_avg_sq"]) == 0


def test_both_kinds_of_ranges_ascend(fakes: FakeDevices) -> None:
    before, after = Kit(fakes, gpu=False), Kit(fakes, gpu=False, seed=2)
    for tensor in after.model[0].parameters():
        fakes.put(tensor, 1)
    for tensor in after.model[2].parameters():
        fakes.put(tensor, 0)
    ranges, device_ranges = put(before.plan().snapshot(1, None), after.attached)
    assert same(before.state(), after.state())
    for packed in (
        [item[1:3] for item in struct.iter_unpack("<QQQ", ranges)],
        [item[1:3] for item in struct.iter_unpack("<QQQII", device_ranges)],
    ):
        assert packed and all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(packed))
    assert devices_of(device_ranges) == [0, 1] == fakes.synchronized


def test_other_strides_on_the_gpu_are_copied(fakes: FakeDevices) -> None:
    before, after = Kit(fakes), Kit(fakes, seed=2)
    after.model[0].weight.data = fakes.put(torch.zeros(30, 40)).t()
    put(before.plan().snapshot(1, None), after.attached)
    assert torch.equal(before.model[0].weight, after.model[0].weight)


def test_a_tree_from_before_gpus_decodes() -> None:
    node = tree.Tensor([2], [1], "float32", tree.PARAMETER | tree.REQUIRES_GRAD, 0)
    old = tree.Tree(1, None, False, [tree.Extent(0, 8)], node)
    assert tree.decode(tree.encode(old)) == old


def test_a_new_tensor_in_a_dict_goes_to_the_gpu_of_the_one_in_its_place(
    fakes: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another shape, so that it is made."""
    beside: list[torch.Tensor | None] = []
    tensor = Memory.tensor

    def seen(self: Memory, node: tree.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        beside.append(like)
        return tensor(self, node, like)

    def kit() -> dict[str, Any]:
        return {"best": Values({"weight": fakes.put(torch.zeros(2))})}

    saved, resumed = kit(), kit()
    saved["best"].values["weight"] = fakes.put(torch.ones(2, 2))
    made = AttachedPlan(saved, mode="sync", shape=Shape(CHUNK, False)).snapshot(1, None)
    data = payload.build(made)
    monkeypatch.setattr(Memory, "tensor", seen)
    Placement(tree_of(made), resumed).targets.load(
        lambda ranges, device_ranges=b"": payload.load(data, ranges, device_ranges)
    )
    assert resumed["best"].values["weight"].tolist() == [[1, 1], [1, 1]]
    assert beside[-1] is not None and fakes.device_of(beside[-1]) == 0
