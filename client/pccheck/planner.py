"""What is attached, what holds its updates back, and hence how the next snapshot is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError, UsageError

from .arguments import Options
from .extents import Shape
from .gating import Gating
from .hooks import StepHooks
from .plan import RNG, AttachedPlan, Snapshot, plan_state


class Planner:
    """Makes snapshots of what is attached, or of a state that is given. Training thread only."""

    def __init__(self, options: Options, rank: int = 0, world_size: int = 0) -> None:
        """With a `world_size` what is attached is the same on so many ranks, and each saves a part
        of it."""
        self.attached: dict[str, Any] = {}
        self.hooks = StepHooks()
        self.plain = False  #: nothing is staged on a GPU: there is no room
        self._options = options
        self._parts = (rank, world_size)
        self._plan: AttachedPlan | None = None

    def attach(self, things: Mapping[str, Any], *, rng: bool) -> None:
        """Adds things, or puts them in the place of others. Raises UsageError."""
        for name, thing in things.items():
            if name == RNG or not all(
                callable(getattr(thing, method, None))
                for method in ("state_dict", "load_state_dict")
            ):
                raise UsageError(
                    f"attach({name}=...): a {type(thing).__name__} has no state_dict and "
                    "load_state_dict", hint="pass plain values to checkpoint(state) instead",
                )  # fmt: skip
        self.attached.update(things)
        if rng:
            self.attached[RNG] = True
        self._plan = None
        self.plain = False

    def forget(self) -> None:
        """The plan may be of another state than is attached now, or is not needed any more."""
        self._plan = None

    @property
    def wait(self) -> str:
        """What checkpoint() returns after: "copied", the source "read", or "" for at once, because
        a gate holds the next update back."""
        if self._options.gate == "auto" and not self.hooks:
            return "copied"
        return "read" if self.plain or self._options.snapshot == "blocking" else ""

    def snapshot(self, chunk_bytes: int, state: Any, step: int, metadata: tree.Node) -> Snapshot:
        """Of `state`, or when it is None of what is attached. Raises UnsupportedStateError."""
        wait = self.wait
        mode = "sync" if wait else self._options.gate
        shape = Shape(chunk_bytes, self._options.snapshot == "device" and not wait, *self._parts)
        if state is not None:
            gating = Gating(self.attached.values(), mode)
            made = plan_state(state, gating, step, metadata, shape)
        else:
            made = self._planned(mode, shape, step, metadata)
        made.wait = wait
        return made

    def _planned(self, mode: str, shape: Shape, step: int, metadata: tree.Node) -> Snapshot:
        try:
            return self._of_attached(mode, shape).snapshot(step, metadata)
        except BaseException:  # Ctrl-C, too: a plan that is half new is of no state at all
            self._plan = None
            raise

    def _of_attached(self, mode: str, shape: Shape) -> AttachedPlan:
        if not self.attached:
            raise UnsupportedStateError(
                "checkpoint() has nothing to save",
                hint="call attach(model=..., optimizer=...) first, or checkpoint(state)",
            )
        if self._plan is None or (self._plan.mode, self._plan.shape) != (mode, shape):
            self._plan = AttachedPlan(self.attached, mode=mode, shape=shape)
        return self._plan
