"""DTensors without other processes: this one is each rank in turn."""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pccheck import Shard as Block
from pccheck.restoring.inplace import Placement
from pccheck.restoring.rebuild import state_of_tree
from pccheck.state import shards
from pccheck.state.attaching import Values
from pccheck.state.plan import AttachedPlan
from pccheck.state.shards import DividingRanks
from pccheck_wire import parts, tree
from pccheck_wire.errors import StateMismatchError, UnsupportedStateError
from pccheckctl.commands.show import leaves_of, tensors_of
from tests.support import payload

Saved = tuple[dict[int, tree.Tree], list[bytearray]]


@contextlib.contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    store = FakeStore()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", rank=rank, world_size=world, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # what torch keeps knows the place of this rank


class Cut:
    """A mesh and the placements of tensors on it."""

    def __init__(self, mesh: tuple[int, ...], *placements: Any) -> None:
        self.mesh, self.placements = mesh, placements

    def __repr__(self) -> str:
        return f"{self.mesh}{self.placements}"

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        if not self.placements:
            return whole.clone()
        mesh = init_device_mesh("cpu", self.mesh)
        fit = [
            Replicate() if isinstance(one, Shard) and one.dim >= whole.dim() else one
            for one in self.placements
        ]
        return distribute_tensor(whole, mesh, fit, src_data_rank=None)


HYBRID = Cut((2, 2), Replicate(), Shard(0))
CUTS = [
    Cut((1,)), Cut((4,), Shard(0)), Cut((3,), Shard(1)), HYBRID,
    Cut((2, 2), Shard(0), Shard(1)), Cut((2, 2), Shard(0), Shard(0)), Cut((2,), Replicate()),
]  # fmt: skip


def pieces(tensor: torch.Tensor) -> tuple[slice, ...]:
    offsets = shards.offsets_of(tensor, "w")
    shape = shards.local(tensor).shape
    return tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))


