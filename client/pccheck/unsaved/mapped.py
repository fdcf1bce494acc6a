"""Memory that other processes may write to: shared memory, and files that are mapped as shared.

The kernel's list of mappings tells these from private ones: `Tensor.is_shared()` is also true of a
file that `torch.load(mmap=True)` has mapped, whose changes stay in this process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pccheck.state import devices
from pccheck.state.attaching import Values
from pccheck.state.devices import HOST
from pccheck.state.flatten import Flattener
from pccheck.state.gating import modules_of, storage_of
from pccheck_wire import tree

_MAPS = Path("/proc/self/maps")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ..[-x]s \S+ \S+ \S+ +(/.*)")


def written_elsewhere(attached: Mapping[str, Any]) -> str:
    """The first tensor or array in memory that others may write to; "" when none is seen."""
    spans = list(_shared_spans())
    if not spans:
        return ""
    found = itertools.chain.from_iterable(_placed(*item) for item in attached.items())
    return next((path for path, at in found if any(start <= at < end for start, end in spans)), "")


def _shared_spans() -> Iterator[tuple[int, int]]:
    """Without what drivers map for pinned memory of this process."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        match = _LINE.match(line)
        if match and (not match[3].startswith("/dev/") or match[3].startswith("/dev/shm/")):
            yield int(match[1], 16), int(match[2], 16)


def _placed(name: str, thing: Any) -> Iterator[tuple[str, int]]:
    """Paths and addresses in host memory. Calls no state_dict(): some gather all ranks."""
    if isinstance(thing, Values):
        flattener = Flattener()
        flattener.node(thing.values, name)
        yield from ((one.path, one.address) for one in flattener.views if one.device == HOST)
    yield from (
        (tree.join(name, path), storage_of(tensor))
        for path, tensor in _tensors(thing)
        if devices.device_of(tensor) == HOST
    )


def _tensors(thing: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a module, of one inside a wrapper, or of an optimizer's state, by their paths."""
    for module in modules_of(thing):
        yield from itertools.chain(module.named_parameters(), module.named_buffers())
    if isinstance(thing, torch.optim.Optimizer):
        for number, entry in enumerate(thing.state.values()):
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield f"state.{number}.{key}", value
