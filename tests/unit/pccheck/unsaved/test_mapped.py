"""Memory that other processes may write to is told from private memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pccheck.state.attaching import checked
from pccheck.unsaved.mapped import written_elsewhere


def found(**things: object) -> str:
    return written_elsewhere(checked(things))


def file_of(path: Path) -> str:
    torch.save(nn.Linear(300, 300).state_dict(), path)
    return str(path)


SHARED: dict[str, Callable[[Path], object]] = {
    "torch's file": lambda path: torch.from_file(file_of(path), shared=True, size=99),
    "NumPy's file": lambda path: np.asarray(np.memmap(file_of(path), np.uint8, "r+")),
    "tensor over it": lambda path: torch.from_numpy(
        np.asarray(np.memmap(file_of(path), np.uint8, "r+"))
    ),
}
PRIVATE: dict[str, Callable[[Path], object]] = {
    "torch's file": lambda path: torch.from_file(file_of(path), shared=False, size=99),
    "NumPy's file": lambda path: np.asarray(np.memmap(file_of(path), np.uint8, "c")),
    "a file that torch.load has mapped": lambda path: torch.load(file_of(path), mmap=True),
    "memory": lambda _: torch.ones(9),
}


def test_a_shared_parameter_is_named() -> None:
    net = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    net[1].share_memory()
    assert found(model=net) == "model.1.weight"


def test_a_shared_buffer_and_a_state_of_an_optimizer_are_named() -> None:
    norm = nn.BatchNorm1d(3)
    norm.running_var.share_memory_()  # type: ignore[union-attr]
    assert found(model=norm) == "model.running_var"
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    assert found(model=model, optimizer=adam) == ""
    adam.state[model.weight]["exp_avg"].share_memory_()
    assert found(model=model, optimizer=adam) == "optimizer.state.0.exp_avg"


@pytest.mark.parametrize("kind", SHARED)
def test_a_file_that_is_mapped_as_shared_is_named(kind: str, tmp_path: Path) -> None:
    assert found(table={"rows": SHARED[kind](tmp_path / "file")}) == "table.rows"


@pytest.mark.parametrize("kind", PRIVATE)
def test_private_memory_is_not_named(kind: str, tmp_path: Path) -> None:
    assert found(table={"rows": PRIVATE[kind](tmp_path / "file")}) == ""


def test_parameters_without_memory_are_passed_over() -> None:
    shared = nn.Linear(9, 9).share_memory()
    assert found(lazy=nn.LazyLinear(3), shared=shared) == "shared.weight"
