"""The states of every generator that a training loop draws from."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch

from pccheck.warn import PccheckWarning
from pccheck_wire import tree

from .flatten import Flattener


def capture_rng() -> dict[str, Any]:
    """The states of Python's, NumPy's (global) and torch's generators, CUDA's if in use."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized() and torch.cuda.is_available():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def captured_node(flattener: Flattener, path: str) -> tree.Node:
    """The node of what capture_rng returns, without a look at each of Python's 625 numbers."""
    state = capture_rng()
    version, numbers, gauss = state["python"]
    state["python"] = (version, tree.Sequence(tree.Tag.TUPLE, list(numbers)), gauss)
    return flattener.node(state, path)


def restore_rng(state: dict[str, Any]) -> None:
    """Puts back what capture_rng returned; CUDA states only where as many devices are there, else
    with a PccheckWarning."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved = len(state.get("cuda", ()))
    known = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved > known:
        warnings.warn(
            f"PCcheck: the checkpoint has random generators of {saved} GPUs, and this process has "
            f"{known}. Those of GPUs are not restored, so training draws other numbers there; "
            "those of Python, NumPy and the CPU are. For the same numbers use as many GPUs",
            PccheckWarning, stacklevel=2,
        )  # fmt: skip
    elif saved:
        torch.cuda.set_rng_state_all(state["cuda"])
