"""Warns of calls that are allowed, and that a script probably does not mean. The client does not
decide by itself: only the script knows whether the other ranks save at all, and what trains."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from .restoring.loaders import stateless_sampler
from .saving.planner import Planner
from .state.attaching import is_replicated
from .state.mapped import written_elsewhere
from .warn import Warner


class Advice:
    """Of one client; each warning comes once."""

    def __init__(self, planner: Planner, warner: Warner, *, copies: int) -> None:
        """`copies`: how many ranks store a copy of a model that all of them have."""
        self._planner = planner
        self._warner = warner
        self._copies = copies

    def attached(self, things: Mapping[str, object]) -> None:
        """These were attached: may warn of copies, of a loader that does not resume exactly, and of
        memory that other processes may write to."""
        if self._copies > 1 and is_replicated(things):
            self._warner.once(
                "ddp",
                f"the model is in DistributedDataParallel, and each of the {self._copies} ranks "
                "stores a copy of the model. To store one copy, pass "
                "PCcheckClient(replicated=True) on every rank. If only rank 0 saves, pass "
                "PCcheckClient(solo=True) there",
            )
        for name, thing in things.items():
            if sampler := stateless_sampler(thing):
                self._warner.once(
                    "sampler",
                    f"attach({name}=...): {sampler} has no state, so a run that resumes in the "
                    "middle of an epoch draws another order for the rest of that epoch. Use "
                    "shuffle=True, or a sampler whose order follows from the epoch "
                    "(docs/python.md, recipes)",
                )
        attached = self._planner.attached
        if path := written_elsewhere({name: attached[name] for name in things}):
            self._warner.once(
                "shared",
                f"the memory of {path} is shared, or a mapped file. If other processes write to "
                "this memory, a checkpoint that is read meanwhile mixes two states, and nothing "
                "detects that: torch counts the changes of this process only. In that case hold "
                "the lock of the writers from checkpoint() until handle.wait_copied() returns",
            )

    def calling(self) -> None:
        """`checkpoint()` is called: may warn that another thread trains."""
        trainer = self._planner.hooks.trained_by()
        if trainer:
            here = threading.current_thread().name
            self._warner.once(
                "thread",
                f"checkpoint() was called in thread {here!r}, while thread {trainer!r} trains: a "
                "call in the middle of a step is skipped, and a change of the state during the "
                f"call fails the checkpoint. Let thread {here!r} set a flag, and call "
                f"checkpoint() in thread {trainer!r} between two steps. A lock that both threads "
                "hold, around checkpoint() and around each step, does the same",
            )

    def saving(self, step: int) -> None:
        """What is attached is about to be saved: may warn that it is not what trains."""
        self._left_out()
        self._idle(step)

    def _left_out(self) -> None:
        left_out = self._planner.left_out
        inside = "Keep it in optimizer.state[parameter], or let the state_dict() and "
        inside += "load_state_dict() of the optimizer include it"
        inner, attribute = left_out.optimizer(), left_out.attribute()
        for kind, path, advice in (
            ("optimizer", inner, f"Attach {inner} itself"),
            ("attribute", attribute, inside),
        ):
            if path:
                self._warner.once(
                    f"left out {kind}",
                    f"the state of {path} is not saved: the state_dict() of the attached optimizer "
                    f"leaves it out, and a resumed run begins without it. {advice}",
                )
        if name := left_out.weights():
            self._warner.once(
                "left out weights",
                f"none of the parameters that the attached {name} trains is saved: nothing that is "
                f"attached has them. A resumed run would use the state of {name} with other "
                f"parameters. Attach the model that {name} trains. If the model or {name} was made "
                f"again, attach both again: client.attach(model=model, {name}={name})",
            )

    def _idle(self, step: int) -> None:
        """Replays of a CUDA graph run no hooks: then nothing is known."""
        hooks = self._planner.hooks
        since = hooks.progress.idle_since(step)
        if since is not None and hooks.trusted:
            self._warner.once(
                "idle",
                f"the attached optimizer has made no step since step {since}, and checkpoints hold "
                "that state. If you made a new model or optimizer, attach it again: "
                "client.attach(model=..., optimizer=...)",
            )
