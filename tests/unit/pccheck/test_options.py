"""What users pass in, by value."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch

from pccheck import PCcheckClient
from pccheck.options import Options, check_flag
from pccheck.state.metadata import metadata_node
from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError, UsageError


class Phase(enum.IntEnum):
    WARM = 1


def test_metadata_takes_what_a_logging_dict_has() -> None:
    given = {
        "loss": np.float32(0.5), "steps": np.int64(3), "norm": torch.tensor(2.0), "flag": np.True_,
        "shape": (2, [3, (4,)]), "per_class": np.arange(3), "phase": Phase.WARM, 7: "key",
        "out": Path("/tmp/x"), "day": datetime.date(2026, 1, 2), "set": {1},
        "counts": collections.Counter("aab"), "none": None,
    }  # fmt: skip
    node = metadata_node(given)
    given["loss"] = 9
    assert tree.plain(node) == {
        "loss": 0.5, "steps": 3, "norm": 2.0, "flag": True, "shape": [2, [3, [4]]],
        "per_class": [0, 1, 2], "phase": 1, "7": "key", "out": "/tmp/x", "day": "2026-01-02",
        "set": [1], "counts": {"a": 2, "b": 1}, "none": None,
    }  # fmt: skip


def test_metadata_refuses_the_rest_by_path() -> None:
    for wrong, path in (
        ({"a": [object()]}, r"metadata\.a\.0"),
        ({"a": 1j}, r"metadata\.a"),
        ({None: 1}, "key"),
        ({"big": torch.zeros(100_000)}, "attach"),
        ({"norm": torch.zeros((), device="meta")}, r"metadata\.norm: .*meta"),
        ({"grad": torch.eye(2).to_sparse()}, r"metadata\.grad"),
    ):
        with pytest.raises(UnsupportedStateError, match=path):
            metadata_node(wrong)
    deep: list[object] = []
    deep.append(deep)
    with pytest.raises(UnsupportedStateError, match="nested"):
        metadata_node(deep)


@pytest.mark.parametrize(
    "method", ["items", "__iter__", "__getitem__", "__len__", "__str__", "__repr__", "__format__"]
)
@pytest.mark.parametrize(
    "kind", [dict, list, str, int, collections.Counter, PosixPath, type("Odd", (), {})]
)
def test_metadata_survives_whatever_its_methods_raise(kind: type, method: str) -> None:
    value = type("Raising", (kind,), {method: hostile})()
    for given in (value, {"a": value}, {"a": [value]}):
        with contextlib.suppress(UnsupportedStateError):  # those that do not ask that method
            metadata_node(given)


def hostile(*_: object, **__: object) -> object:
    raise Hostile


class Hostile(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize("wrong", ["30", None, 0, -1, float("nan"), float("inf")])
def test_a_stall_limit_is_a_number_of_seconds(wrong: float) -> None:
    with pytest.raises(UsageError, match="is not a number of seconds above 0"):
        Options(stall_limit_s=wrong)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "always"])
def test_durable_every_is_a_number_or_auto(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r'neither a number of checkpoints nor "auto"'):
        Options(durable_every=wrong)


@pytest.mark.parametrize("name", ["socket", "storage"])
def test_what_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=5 is not a path"):
        PCcheckClient("x", autostart=True, **{name: 5})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fresh", "solo", "replicated", "autostart"])
@pytest.mark.parametrize("wrong", ["yes", None, 2, 1.0, np.ones(2, bool)])
def test_what_is_no_bool_is_refused(name: str, wrong: object) -> None:
    with pytest.raises(UsageError, match=f"{name}=.* is not a bool"):
        PCcheckClient("x", **{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", [True, 1, np.True_, np.int64(1), torch.tensor(True)])
def test_a_flag_counts_by_its_value(flag: object) -> None:
    """A comparison of NumPy's numbers is no bool of Python, and the daemon refuses it."""
    assert check_flag("done", flag) is True and check_flag("done", 1 - int(flag)) is False  # type: ignore[call-overload]
