"""What `checkpoint()` hands over: built once for attached state, checked at every checkpoint.

The check builds nothing. It compares the tensors (by identity), their addresses, sizes, strides and
dtypes; any difference means a new plan. It costs about 0.2 us per tensor. Modules and optimizers
that customise their state dict take the slow path, which calls it every time.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pccheck.warn import in_words
from pccheck_wire import tree
from pccheck_wire.errors import PccheckError, UnsupportedStateError

from .changes import Reading, Tensors
from .devices import HOST
from .extents import IN_PLACE, DevicePart, Layout, Shape, View, aligned, lay_out
from .flatten import Flattener
from .gating import Gating
from .rng import captured_node
from .shards import ALONE, DividingRanks
from .watch import GeometryWatch, ModuleWatch, OptimizerWatch

#: The name under which `attach(rng=True)` keeps the generators' states.
RNG = "rng"
#: With fewer frozen bytes, checkpoints are written whole.
FROZEN_MIN = 8 << 20


@dataclass(slots=True)
class Snapshot:
    """Everything the native client needs for one checkpoint; `owners` keep the memory alive.

    `ranges` of host memory are read later, `volatile` ones at once; `device` lies in front of both.
    `wait`: when checkpoint() returns: once the snapshot is "copied", its source is "read", or ""
    for at once. `in_place`: the tensors that are not copied at once; `reading` detects changes of
    them. `at_once`: those that are, and `copying` detects changes of them.
    """

    ranges: bytes
    volatile: bytes
    tree: bytes
    tree_offset: int
    owners: list[object]
    device: DevicePart | None = None
    in_place: list[Tensors] = field(default_factory=list)
    at_once: list[Tensors] = field(default_factory=list)
    wait: str = ""
    reading: Reading | None = None
    copying: Reading | None = None
    frozen: int = 0  # bytes of parameters that do not train
    division: int = 0  # see Layout

    @property
    def worth_a_base(self) -> int:
        """`frozen`, or 0 when writing these bytes again costs less than the slot of an earlier
        checkpoint that is kept for them: for a small part of the payload, and for what a disk
        writes in some hundredths of a second."""
        large = self.frozen >= FROZEN_MIN and 4 * self.frozen >= self.payload_bytes
        return self.frozen if large else 0

    @property
    def offered(self) -> int:
        """The first bytes of the payload that the core reads in place before it copies them."""
        return self.worth_a_base if self.device is None else 0

    @property
    def payload_bytes(self) -> int:
        return self.tree_offset + len(self.tree)


def plan_state(
    state: object,
    gating: Gating,
    step: int,
    metadata: tree.Node,
    shape: Shape = IN_PLACE,
    about: tree.Node = None,
) -> Snapshot:
    """A snapshot of a state that was given to `checkpoint(state)`."""
    flattener = Flattener()
    root = flattener.node(state, "")
    gating.mark(flattener.views)
    # It is not known which of these tensors are equal on all ranks: each rank stores its own.
    layout = lay_out(flattener.views, shape._replace(world_size=0))
    described = tree.Tree(step, metadata, False, layout.extents, root, about)
    return _snapshot(layout, tree.encode(described), flattener.views)


def _snapshot(layout: Layout, encoded: bytes, views: list[View]) -> Snapshot:
    return Snapshot(
        *layout.packed(inline=layout.inline), encoded, aligned(layout.end), layout.owners,
        layout.device, *_split(views, inline=layout.inline), frozen=layout.frozen,
        division=layout.division,
    )  # fmt: skip


def _split(views: list[View], *, inline: bool) -> tuple[list[Tensors], list[Tensors]]:
    """Those of the views, laid out already, that are read later, and those that are copied at
    once: what is volatile, and with `inline` all host memory."""
    later: list[View] = []
    now: list[View] = []
    for view in views:
        (now if view.volatile or (inline and view.device == HOST) else later).append(view)
    return [Tensors(later)] if later else [], [Tensors(now)] if now else []


def _dynamic_node(name: str, thing: Any, flattener: Flattener) -> tree.Node:
    """The node of something attached whose state dict is called every time."""
    if name == RNG and thing is True:
        return captured_node()
    return flattener.node(_state_of(name, thing), name)


def _state_of(name: str, thing: Any) -> object:
    """Raises UnsupportedStateError, or the error of an integration that refuses this moment."""
    try:
        return thing.state_dict()
    except PccheckError:
        raise
    except Exception as error:  # the user's code must not end training
        raise UnsupportedStateError(
            f"{name}: its state_dict() fails: {in_words(error)}",
            hint="correct that state_dict(); until then checkpoints fail",
        ) from error


class AttachedPlan:
    """The plan for everything that was attached, under its names. Calling thread only."""

    def __init__(
        self,
        attached: Mapping[str, Any],
        *,
        mode: str,
        shape: Shape = IN_PLACE,
        loose: frozenset[str] = frozenset(),
        about: Callable[[], tree.Node] = lambda: None,
        row: DividingRanks = ALONE,
    ) -> None:
        """`about` is called again for each plan."""
        self._attached = dict(attached)
        self._about = about
        self._row = row
        self.mode, self.shape, self.loose = mode, shape, loose  #: see Gating
        self._fast: _FastPlan | None = None
        self.rebuilt = 0  #: how often the plan was made

    def snapshot(self, step: int, metadata: tree.Node) -> Snapshot:
        """The state as it is now. Raises UnsupportedStateError by path."""
        if self._fast is None or not self._fast.holds():
            self._fast = None  # releases its tensors
            self.rebuilt += 1
            if all(map(_is_plain, self._attached.values())):
                self._fast = _FastPlan(
                    self._attached, self._gating(), self.shape, self._about(), self._row
                )
        if self._fast is not None and (made := self._fast.snapshot(step, metadata)):
            return made
        return self._slow(step, metadata)

    def _gating(self) -> Gating:
        return Gating(self._attached, self.mode, self.loose)

    def _slow(self, step: int, metadata: tree.Node) -> Snapshot:
        flattener = Flattener(self._row)
        gating = self._gating()
        items: list[tuple[tree.Node, tree.Node]] = []
        for name, thing in self._attached.items():
            first = len(flattener.views)
            items.append((name, _dynamic_node(name, thing, flattener)))
            own = isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
            gating.mark(flattener.views[first:], promised=own)
        root = tree.Mapping(tree.Tag.DICT, items)
        layout = lay_out(flattener.views, self.shape)
        described = tree.Tree(step, metadata, True, layout.extents, root, self._about())
        return _snapshot(layout, tree.encode(described), flattener.views)


def _is_plain(thing: Any) -> bool:
    if isinstance(thing, torch.nn.Module):
        return ModuleWatch.suits(thing)
    if isinstance(thing, torch.optim.Optimizer):
        return OptimizerWatch.suits(thing)
    return True


class _FastPlan:
    """Static tensors of plain modules and optimizers, their part of the tree encoded already."""

    def __init__(
        self,
        attached: dict[str, Any],
        gating: Gating,
        shape: Shape,
        about: tree.Node,
        row: DividingRanks,
    ) -> None:
        self._row = row
        flattener = Flattener(row)
        self._about = tree.encode_node(about)
        self._attached = attached
        self._optimizers: dict[str, OptimizerWatch] = {}
        modules: list[ModuleWatch] = []
        static: dict[str, tree.Node] = {}
        for name, thing in attached.items():
            if isinstance(thing, torch.nn.Module):
                static[name] = flattener.node(_state_of(name, thing), name)
                modules.append(ModuleWatch(thing))
            elif isinstance(thing, torch.optim.Optimizer):
                self._optimizers[name] = OptimizerWatch(thing, flattener, name)
        gating.mark(flattener.views)
        layout = lay_out(flattener.views, shape)
        # Extents are known: what is static can be encoded.
        self._static = {name: tree.encode_node(node) for name, node in static.items()}
        self._gating = gating
        watches: list[ModuleWatch | OptimizerWatch] = [*modules, *self._optimizers.values()]
        geometry = GeometryWatch([t for watch in watches for t in watch.tensors])
        self._watches = (*watches, geometry, gating)  # identity first: geometry is of the same
        self._keep(layout, flattener.views, sharded=flattener.sharded)

    def _keep(self, layout: Layout, views: list[View], *, sharded: bool) -> None:
        self._made = _snapshot(layout, b"", views)  # without the tree
        self._end = layout.end
        self._extent_count = len(layout.extents)
        self._extents = b"".join(map(tree.Extent.packed, layout.extents))
        self._version = tree.version_for(
            shared=any(extent.owner >= 0 for extent in layout.extents), sharded=sharded
        )
        spans = sorted((view.address, view.address + view.nbytes) for view in views)
        self._starts = [start for start, _ in spans]
        self._ends: list[int] = []
        for _, end in spans:  # running maximum: the farthest end of all that start before
            self._ends.append(max(end, self._ends[-1]) if self._ends else end)

    def holds(self) -> bool:
        """Whether all is where it was."""
        return all(watch.holds() for watch in self._watches)

    def snapshot(self, step: int, metadata: tree.Node) -> Snapshot | None:
        """None when other state is on a GPU, whose section is fixed, or shares memory with this."""
        flattener = Flattener(self._row)
        nodes = {
            name: _dynamic_node(name, thing, flattener)
            for name, thing in self._attached.items()
            if name not in self._static and name not in self._optimizers
        }
        for watch in self._optimizers.values():
            watch.take_groups(flattener)
        was, extents, end = self._made, self._extents, self._end
        made = Snapshot(
            was.ranges, was.volatile, b"", 0, was.owners, was.device, was.in_place, was.at_once,
            frozen=was.frozen, division=was.division,
        )  # fmt: skip
        if flattener.views:
            if any(view.device != HOST or self._overlaps(view) for view in flattener.views):
                return None
            self._gating.mark(flattener.views, promised=False)
            layout = lay_out(flattener.views, start=self._end, first_extent=self._extent_count)
            later, now = layout.packed(inline=layout.is_small)
            made.ranges, made.volatile = made.ranges + later, made.volatile + now
            read, copied = _split(flattener.views, inline=layout.is_small)
            made.in_place, made.at_once = made.in_place + read, made.at_once + copied
            made.owners = [made.owners, layout.owners]
            extents += b"".join(map(tree.Extent.packed, layout.extents))
            end = layout.end
        encoded = self._static | {name: tree.encode_node(node) for name, node in nodes.items()}
        encoded |= {name: watch.encoded() for name, watch in self._optimizers.items()}
        root = tree.encode_dict([(name, encoded[name]) for name in self._attached])
        version = max(self._version, tree.version_for(shared=False, sharded=flattener.sharded))
        made.tree_offset = aligned(end)
        made.tree = tree.assemble(
            step, metadata, True, extents, root, version=version, about=self._about
        )
        return made

    def _overlaps(self, view: View) -> bool:
        before = bisect.bisect_left(self._starts, view.address + view.nbytes)
        return before > 0 and self._ends[before - 1] > view.address