@pytest.mark.parametrize("shape", [(129, 5), (2, 6), (7, 9)])
@pytest.mark.parametrize("cut", CUTS, ids=repr)
def test_offsets_say_which_block_a_rank_has(cut: Cut, shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    seen = torch.zeros(shape, dtype=torch.int)
    for rank in range(cut.world):
        with rank_of(cut.world, rank):
            made = cut(whole)
            assert torch.equal(shards.local(made), whole[pieces(made)])
            seen[pieces(made)] += 1
    assert (seen == seen[0, 0]).all() and seen[0, 0] >= 1


@pytest.mark.parametrize("rows", [18, 7, 3])
def test_strided_shards_of_fsdp_and_tensor_parallelism_are_blocks(rows: int) -> None:
    """Tensor parallelism cuts first, although its dimension of the mesh is the last."""
    whole = torch.arange(rows * 5).reshape(rows, 5)
    for rank in range(4):
        with rank_of(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            outer = torch.tensor_split(whole, split(rows))[rank % 2]
            part = torch.tensor_split(outer, split(len(outer)))[rank // 2]
            made = DTensor.from_local(
                part, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False,
                shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
            assert list(map(str, made.placements)) == ["_S(0, 2)", "S(0)"]
            assert torch.equal(part, whole[pieces(made)])
            other = DTensor.from_local(
                part, mesh, [_StridedShard(0, split_factor=4), Shard(0)], run_check=False,
                shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
            with pytest.raises(UnsupportedStateError):
                shards.offsets_of(other, "w")


def split(rows: int) -> list[int]:
    """Where torch cuts in two."""
    return [-(-rows // 2)]


def test_what_is_not_a_block_is_refused() -> None:
    with rank_of(4, 0):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial()], run_check=False)
        with pytest.raises(UnsupportedStateError, match=r"w: .* is not reduced yet"):
            shards.offsets_of(tensor, "w")
        inner = init_device_mesh("cpu", (4,))
        odd = DTensor.from_local(
            torch.ones(4), inner, [Shard(0)], run_check=False, shape=torch.Size([10]), stride=(1,)
        )
        with pytest.raises(UnsupportedStateError, match=r"w: .* is not one block"):
            shards.offsets_of(odd, "w")


# -- saved by some ranks, restored by others ---------------------------------------------------


class Net(nn.Module):
    """Any of its tensors may have no elements on some ranks; two are tied."""

    def __init__(self, cut: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, shape in {"uneven": (129, 3), "bias": (2,), "row": (1, 7)}.items():
            setattr(self, name, nn.Parameter(cut(torch.randn(shape))))
        self.narrow = nn.Parameter(cut(torch.randn(5, 6).bfloat16()))
        self.tied = self.uneven
        self.register_buffer("count", torch.tensor(float(seed)))


def trained(cut: Callable[[torch.Tensor], torch.Tensor], seed: int, *, steps: int) -> Any:
    model = Net(cut, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        if steps:
            entry = optimizer.state[parameter]
            entry["step"] = torch.tensor(float(seed))
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = cut(torch.randn(parameter.shape).to(parameter.dtype))
    return {"model": model, "optimizer": optimizer}


def tensors(attached: Any) -> list[torch.Tensor]:
    model, optimizer = attached["model"], attached["optimizer"]
    kept = [optimizer.state[one] for one in model.parameters()]
    return [*model.state_dict().values(), *(t for entry in kept for t in entry.values())]


def save(cut: Cut, ranks: int = 1, per_node: int | None = None) -> Saved:
    """`per_node`: ranks of each node, which stores a whole copy."""
    trees, payloads = {}, []
    for rank in range(cut.world):
        count = ranks if per_node is None else per_node
        row = DividingRanks(ranks, rank // count * count, count)
        with rank_of(cut.world, rank):
            plan = AttachedPlan(trained(cut, 7, steps=1), mode="sync", row=row)
            made = plan.snapshot(1, None)
            payloads.append(payload.build(made))
            trees[rank] = payload.tree_of(made)
    return trees, payloads


def load(payloads: list[bytearray], own: int, ranges: bytes, device_ranges: bytes = b"") -> None:
    for rank, mine in parts.split(ranges, device_ranges).items():
        payload.load(payloads[own if rank < 0 else rank], *mine)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("other", [Cut((2,), Shard(0)), Cut((3,), Shard(1)), Cut((1,))], ids=repr)
def test_each_node_has_a_whole_copy_of_replicas(other: Cut, node: int) -> None:
    """HSDP with replicated=True: replicas across the nodes, shards within them."""
    trees, payloads = save(HYBRID, 4, per_node=2)
    copy = {rank: trees[rank] for rank in (2 * node, 2 * node + 1)}
    whole = tensors(trained(Cut((1,)), 7, steps=1))
    for rank in range(other.world):
        own = rank if rank in copy else min(copy)
        others = {number: found for number, found in copy.items() if number != own}
        with rank_of(other.world, rank):
            attached = trained(other, 9, steps=1)
            Placement(trees[own], attached, (), lambda others=others: others).targets.load(
                lambda ranges, _=b"", own=own: load(payloads, own, ranges)
            )
            for now, then in zip(tensors(attached), whole, strict=True):
                assert torch.equal(shards.local(now).detach(), then[pieces(now)].detach())


@pytest.mark.parametrize(("cut", "ranks"), [(Cut((4,), Shard(0)), 4), (HYBRID, 8)], ids=repr)
def test_a_node_without_a_whole_copy_is_refused(cut: Cut, ranks: int) -> None:
    """The blocks are on several nodes; or ranks are not in the mesh."""
    with pytest.raises(UnsupportedStateError, match=r"model.*each node stores a whole copy"):
        save(cut, ranks, per_node=2)


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(CUTS, 2)), ids=repr)
def test_any_cut_is_restored_in_any_other(one: Cut, other: Cut) -> None:
    trees, payloads = save(one, one.world)
    whole = tensors(trained(Cut((1,)), 7, steps=1))
    for rank in range(other.world):
        own = rank if rank in trees else 0
        others = {number: found for number, found in trees.items() if number != own}
        with rank_of(other.world, rank):
            attached = trained(other, 9, steps=rank % 2)  # moments may not be there yet
            Placement(trees[own], attached, (), lambda others=others: others).targets.load(
                lambda ranges, _=b"", own=own: load(payloads, own, ranges)
            )
            found = tensors(attached)
            assert len(found) == len(whole)
            for now, then in zip(found, whole, strict=True):
                assert torch.equal(shards.local(now).detach(), then[pieces(now)].detach())


@pytest.mark.parametrize("cut", [CUTS[3], CUTS[6], Cut((2, 2), Shard(1), Replicate())], ids=repr)
def test_replicas_are_stored_once(cut: Cut) -> None:
    """When all ranks of the job have one; a mesh of some of them may be all that saves."""

    def stored(ranks: int) -> list[int]:
        trees, _ = save(cut, ranks)
        nodes = (node for one in trees.values() for _, node in tree.walk(one.root))
        blocks = {id(node): node.local for node in nodes if isinstance(node, tree.Shard)}
        return [math.prod(local.shape) for local in blocks.values()]

    once = sum(one.numel() for one in tensors(trained(Cut((1,)), 7, steps=1)) if one.dim())
    assert sum(stored(cut.world)) == once
    assert sum(stored(8)) >= 2 * once


class Turned(Cut):
    """On odd ranks the same values lie in memory in another order."""

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        made: Any = super().__call__(whole)
        if whole.dim() < 2 or dist.get_rank() % 2 == 0:
            return made  # type: ignore[no-any-return]
        return DTensor.from_local(
            made.to_local().t().contiguous().t(), made.device_mesh, made.placements,
            run_check=False, shape=made.shape, stride=made.stride(),
        )  # fmt: skip


@pytest.mark.parametrize(
    "cut", [Turned((2,), Replicate()), Turned((2, 2), Shard(0), Replicate())], ids=repr
)
@pytest.mark.parametrize("other", [CUTS[0], CUTS[6], Turned((2,), Replicate())], ids=repr)
def test_replicas_that_lie_differently_in_memory_are_stored_whole(cut: Cut, other: Cut) -> None:
    trees, payloads = save(cut, cut.world)
    whole = tensors(trained(CUTS[0], 7, steps=1))
    for rank in range(other.world):
        others = {number: found for number, found in trees.items() if number != rank}
        with rank_of(other.world, rank):
            attached = trained(other, 9, steps=1)
            Placement(trees[rank], attached, (), lambda others=others: others).targets.load(
                lambda ranges, _=b"", own=rank: load(payloads, own, ranges)
            )
            for now, then in zip(tensors(attached), whole, strict=True):
                assert torch.equal(shards.local(now).detach(), then[pieces(now)].detach())


def test_a_checkpoint_without_one_rank_leaves_the_model_as_it_was() -> None:
    trees, payloads = save(CUTS[1])
    attached = trained(Cut((1,)), 9, steps=1)
    before = [one.detach().clone() for one in tensors(attached)]
    others = {number: trees[number] for number in (1, 3)}
    with pytest.raises(StateMismatchError, match="the ranks saved"):
        Placement(trees[0], attached, (), lambda: others).targets.load(
            lambda ranges, _=b"": load(payloads, 0, ranges)
        )
    assert all(map(torch.equal, before, tensors(attached)))


class Wrapper:
    """Has a state dict of its own, nested, as frameworks have."""

    def __init__(self, cut: Cut, seed: int) -> None:
        self.model = Net(cut, seed)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.model.state_dict()], "note": "x"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["note"] == "x"
        self.model.load_state_dict(state["inner"][0])


def with_best(cut: Cut, seed: int, best: int) -> dict[str, Any]:
    """A model, and a dict with the weights of another seed, or with the model's own."""
    model = Net(cut, seed)
    weights = model if best == seed else Net(cut, best)
    return {"model": model, "values": Values({"best": [weights.state_dict()]})}


def weights(attached: dict[str, Any]) -> list[dict[str, Any]]:
    return [attached["model"].state_dict(), attached["values"].values["best"][0]]


@pytest.mark.parametrize("best", [7, 8])
@pytest.mark.parametrize("one", [CUTS[1], CUTS[3]], ids=repr)
@pytest.mark.parametrize("other", [CUTS[0], CUTS[1], CUTS[3], CUTS[4]], ids=repr)
def test_dict_with_the_models_dtensors_is_filled_or_refused(
    one: Cut, other: Cut, best: int
) -> None:
    """In the run that resumes the dict has the model's own DTensors. Copies do not go there."""
    trees, payloads = {}, []
    for rank in range(4):
        with rank_of(4, rank):
            made = AttachedPlan(
                with_best(one, 7, best), mode="sync", row=DividingRanks(4, 0, 4)
            ).snapshot(1, None)
            payloads.append(payload.build(made))
            trees[rank] = payload.tree_of(made)
    expected = weights(with_best(Cut((1,)), 7, best))
    for rank in range(other.world):
        with rank_of(other.world, rank):
            attached = with_best(other, 9, 9)
            others = {number: found for number, found in trees.items() if number != rank}
            if best != 7:
                with pytest.raises(StateMismatchError, match="shares memory with"):
                    Placement(trees[rank], attached, (), lambda others=others: others)
                continue
            placement = Placement(trees[rank], attached, (), lambda others=others: others)

            def read(ranges: bytes, _: bytes = b"", own: int = rank) -> None:
                load(payloads, own, ranges)

            placement.targets.compare(read)
            placement.targets.load(read)
            for now, then in zip(weights(attached), expected, strict=True):
                for name, tensor in now.items():
                    assert torch.equal(shards.local(tensor), then[name][pieces(tensor)])
            mine, its = (shards.local(some["uneven"]).data_ptr() for some in weights(attached))
            assert mine == its


@pytest.mark.parametrize("live", [None, {}, {"best": [None]}, {"best": [torch.zeros(129, 4)]}])
def test_a_dtensor_in_a_dict_that_does_not_fit_is_refused(live: Any) -> None:
    with rank_of(4, 1):
        best = Values({"state": {"best": [Net(CUTS[1], 7).uneven]}})
        made = AttachedPlan({"values": best}, mode="sync").snapshot(1, None)
        values = Values({"state": live})
        with pytest.raises(StateMismatchError, match=r"^values\.state\.best\.0: the checkpoint"):
            Placement(payload.tree_of(made), {"values": values})
        assert values.values == {"state": live}


def test_tensors_that_are_tied_now_get_no_two_values_in_another_cut() -> None:
    trees, payloads = {}, []
    for rank in range(4):
        with rank_of(4, rank):
            model = Net(CUTS[1], 7)
            model.tied = nn.Parameter(model.uneven + 1)
            made = AttachedPlan({"model": model}, mode="sync").snapshot(1, None)
            payloads.append(payload.build(made))
            trees[rank] = payload.tree_of(made)
    attached = {"model": Net(Cut((1,)), 9)}
    others = {number: trees[number] for number in (1, 2, 3)}
    with pytest.raises(StateMismatchError, match=r"model\.tied shares memory with model"):
        Placement(trees[0], attached, (), lambda: others)


@pytest.mark.parametrize("other", [CUTS[1], CUTS[2], CUTS[4]], ids=repr)
def test_an_object_with_its_own_state_dict_gets_dtensors(other: Cut) -> None:
    trees, payloads = {}, []
    for rank in range(4):
        with rank_of(4, rank):
            attached = {"thing": Wrapper(CUTS[1], 7)}
            made = AttachedPlan(attached, mode="sync").snapshot(1, None)
            payloads.append(payload.build(made))
            trees[rank] = payload.tree_of(made)
    whole = Net(Cut((1,)), 7).state_dict()
    for rank in range(other.world):
        with rank_of(other.world, rank):
            thing = Wrapper(other, 9)
            others = {number: found for number, found in trees.items() if number != rank}
            Placement(trees[rank], {"thing": thing}, (), lambda others=others: others).targets.load(
                lambda ranges, _=b"", own=rank: load(payloads, own, ranges)
            )
            for name, now in thing.model.state_dict().items():
                assert torch.equal(shards.local(now), whole[name][pieces(now)])


def test_blocks_for_a_gpu_go_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    trees, payloads = save(CUTS[1])
    fake = payload.FakeDevices().install(monkeypatch)
    attached = trained(Cut((1,)), 9, steps=1)
    for tensor in tensors(attached):
        fake.put(tensor)
    placement = Placement(
        trees[0], attached, (), lambda: dict(itertools.islice(trees.items(), 1, 4))
    )
    assert placement.on_gpu
    on_gpu = {one.data_ptr() for one in tensors(attached)}

    def fill(ranges: bytes, device_ranges: bytes = b"") -> None:
        assert not {item[0] for item in struct.iter_unpack("<QQQ", ranges)} & on_gpu
        load(payloads, 0, ranges, device_ranges)

    placement.targets.load(fill)
    for now, then in zip(tensors(attached), tensors(trained(Cut((1,)), 7, steps=1)), strict=True):
        assert torch.equal(now, then)


def test_recover_returns_blocks() -> None:
    trees, payloads = save(CUTS[1])
    whole = trained(Cut((1,)), 7, steps=1)["model"].state_dict()
    state = state_of_tree(trees[2], lambda ranges: load(payloads, 2, ranges))["model"]
    for name, block in state.items():
        if name == "count":
            continue
        assert type(block) is Block and block.shape == tuple(whole[name].shape)
        window = [
            slice(at, at + size) for at, size in zip(block.offsets, block.tensor.shape, strict=True)
        ]
        assert torch.equal(block.tensor.detach(), whole[name].detach()[tuple(window)])
    assert state["bias"].tensor.numel() == 0 and state["tied"].tensor is not None


class Holder:
    """Has blocks of its own, which are no DTensors."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_block_is_saved_and_restored_as_it_was() -> None:
    block = Block(torch.arange(6.0).reshape(2, 3), (5, 3), (3, 0))
    nothing = Block(torch.empty(0, 3), (5, 3), (0, 0))
    made = AttachedPlan({"thing": Holder(w=block, none=nothing)}, mode="sync").snapshot(1, None)
    described = payload.tree_of(made)
    assert described.sharded()
    thing = Holder()
    Placement(described, {"thing": thing}).targets.load(
        lambda ranges, _=b"": load([payload.build(made)], 0, ranges)
    )
    for name, then in (("w", block), ("none", nothing)):
        now = thing.state[name]
        assert type(now) is Block and now[1:] == then[1:] and torch.equal(now.tensor, then.tensor)


@pytest.mark.parametrize(
    "block",
    [
        Block(torch.ones(2), (2,), (1,)), Block(torch.ones(2), (3,), (-1,)),
        Block(torch.ones(2), (3, 3), (0, 0)), Block(torch.ones(1), (1,), ()),
    ],
)  # fmt: skip
def test_a_block_that_is_not_inside_of_its_tensor_is_refused(block: Block) -> None:
    plan = AttachedPlan({"thing": Holder(w=block)}, mode="sync")
    with pytest.raises(UnsupportedStateError, match=r"thing\.w: a Shard of .* is not inside of"):
        plan.snapshot(1, None)


def test_the_command_line_names_the_whole_tensor() -> None:
    trees, _ = save(CUTS[1])
    shown = {row["path"]: row for row in tensors_of(trees[1])}
    uneven = shown["model.uneven"]
    assert (uneven["shape"], uneven["whole_shape"]) == ([33, 3], [129, 3])
    assert uneven["whole_offsets"] == [33, 0]
    assert shown["model.count"]["whole_shape"] is None
    assert "model.uneven" not in {leaf["path"] for leaf in leaves_of(trees[1])}


# -- the fast path of checkpoint() -------------------------------------------------------------


def rebuilt(plan: AttachedPlan, steps: int, step: Callable[[], None]) -> int:
    plan.snapshot(0, None)
    before = plan.rebuilt
    for number in range(steps):
        step()
        plan.snapshot(number, None)
    return plan.rebuilt - before


def fsdp_training(*, reshard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 129), nn.ReLU(), nn.Linear(129, 5))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model, torch.optim.AdamW(model.parameters())


def test_a_sharded_model_keeps_its_plan_while_it_trains() -> None:
    with rank_of(4, 1):
        model, optimizer = fsdp_training(reshard=True)

        def step() -> None:
            model(torch.randn(3, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        plan = AttachedPlan({"model": model, "optimizer": optimizer}, mode="sync")
        assert rebuilt(plan, 5, step) == 0


def test_a_model_that_is_gathered_has_a_new_plan_with_its_shards() -> None:
    """Between forward and backward, too, the checkpoint has the blocks and not the whole."""
    with rank_of(4, 1):
        model, optimizer = fsdp_training(reshard=False)
        plan = AttachedPlan({"model": model, "optimizer": optimizer}, mode="sync")
        plan.snapshot(0, None)
        model(torch.randn(3, 16))
        assert not isinstance(next(model.parameters()), DTensor)
        before = plan.rebuilt
        found = payload.tree_of(plan.snapshot(1, None))
        assert plan.rebuilt > before
        assert found.sharded()
        paths = {path for path, node in tree.walk(found.root) if isinstance(node, tree.Shard)}
        assert {f"model.{name}" for name in model.state_dict()} <= paths


def test_a_local_part_that_was_replaced_is_seen() -> None:
    with rank_of(4, 1):
        model = Net(CUTS[1], 7)
        plan = AttachedPlan({"model": model}, mode="sync")
        plan.snapshot(0, None)
        parameter: Any = model.uneven
        parameter._local_tensor = parameter._local_tensor.clone() + 1
        made = plan.snapshot(1, None)
        assert plan.rebuilt == 2
        data, described = payload.build(made), payload.tree_of(made)
        state: Any = state_of_tree(described, lambda ranges: payload.load(data, ranges))
        assert torch.equal(state["model"]["uneven"].tensor, parameter._local_tensor)


def test_ranges_in_pieces() -> None:
    """What overlaps is read again, and long gaps are not read."""
    from pccheck_wire.parts import GAP_MAX, spans

    def at(address: int, offset: int, nbytes: int) -> bytes:
        return struct.pack("<QQQ", address, offset, nbytes)

    far = GAP_MAX + 100
    near, gap, tied = at(1, 0, 50), at(2, far, 10), at(3, 20, 10)
    beside = at(4, 60, 10)
    pieces = list(spans(near + near + beside + gap + tied, b""))
    assert pieces == [
        (0, 70, near + beside, b""), (far, 10, gap, b""), (20, 10, tied, b""),
    ]  # fmt: skip
    assert list(spans(b"", b"")) == []
    device = struct.pack("<QQQII", 9, 55, 5, 0, 0)
    assert list(spans(near + beside, device)) == [(0, 70, near + beside, device)]
