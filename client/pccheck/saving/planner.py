"""What is attached, what holds its updates back, and how the next snapshot is taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pccheck.garbage import no_collection
from pccheck.job import origin
from pccheck.options import Options
from pccheck.state import devices, gating, shards
from pccheck.state.attaching import ZeroOptions, checked, require_resumable
from pccheck.state.changes import LOST, Moved, Reading
from pccheck.state.extents import Shape
from pccheck.state.plan import RNG, AttachedPlan, Snapshot, plan_state
from pccheck.state.shards import DividingRanks
from pccheck.unsaved import trainable
from pccheck.unsaved.beside import Beside
from pccheck.unsaved.leftout import LeftOut
from pccheck.warn import in_words
from pccheck_wire import tree
from pccheck_wire.errors import PccheckError, UnsupportedStateError, UsageError

from .exposure import Retry
from .hooks import StepHooks


class Planner:
    """Makes snapshots of what is attached, or of a state that is given. Training thread only."""

    def __init__(
        self,
        options: Options,
        rank: int = 0,
        world_size: int = 1,
        *,
        replicated: bool = False,
        part: tuple[int, int, int] | None = None,
    ) -> None:
        """`replicated`: what is attached is the same on all ranks, and each saves a part of it:
        number, count and the job's rank with number 0 are in `part`, or are those of all ranks."""
        self.attached: dict[str, Any] = {}
        self.hooks = StepHooks()
        self.client = origin.name_client()  #: recorded with every checkpoint
        self.zero_options = ZeroOptions()
        self._unstaged = False  # the GPU has no memory for staging
        self._staging_retry: Retry | None = None  # None: never
        self._options = options
        self._parts = (part or (rank, world_size, 0)) if replicated else (0, 0, 0)
        _, count, first = self._parts if replicated else (0, world_size, 0)
        self._row = DividingRanks(world_size, first, count)
        self._plan: AttachedPlan | None = None
        self._unheld = False  # trained tensors were changed without the gate
        self._loose: frozenset[str] = frozenset()
        self.left_out = LeftOut()
        self.beside = Beside()

    def attach(self, things: Mapping[str, object], *, rng: bool) -> None:
        """Adds or replaces things by name. Raises UsageError, UnsupportedStateError."""
        self.attached.update(checked(things))
        self.zero_options.attach(things)
        if rng:
            self.attached[RNG] = True
        self.left_out.attach(self.attached)
        self.beside.attach(self.attached)
        self._plan = None
        self._unstaged = False

    def stepped(self) -> Iterable[object]:
        """What is attached, for the hooks of its steps. The step of a ZeRO optimizer also brings
        the parameters of the other ranks."""
        return (self.attached | self.zero_options.outer).values()

    @property
    def sharded(self) -> bool:
        """Whether DTensors are attached."""
        things = self.attached.values()
        modules = (m for thing in things for m in gating.modules_of(thing))
        optimizers = (thing for thing in things if isinstance(thing, torch.optim.Optimizer))
        groups = (group["params"] for one in optimizers for group in one.param_groups)
        held = itertools.chain((p for m in modules for p in m.parameters()), *groups)
        return any(map(shards.is_sharded, held))

    def gpus(self) -> set[int]:
        """Those that modules which are attached lie on."""
        modules = (m for m in self.attached.values() if isinstance(m, torch.nn.Module))
        return {devices.device_of(p) for m in modules for p in m.parameters()} - {devices.HOST}

    def stop_staging(self, *, for_good: bool) -> None:
        """From now on checkpoints return when all was read; without `for_good` for a while."""
        self._unstaged = True
        self._staging_retry = None if for_good else self._staging_retry or Retry()
        if self._staging_retry is not None:
            self._staging_retry.refused()

    def retry_staging(self) -> None:
        """Call it once per checkpoint."""
        if self._unstaged and self._staging_retry is not None and self._staging_retry.due():
            self._unstaged = False

    def forget(self) -> None:
        """Drops the plan: what is attached may have changed."""
        self._plan = None

    @property
    def wait(self) -> str:
        """When checkpoint() returns: "copied", when the source was "read", or "" for at once,
        because a gate holds the next update back."""
        if self._options.gate == "auto" and not self.hooks:
            return "copied"
        blocking = self._unstaged or self._unheld or self._options.snapshot == "blocking"
        return "read" if blocking else ""

    def moved(self, moved: Moved) -> None:
        """A tensor was changed without a gate: later calls wait until it was read. Any thread."""
        if moved.what == LOST:
            return  # it would be as lost then
        if moved.loose:
            self._loose |= {moved.loose}
        else:
            self._unheld = True

    def snapshot(
        self, chunk_bytes: int, state: Any, step: int, metadata: tree.Node,
        pushed: frozenset[int] = frozenset(), *, replica: bool = False,
    ) -> Snapshot:  # fmt: skip
        """A snapshot of `state`, or without one of what is attached; `pushed` and `replica` as in
        `Shape`. Raises UnsupportedStateError, and UsageError when nothing is attached."""
        wait = self.wait
        aside = self._options.snapshot == "device" and not wait
        shape = Shape(chunk_bytes, aside, *self._parts, pushed=pushed, replica=replica)
        try:
            with no_collection():
                return self._snapshot(shape, wait, state, step, metadata)
        except (PccheckError, OSError):
            raise
        except Exception as error:  # of an object that is unlike all that is known
            raise UnsupportedStateError(
                f"the state cannot be described: {in_words(error)}",
                hint="attach objects of torch, or objects with state_dict and load_state_dict",
            ) from error

    def _snapshot(
        self, shape: Shape, wait: str, state: Any, step: int, metadata: tree.Node
    ) -> Snapshot:
        mode = "sync" if wait else self._options.gate
        if state is not None:
            sorting = gating.Gating(self.attached, mode, self._loose)
            about = origin.node({}, self.client)
            made = plan_state(state, sorting, step, metadata, shape, about)
        else:
            made = self._of_attached(mode, shape, step, metadata)
        made.wait = wait
        if wait:  # nothing is copied at once: all is read while the call waits
            made.ranges, made.volatile = made.ranges + made.volatile, b""
            made.in_place, made.at_once = made.in_place + made.at_once, []
        made.reading = Reading(made.in_place) if made.in_place else None
        made.copying = Reading(made.at_once) if made.at_once else None
        return made

    def _about(self) -> tree.Node:
        made = origin.node(self.attached, self.client)
        made.items.append(trainable.record(self.attached))
        return made

    def _of_attached(self, mode: str, shape: Shape, step: int, metadata: tree.Node) -> Snapshot:
        if not self.attached:
            raise UsageError(
                "checkpoint() has nothing to save",
                hint="call attach(model=..., optimizer=...) first, or pass a state",
            )
        self.zero_options.inward()
        wanted = mode, shape, self._loose
        if self._plan is None or (self._plan.mode, self._plan.shape, self._plan.loose) != wanted:
            for name, thing in self.attached.items():
                if isinstance(thing, torch.nn.Module):
                    require_resumable(name, thing)
            self._plan = AttachedPlan(
                self.attached, mode=mode, shape=shape, loose=self._loose, about=self._about,
                row=self._row,
            )  # fmt: skip
        try:
            return self._plan.snapshot(step, metadata)
        except BaseException:  # Ctrl-C, too: the plan may be half updated
            self._plan = None
            raise
