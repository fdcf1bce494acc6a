"""Attached dicts are restored in place, and nothing else changes where memory is shared."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pccheck.state.attaching import Values
from pccheck_wire.errors import StateMismatchError
from tests.unit.pccheck.restoring.test_inplace import put, save
from tests.unit.pccheck.state.test_flatten import same


def into(live: dict[str, Any], saved: dict[str, Any], **others: Any) -> None:
    """Restores a dict into another one; `others` are attached beside it in both runs."""
    made = save({"values": Values(saved), **others})
    put(made, {"values": Values(live), **others})


def test_the_dict_has_the_items_of_the_checkpoint() -> None:
    live: dict[str, Any] = {"epoch": 9, "more": 1}
    into(live, {"epoch": 3, "best": 0.5, "note": ["x"]})
    assert live == {"epoch": 3, "best": 0.5, "note": ["x"]}


def test_values_go_into_the_tensors_that_fit() -> None:
    fits, other, wide = torch.zeros(2), torch.zeros(3), torch.zeros(1).expand(2)
    inner = {"fits": fits, "gone": 1}
    live: dict[str, Any] = {"inner": inner, "other": other, "wide": wide, "value": 1}
    new = {"inner": {"fits": torch.ones(2)}, "other": torch.ones(2), "wide": torch.ones(2)}
    into(live, {**new, "value": 2})
    assert live["inner"] is inner and inner["fits"] is fits and "gone" not in inner
    assert fits.tolist() == [1, 1] and other.tolist() == [0, 0, 0] and wide.tolist() == [0, 0]
    assert same(live, {**new, "value": 2})


def test_values_go_into_the_lists_and_tuples_that_have_their_place() -> None:
    parameter, first, inner = nn.Parameter(torch.zeros(2)), torch.zeros(1), torch.zeros(3)
    listed, losses = [parameter, {"inner": [inner]}], [1.0, 2.0]
    live: dict[str, Any] = {"listed": listed, "losses": losses, "pair": (first, 1), "longer": [1]}
    new = [torch.ones(2), {"inner": [torch.ones(3)]}]
    into(live, {"listed": new, "losses": [3.0], "pair": (torch.ones(1), 2), "longer": [4, 5]})
    assert live["listed"] is listed and listed[0] is parameter
    assert live["losses"] is losses and losses == [3.0] and live["longer"] == [4, 5]
    assert live["pair"][0] is first and live["pair"][1] == 2
    assert [t.unique().item() for t in (parameter, first, inner)] == [1, 1, 1]


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_list_that_has_become_a_tuple_has_the_same_tensors(kind: type) -> None:
    masters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    live: dict[str, Any] = {"masters": kind(masters)}
    saved = [torch.ones(2), torch.full((2,), 2.0)]
    into(live, {"masters": saved if kind is tuple else tuple(saved)})
    assert all(now is then for now, then in zip(live["masters"], masters, strict=True))
    assert [t[0].item() for t in masters] == [1, 2]


def test_values_go_into_the_arrays_that_fit() -> None:
    fits, frozen, other = np.zeros(2), np.zeros(2), np.zeros(2, np.float32)
    column, backwards, moments = np.zeros((2, 3))[:, 1], np.zeros(2)[::-1], np.zeros(2, "M8[s]")
    frozen.flags.writeable = False
    live = {"fits": fits, "frozen": frozen, "other": other, "column": column}
    live |= {"moments": moments, "backwards": backwards}
    saved = {name: np.ones(2) for name in live} | {"moments": np.ones(2, "M8[s]")}
    into(live, saved)
    for name, array in (("fits", fits), ("column", column), ("moments", moments)):
        assert live[name] is array and array.astype(int).tolist() == [1, 1]
    assert frozen.tolist() == other.tolist() == backwards.tolist() == [0, 0]
    assert same(live, saved)


def test_an_inference_tensor_keeps_its_place() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    live = {"tensor": tensor}
    into(live, {"tensor": torch.ones(2)})
    assert live["tensor"] is tensor and tensor.tolist() == [1, 1]


class Own(nn.Linear):
    """With a load_state_dict of its own."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


