"""The states of every generator that a training loop draws from."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from pccheck.warn import PccheckWarning
from pccheck_wire import tree
from pccheck_wire.errors import StateMismatchError


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


def capture_packed() -> dict[str, Any]:
    """What capture_rng returns, with the numbers of each generator as bytes: tensors would need
    extents of their own, made again for each checkpoint."""
    state = capture_rng()
    version, numbers, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    packed: dict[str, Any] = {
        "python": (version, struct.pack(f"<{len(numbers)}I", *numbers), gauss),
        "numpy": (name, keys.tobytes(), *rest),
        "torch": bytes(state["torch"].numpy()),
    }
    if "cuda" in state:
        packed["cuda"] = [bytes(one.numpy()) for one in state["cuda"]]
    return packed


def captured_node() -> tree.Node:
    """The node of what capture_packed returns."""
    tags: dict[type, tree.Tag] = {tuple: tree.Tag.TUPLE, list: tree.Tag.LIST}
    items: list[tuple[tree.Node, tree.Node]] = [
        (name, value if isinstance(value, bytes) else tree.Sequence(tags[type(value)], [*value]))
        for name, value in capture_packed().items()
    ]
    return tree.Mapping(tree.Tag.DICT, items)


def require_generators(names: Collection[Any], hint: str = "") -> None:
    """Raises StateMismatchError when the names of a state are not those of capture_rng."""
    missing = [name for name in ("python", "numpy", "torch") if name not in names]
    if missing:
        raise StateMismatchError(
            f"rng: there is no state of the generator of {', '.join(missing)}", hint=hint
        )


def restore_rng(state: dict[str, Any]) -> None:
    """Puts back what capture_rng returned, or what a checkpoint has under "rng", where the numbers
    are bytes; CUDA states only where as many devices are there, else with a PccheckWarning. Raises
    StateMismatchError, and changes nothing, when one of the other generators has no state."""
    require_generators(state)
    version, numbers, gauss = state["python"]
    if isinstance(numbers, bytes):
        numbers = struct.unpack(f"<{len(numbers) // 4}I", numbers)
    random.setstate((version, numbers, gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, _unpacked(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    saved = len(state.get("cuda", ()))
    known = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved > known:
        warnings.warn(
            f"PCcheck: the checkpoint has random generators of {saved} GPUs, and this process has "
            f"{known}. The generators of GPUs are not restored, so training draws other numbers "
            "there; the generators of Python, NumPy and the CPU are restored. For the same numbers "
            f"use {saved} GPUs",
            PccheckWarning, stacklevel=2,
        )  # fmt: skip
    elif saved:
        torch.cuda.set_rng_state_all(list(map(_tensor, state["cuda"])))


def _unpacked(numbers: Any, dtype: Any) -> Any:
    return np.frombuffer(numbers, dtype).copy() if isinstance(numbers, bytes) else numbers


def _tensor(state: bytes | torch.Tensor) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state
    return torch.from_numpy(_unpacked(state, np.uint8))  # as_tensor() would use the default device
