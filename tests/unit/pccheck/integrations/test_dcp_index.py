"""torch.distributed.checkpoint's names for what ranks have saved."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from pccheck.integrations.dcp.index import Index
from pccheck.restoring.opened import TensorInfo
from pccheck_wire.errors import StateMismatchError


def block(first: int, rows: int, whole: int = 4, dtype: torch.dtype = torch.float32) -> TensorInfo:
    return TensorInfo((rows, 3), dtype, (whole, 3), (first, 0), placements=("S(0)",))


def test_replicas_of_a_block_count_once_and_the_first_state_wins() -> None:
    """Two replicas of two shards; the state of this rank comes first."""
    ranks = {3: block(2, 2), 0: block(0, 2), 1: block(2, 2), 2: block(0, 2)}
    index = Index({rank: {"w": info, "n": rank} for rank, info in ranks.items()}, 5)
    chunks = [(tuple(one.offsets), tuple(one.sizes)) for one in index.items["w"].chunks]
    assert chunks == [((2, 0), (2, 3)), ((0, 0), (2, 3))]
    assert index.source(MetadataIndex("w", (0, 0))) == ("w", 0)
    assert index.source(MetadataIndex("w", (2, 0))) == ("w", 3)
    assert index.source(MetadataIndex("n")) == ("n", 3)


def test_a_whole_tensor_needs_nothing_of_the_others() -> None:
    others = {1: {"w": block(2, 2)}, 2: {"w": block(0, 4, dtype=torch.float64)}, 3: {"w": "x"}}
    index = Index({0: {"w": block(0, 4)}, **others}, 5)
    assert [tuple(one.sizes) for one in index.items["w"].chunks] == [(4, 3)]


def test_blocks_without_elements_and_missing_ones() -> None:
    states = {0: {"w": block(0, 4)}, 1: {"w": block(0, 0)}}
    assert len(Index(states, 5).items["w"].chunks) == 1
    assert not Index({0: {"w": block(0, 0, whole=0)}}, 5).items["w"].chunks
    with pytest.raises(StateMismatchError, match="w: the ranks saved all but 6 of the 12"):
        Index({0: {"w": block(0, 2)}, 1: {"w": block(0, 0)}}, 5)


def test_names_are_those_of_torch() -> None:
    whole = TensorInfo((2,), torch.int64, (2,), (0,))
    state = {
        "a": {0: whole, "x.y": [whole, {"z": 1}]},
        "ids": [1, [2]],
        "pair": (whole, 1),
        "e": {},
    }
    index = Index({0: state}, 5)
    assert index.items.keys() == {"a.0", "a.x.y.0", "a.x.y.1.z", "ids", "pair"}
    assert index.paths["a.x.y.1.z"] == ("a", "x.y", 1, "z")


def test_an_attached_optimizer_by_the_names_of_its_parameters() -> None:
    def attached(*names: str) -> Index:
        whole = [TensorInfo((2,), torch.float32, (2,), (0,)) for _ in names]
        group = {"lr": 0.1, "params": [0, 1], "param_names": [*names]}
        moments = {number: {"exp_avg": info} for number, info in enumerate(whole)}
        return Index({0: {"optimizer": {"state": moments, "param_groups": [group]}}}, 1)

    index = attached("b.w", "a.w")
    assert index.paths["optimizer.state.b.w.exp_avg"] == ("optimizer", "state", "b.w", "exp_avg")
    assert index.source(MetadataIndex("optimizer.state.b.w.exp_avg", (0,)))[0].endswith("0.exp_avg")
    numbers, names = (f"optimizer.param_groups.0.{key}" for key in ("params", "param_names"))
    assert not index.is_by_name(["optimizer.state.0.exp_avg", numbers])
    assert index.is_by_name(["optimizer.state.a.w.exp_avg", numbers])
    assert index.source(MetadataIndex(numbers), by_name=False) == (numbers, 0)
    assert index.source(MetadataIndex(numbers), by_name=True) == (names, 0)
    assert not attached("0", "1").is_by_name(["optimizer.state.1.exp_avg"])  # the same either way
    with pytest.raises(StateMismatchError, match="may mean two parameters"):
        attached("1", "0").is_by_name(["optimizer.state.1.exp_avg"])
    attached("1", "0").is_by_name(["optimizer.param_groups.0.lr"])
