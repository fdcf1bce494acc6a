"""Warns of calls that are allowed, and that a script probably does not mean. The client does not
decide by itself: only the script knows whether the other ranks save at all, and what trains."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from .restoring.loaders import stateless_sampler
from .saving.planner import Planner
from .state.attaching import is_gathered, require_storable_state
from .state.plan import RNG
from .unsaved import trainable
from .unsaved.mapped import written_elsewhere
from .warn import Warner

_Optimizer = torch.optim.Optimizer


class Advice:
    """Of one client; each warning comes once."""

    def __init__(self, planner: Planner, warner: Warner, *, copies: int, gathers: bool) -> None:
        """`copies`: how many ranks store a copy of a model that all of them have. `gathers`:
        whether there are other ranks, and this one warns for all of them."""
        self._planner, self._warner = planner, warner
        self._copies, self._gathers = copies, gathers
        self._unseen: dict[int, str] = {}  # optimizers whose state was not looked at yet
        self._restored_step = 0
        self._trainable: dict[str, list[bool]] = {}  # of modules that were not compared yet
        self._unlike: dict[str, dict[str, bool]] = {}  # parameters that differed from it, by module

    def attached(self, things: Mapping[str, object]) -> None:
        """These were attached: may warn of copies, of a loader that does not resume exactly, and of
        memory that other processes may write to."""
        attached = self._planner.attached
        optimizers = {n: one for n, one in attached.items() if isinstance(one, _Optimizer)}
        # Of optimizers alone the steps may be all that counts, beside checkpoint(state).
        alone = not attached.keys() - optimizers.keys() - {RNG}
        self._unseen = {} if alone else {id(one): name for name, one in optimizers.items()}
        self._compare()
        plain_ddp = torch.nn.parallel.DistributedDataParallel
        if self._copies > 1 and any(isinstance(one, plain_ddp) for one in things.values()):
            self._warner.once(
                "ddp",
                f"the model is in DistributedDataParallel, and each of the {self._copies} ranks "
                "stores a copy of the model. To store one copy, pass "
                "PCcheckClient(replicated=True) on every rank. If only rank 0 saves, pass "
                "PCcheckClient(solo=True) there",
            )
        if self._gathers and is_gathered(things):
            self._warner.once(
                "fsdp1",
                "the model is in FullyShardedDataParallel: each checkpoint() gathers the whole "
                "model from all ranks while training waits, and each rank stores all of it. Every "
                "rank must call checkpoint() after the same steps. With fully_shard() (FSDP2) "
                "nothing is gathered, and each rank stores its own part",
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

    def restored(self, step: int, flags: dict[str, list[bool]]) -> None:
        """The run continues from that step, in which these parameters required gradients."""
        self._restored_step, self._trainable, self._unlike = step, dict(flags), {}
        self._compare()

    def _compare(self) -> None:
        """A script may change them next, as in the run before: the next checkpoint warns."""
        for name, thing in self._planner.attached.items():
            if isinstance(thing, torch.nn.Module) and name in self._trainable:
                saved = self._trainable.pop(name)
                self._unlike |= {name: trainable.differing(thing, saved)}

    def stepped(self, optimizer: _Optimizer) -> None:
        """An attached optimizer made a step. Raises UnsupportedStateError for its new state."""
        if id(optimizer) in self._unseen and optimizer.state:
            require_storable_state(self._unseen.pop(id(optimizer)), optimizer)

    def saving(self, step: int) -> None:
        """What is attached is about to be saved: may warn that it is not what trains."""
        self._left_out()
        self._beside()
        self._idle(step)
        self._changed()

    def _changed(self) -> None:
        """At the first checkpoint after a restore, which comes in the same place of the loop."""
        unlike, self._unlike = self._unlike, {}
        for name, found in unlike.items():
            thing = self._planner.attached.get(name)
            if not isinstance(thing, torch.nn.Module):
                continue
            now = dict(thing.named_parameters(remove_duplicate=False))
            paths = [p for p, old in found.items() if p in now and now[p].requires_grad != old]
            if not paths:
                continue
            old, new = ("trained", "frozen") if found[paths[0]] else ("frozen", "trained")
            more = f" ({len(paths)} parameters differ)" if len(paths) > 1 else ""
            self._warner.once(
                "trainable",
                f"{name}.{paths[0]} was {old} in the run that saved step {self._restored_step}, "
                f"and is {new} now{more}: restore() does not set requires_grad. Unless this is "
                "meant, freeze and unfreeze the same parameters before training continues",
            )

    def _left_out(self) -> None:
        left_out = self._planner.left_out
        inside = "Keep it in optimizer.state[parameter], or let the state_dict() and "
        inside += "load_state_dict() of the optimizer include it"
        inner, attribute = left_out.optimizer(), left_out.attribute()
        for kind, path, advice in (
            ("optimizer", inner, f"Attach {inner} itself, under a name of its own"),
            ("attribute", attribute, inside),
        ):
            if path:
                self._warner.once(
                    f"left out {kind}",
                    f"the state of {path} is not saved: the state_dict() of the attached optimizer "
                    f"leaves it out, and a resumed run begins without it. {advice}",
                )
        self._lost_weights(*left_out.weights())
        if paths := left_out.tensors():
            more = f" (and {len(paths) - 1} more tensors)" if len(paths) > 1 else ""
            self._warner.once(
                "left out tensors",
                f"{paths[0]}{more} has changed since attach(), and is not saved: state_dict() "
                "leaves out what a module keeps in a plain attribute, a list or a dict. A resumed "
                "run begins with its first value. Use register_buffer(), nn.Parameter, "
                "nn.ModuleList, nn.ParameterList or the like, or attach a dict that has it",
            )

    def _beside(self) -> None:
        kind, module = self._planner.beside.optimizer()
        if kind:
            self._warner.once(
                "optimizer beside",
                f"the state of an optimizer ({kind}) that trains the attached {module} is not "
                "saved: the optimizer is not attached. A resumed run begins without its state "
                f"(moments, step counts). Attach it: client.attach({module}={module}, "
                "optimizer=optimizer)",
            )
        if name := self._planner.beside.scheduler():
            self._warner.once(
                "scheduler beside",
                f"the learning rate scheduler of the attached {name} is not saved: the scheduler "
                "is not attached. A resumed run begins its schedule again, unless the script sets "
                "its place. Attach it: client.attach(scheduler=scheduler)",
            )

    def _lost_weights(self, name: str, lost: int, trained: int) -> None:
        """Of `trained` parameters of the optimizer, so many are not saved."""
        again = (
            f"If the model or {name} was made again, attach both again: "
            f"client.attach(model=model, {name}={name})"
        )
        if name and lost == trained:
            self._warner.once(
                "left out weights",
                f"none of the parameters that the attached {name} trains is saved: nothing that is "
                f"attached has them. A resumed run would use the state of {name} with other "
                f"parameters. Attach the model that {name} trains. {again}",
            )
        elif name:
            self._warner.once(
                "left out weights",
                f"{lost} of the {trained} parameters that the attached {name} trains are not "
                "saved: nothing that is attached has them, and a resumed run begins with other "
                f"values. Attach each module that {name} trains (a second network, a loss with "
                f"weights), under a name of its own. {again}",
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
