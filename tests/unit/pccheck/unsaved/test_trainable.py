"""One bit for each parameter of the attached modules, beside the state."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pccheck.unsaved import trainable
from pccheck_wire import tree


def stored(**about: tree.Node) -> tree.Tree:
    items: list[tuple[tree.Node, tree.Node]] = [*about.items()]
    described = tree.Tree(1, None, True, [], None, about=tree.Mapping(tree.Tag.DICT, items))
    return tree.decode(tree.encode(described))


def recorded(*modules: nn.Module) -> dict[str, list[bool]]:
    key, node = trainable.record({f"m{i}": m for i, m in enumerate(modules)} | {"rng": True})
    return trainable.recorded(stored(**{str(key): node}))


@pytest.mark.parametrize("layers", [0, 1, 4, 5, 50])
def test_the_flags_of_each_module_come_back(layers: int) -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(layers)])
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 == 0)
    found = recorded(model, nn.ReLU())
    assert len(found["m0"]) == 2 * layers and found["m1"] == []
    assert trainable.differing(model, found["m0"]) == {}
    model.requires_grad_(True)
    frozen = {name for name, _ in model.named_parameters()} - {
        name for number, (name, _) in enumerate(model.named_parameters()) if number % 3 == 0
    }
    assert trainable.differing(model, found["m0"]) == dict.fromkeys(frozen, False)


def test_a_tied_parameter_has_both_names() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    apart = recorded(model)["m0"]
    model[1].weight = model[0].weight
    assert trainable.differing(model.requires_grad_(False), apart).keys() == {
        "0.weight", "0.bias", "1.weight", "1.bias",
    }  # fmt: skip


def test_a_module_with_other_parameters_is_not_compared() -> None:
    assert trainable.differing(nn.Linear(1, 1), [False]) == {}


@pytest.mark.parametrize(
    "node",
    [
        None, 3, {"m": None}, {"m": {"count": 9, "bits": b"x"}}, {"m": {"count": -1, "bits": b""}},
        {"m": {"count": "1", "bits": b"x"}}, {"m": {"bits": b"x"}}, {"m": {"count": 1}},
    ],
)  # fmt: skip
def test_flags_that_cannot_be_read_are_none(node: Any) -> None:
    def mapping(value: Any) -> tree.Node:
        if not isinstance(value, dict):
            return value  # type: ignore[no-any-return]
        return tree.Mapping(tree.Tag.DICT, [(k, mapping(v)) for k, v in value.items()])

    assert trainable.recorded(stored(requires_grad=mapping(node))) == {}
    assert trainable.recorded(tree.Tree(1, None, True, [], None)) == {}