class Renames(nn.Module):
    """Has other names in its state than its parameters have, as a module of Fabric."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(*sizes)
        self.weight = self.inner.weight

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"own.{key}": one for key, one in self.inner.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        own = {key.removeprefix("own."): one for key, one in state_dict.items()}
        return self.inner.load_state_dict(own, *args, **kwargs)


class Holds:
    """Is no module, and has one, as the state of a whole program."""

    def __init__(self, *sizes: Any) -> None:
        self.inner = nn.Linear(*sizes)
        self.weight = self.inner.weight

    def state_dict(self) -> Any:
        return {"own": [self.inner.state_dict()]}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["own"][0])


class Tensors:
    """Has tensors and no module."""

    def __init__(self, *sizes: Any) -> None:
        self.weight = torch.zeros(*sizes)

    def state_dict(self) -> Any:
        return {"weight": self.weight}

    def load_state_dict(self, state: Any) -> None:
        self.weight.copy_(state["weight"])


@pytest.mark.parametrize("kind", [nn.Linear, Own, Renames, Holds, Tensors])
@pytest.mark.parametrize("as_arrays", [False, True])
def test_dict_with_the_models_own_tensors_stays_so_or_is_refused(
    kind: Any, as_arrays: bool
) -> None:
    def weights(model: Any) -> dict[str, Any]:
        state = getattr(model, "inner", model).state_dict()
        return {key: one.numpy() if as_arrays else one for key, one in state.items()}

    def kit() -> dict[str, Any]:
        model = kind(2, 2)
        return {"best": Values({"weights": weights(model)}), "model": model}

    saved, resumed = kit(), kit()
    put(save(saved), resumed)
    assert same(weights(resumed["model"]), weights(saved["model"]))
    with torch.no_grad():
        resumed["model"].weight.zero_()
    assert not resumed["best"].values["weights"]["weight"].any()
    # A copy with the same values is refused, too: training would change it.
    saved["best"].values["weights"] = copy.deepcopy(weights(saved["model"]))
    resumed = kit()
    before = copy.deepcopy(weights(resumed["model"]))
    with pytest.raises(
        StateMismatchError, match=r"best\.weights\.\w+ shares memory with model\..*clone"
    ):
        put(save(saved), resumed)
    assert same(weights(resumed["model"]), before)
    resumed["best"].values["weights"] = copy.deepcopy(weights(resumed["model"]))
    put(save(saved), resumed)
    assert same(resumed["best"].values, saved["best"].values)
    assert same(weights(resumed["model"]), weights(saved["model"]))


class Arrays:
    """Has arrays, and copies values into them."""

    def __init__(self, mean: float) -> None:
        self.mean, self.flipped = np.full(2, float(mean)), np.zeros(2)[::-1]

    def state_dict(self) -> Any:
        return {"mean": self.mean, "flipped": self.flipped}

    def load_state_dict(self, state: Any) -> None:
        self.mean[:] = state["mean"]


@pytest.mark.parametrize("as_tensors", [False, True])
def test_dict_with_an_objects_array_that_was_a_copy_is_refused(as_tensors: bool) -> None:
    def kit(mean: float, best: Any) -> dict[str, Any]:
        tracker = Arrays(mean)
        best = tracker.mean if best is None else best
        best = torch.from_numpy(best) if as_tensors else best
        return {"tracker": tracker, "best": Values({"mean": best})}

    resumed = kit(0, None)
    with pytest.raises(StateMismatchError, match=r"best\.mean shares memory with tracker\.mean"):
        put(save(kit(5, np.ones(2))), resumed)
    assert resumed["tracker"].mean.tolist() == [0, 0]


class OwnRate(torch.optim.SGD):
    """With a load_state_dict of its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        with torch.no_grad():
            self.param_groups[0]["lr"].copy_(state_dict["param_groups"][0]["lr"])


@pytest.mark.parametrize("only", [None, ["best"], ["optimizer", "best"]])
@pytest.mark.parametrize("cls", [torch.optim.SGD, OwnRate])
def test_dict_with_an_optimizers_tensor_that_was_a_copy_is_refused(cls: Any, only: Any) -> None:
    def kit(rate: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = cls(model.parameters(), torch.tensor(rate), foreach=False)
        best = Values({"rate": optimizer.param_groups[0]["lr"]})
        return {"model": model, "optimizer": optimizer, "best": best}

    saved, resumed = kit(0.5), kit(0.125)
    saved["best"].values["rate"] = torch.tensor(0.25)
    with pytest.raises(StateMismatchError, match=r"best\.rate shares memory with optimizer\.param"):
        put(save(saved), resumed, only=only)
    assert resumed["optimizer"].param_groups[0]["lr"].item() == 0.125


@pytest.mark.parametrize("column", [False, True])
def test_dict_with_an_array_of_what_is_not_restored_is_refused(column: bool) -> None:
    def kit() -> dict[str, Any]:
        tracker = Arrays(0)
        tracker.mean = np.zeros((2, 2))
        part = tracker.mean[:, 1] if column else tracker.mean[1]
        return {"tracker": tracker, "best": Values({"part": part})}

    saved, resumed = kit(), kit()
    saved["tracker"].mean += 1
    with pytest.raises(StateMismatchError, match=r"best\.part shares memory with tracker\.mean"):
        put(save(saved), resumed, only=["best"])
    assert not resumed["tracker"].mean.any()
    if not column:
        put(save(saved), resumed)
        assert resumed["tracker"].mean.tolist() == [[1, 1], [1, 1]]
        assert np.shares_memory(resumed["best"].values["part"], resumed["tracker"].mean)


def test_part_that_shares_memory_of_what_is_left_is_refused() -> None:
    def kit() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "best": Values({"weights": model.state_dict()})}

    resumed = kit()
    before = copy.deepcopy(resumed["model"].state_dict())
    with pytest.raises(StateMismatchError, match=r"best\.weights\.\w+ shares memory with model"):
        put(save(kit()), resumed, only=["best"])
    assert same(resumed["model"].state_dict(), before)


