"""Which parameters of attached modules require gradients: no state dict has this, so it is recorded
with each checkpoint, beside the state. It is not restored, since the script decides it; a run in
which it differs gets a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pccheck_wire import tree

_KEY = "requires_grad"


def record(attached: Mapping[str, Any]) -> tuple[tree.Node, tree.Node]:
    """An item for `about`: one bit for each parameter, in the order of their names."""
    found: dict[str, Any] = {}
    for name, thing in attached.items():
        if isinstance(thing, torch.nn.Module):
            flags = np.array([flag for _, flag in _flags(thing)], dtype=bool)
            items: dict[str, Any] = {"count": len(flags), "bits": np.packbits(flags).tobytes()}
            found[name] = tree.Mapping(tree.Tag.DICT, [*items.items()])
    return _KEY, tree.Mapping(tree.Tag.DICT, [*found.items()])


def recorded(described: tree.Tree) -> dict[str, list[bool]]:
    """By the name of the module; nothing for checkpoints that do not have it."""
    about = tree.plain(described.about)
    found = about.get(_KEY) if isinstance(about, dict) else None
    flags: dict[str, list[bool]] = {}
    for name, packed in found.items() if isinstance(found, dict) else ():
        count, bits = (packed.get("count"), packed.get("bits")) if type(packed) is dict else (0, 0)
        if type(count) is int and type(bits) is bytes and 0 <= count <= 8 * len(bits):
            unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count)
            flags[str(name)] = unpacked.astype(bool).tolist()
    return flags


def differing(module: torch.nn.Module, saved: list[bool]) -> dict[str, bool]:
    """Parameters that differ, with what was saved; none when the module has other parameters."""
    now = _flags(module)
    if len(now) != len(saved):
        return {}
    return {name: old for (name, flag), old in zip(now, saved, strict=True) if flag != old}


def _flags(module: torch.nn.Module) -> list[tuple[str, bool]]:
    named = module.named_parameters(remove_duplicate=False)
    return sorted((name, parameter.requires_grad) for name, parameter in named)