def test_a_dict_brings_what_the_state_of_a_module_leaves_out() -> None:
    def kit() -> tuple[nn.Module, dict[str, Any]]:
        model = nn.Linear(2, 2)
        model.register_buffer("cache", torch.zeros(2), persistent=False)
        return model, {"model": model, "more": Values({"cache": model.cache})}

    model, saved = kit()
    model.cache += 1  # type: ignore[operator]
    resumed, things = kit()
    put(save(saved), things)
    assert resumed.cache.tolist() == [1, 1]  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("zeros", [torch.zeros, np.zeros])
@pytest.mark.parametrize("second", [1, 2])
def test_one_tensor_of_a_dict_for_two_saved_ones_is_refused(zeros: Any, second: int) -> None:
    one = zeros(2)
    live = {"mean": one, "var": one}
    with pytest.raises(StateMismatchError, match=r"values\.var shares memory with values\.mean"):
        into(live, {"mean": zeros(2) + 1, "var": zeros(2) + second})
    assert live["mean"] is live["var"] is one and not one.any()


@pytest.mark.parametrize("order", [("table", "column"), ("column", "table")])
def test_column_of_an_attached_array_is_refused(order: tuple[str, str]) -> None:
    """A view with gaps is saved as a copy."""

    def kit() -> dict[str, Any]:
        table = np.zeros((2, 2))
        both = {"table": table, "column": table[:, 1]}
        return {name: both[name] for name in order}

    live = kit()
    with pytest.raises(StateMismatchError, match=r"values\.\w+ shares memory with values\.\w+"):
        into(live, kit())
    live["column"] = live["column"].copy()
    into(live, kit())


@pytest.mark.parametrize("make_live", [lambda: [1], lambda: {"v": 1}])
def test_list_or_dict_in_two_places_gets_one_value_or_is_refused(make_live: Any) -> None:
    one = make_live()
    before, other = copy.copy(one), type(one)()
    both = {"a": one, "b": {"c": one}}
    with pytest.raises(StateMismatchError, match=r"values\.b\.c and values\.a are one"):
        into(both, {"a": other, "b": {"c": before}})
    assert both["a"] is both["b"]["c"] is one and one == before
    into(both, {"a": other, "b": {"c": copy.copy(other)}})
    assert both["a"] is both["b"]["c"] is one and not one


def test_dict_under_two_names_is_refused_if_the_values_differ() -> None:
    live = {"n": 0}
    things = {"a": Values(live), "b": Values(live)}
    with pytest.raises(StateMismatchError, match="b and a are one dict"):
        put(save({"a": Values({"n": 1}), "b": Values({"n": 2})}), things)
    assert live == {"n": 0}
    put(save({"a": Values({"n": 1}), "b": Values({"n": 1})}), things)
    assert live == {"n": 1}


@pytest.mark.parametrize(
    "live",
    [
        lambda tensors: {"renamed": tensors},
        lambda tensors: {"masters": {"one": tensors[0]}},
        lambda tensors: {"masters": [tensors[0].view(1, 2)]},
        lambda tensors: {"renamed": tensors[0].detach().numpy()},
    ],
)
def test_tensors_that_an_optimizer_trains_get_values_or_are_refused(live: Any) -> None:
    def kit() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        tensors = [nn.Parameter(torch.zeros(2))]
        return tensors, torch.optim.SGD(tensors, 0.1)

    tensors, optimizer = kit()
    made = save({"train": Values({"masters": tensors}), "optimizer": optimizer})
    tensors, optimizer = kit()
    things = {"train": Values(live(tensors)), "optimizer": optimizer}
    with pytest.raises(StateMismatchError, match=r"train\..*an attached optimizer trains this"):
        put(made, things)
    model = nn.ParameterList(tensors)  # all is well when a model restores them
    made = save({"train": Values({"masters": tensors}), "model": model})
    put(made, {"train": Values(live(tensors)), "model": model})
