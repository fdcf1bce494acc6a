"""Hugging Face's Trainer: a callback that saves, and what `train()` resumes from.

Trainer reads its counters from a directory. All else is restored in place, after Trainer has made
it.

Where a checkpoint is taken, and what may still run after it. Trainer calls the callbacks of an
event one after another, so a place in their list is not enough: `_surrounded` calls PCcheckCallback
once more when all callbacks have had the event, in whatever order they were added.

- on_step_begin, after all callbacks. Before it, of the step before: on_optimizer_step, on_step_end,
  on_log, on_evaluate, on_save, on_epoch_end; and of this one: on_epoch_begin, on_step_begin. After
  it nothing of the user's until forward: Trainer puts the model and a schedule-free optimizer into
  their modes of training, which may change weights, and the callback has done that before. Gradient
  accumulation: Trainer has the event once for an update, before its first micro-batch;
  on_substep_end comes later, and saves nothing.
- on_train_end, after all callbacks. After it: what the script does when train() has returned.

A resumed run has on_epoch_begin and on_step_begin a second time. So they get the random numbers
that they had before, and afterwards the state is restored once more. Callbacks that act between
on_step_begin and the update (on_substep_end, on_pre_optimizer_step) may change weights: the gate
comes before them.
"""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import has_length

from pccheck.client import PCcheckClient
from pccheck.state.rng import capture_packed, capture_rng, restore_rng
from pccheck.warn import warn
from pccheck_wire.errors import DamagedError, UnsupportedStateError, UsageError

from .huggingface_adapters import Adapters
from .huggingface_counters import Counters

#: Between the restore and the place where the checkpoint was taken.
_AGAIN = ("on_train_begin", "on_epoch_begin", "on_step_begin")
#: Between that place and the update.
_DURING = ("on_substep_end", "on_pre_optimizer_step")


class PCcheckCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint with PCcheck every `every_n_steps` optimizer steps, and at the end.

    A checkpoint is taken when the next step begins: what evaluation and all other callbacks did up
    to there (metrics, weights, random numbers) is part of it, in whatever order they run.

    Args:
        every_n_steps: optimizer steps from one checkpoint to the next, counted by `global_step`.
        client: a PCcheckClient of this job, which the caller closes. Without `client`
            the callback makes a client from `job` and `options`, and closes that client when
            training ends. With several ranks that client has replicated=True, unless the model is
            sharded (FSDP).

    Raises UsageError. When training begins: UsageError with DeepSpeed, whose state it cannot save,
    and as PCcheckClient.attach does. A model that attach() refuses is attached without its base if
    PEFT has put adapters into it.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        job: str | None = None,
        *,
        client: PCcheckClient | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise UsageError(
                f"every_n_steps={every_n_steps!r} is not a number of steps",
                hint="use PCcheckCallback(every_n_steps=10): a checkpoint at every tenth step",
            )
        if client is not None and (job is not None or options):
            raise UsageError(
                "PCcheckCallback(client=...) takes neither a job nor options of a client",
                hint="give them to that PCcheckClient",
            )
        self.every_n_steps = every_n_steps
        self._options = options | {"job": job}
        self._begin(client)

    def _begin(self, client: PCcheckClient | None) -> None:
        self._given = client
        self._client = client
        self._counters = Counters()
        self._model: Adapters | None = None
        self._resumption: _Resumption | None = None
        self._generators: dict[str, Any] | None = None  # of the checkpoint that is resumed
        self._last = 0  # the newest step that needs no checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """A copy, of a trainer for example, makes a client of its own for the same job."""
        own = ("_given", "_client", "_counters", "_resumption", "_generators", "_last")
        kept = {name: value for name, value in vars(self).items() if name not in own}
        job = {"job": self._given.place[0]} if self._given is not None else {}
        return kept | {"_options": self._options | job}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._begin(None)

    def _resume(self, trainer: Any, step: int | None) -> str | None:
        self._counters.trainer = weakref.ref(trainer)
        self._resumption = None
        if self._options.get("fresh"):
            return None
        client = self._open(trainer.args)
        client.attach(trainer=self._counters)
        found = client.restore(step, only=["trainer"])
        if not found:
            return None
        place = self._counters.place_for(trainer.args)
        self._resumption = _Resumption(found.step, step, self._counters.text, place)
        self._resumption.pass_by(trainer)
        self._resumption.begin_at_place(trainer)
        return self._resumption.path

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
        lr_scheduler: Any = None, train_dataloader: Any = None, **_more: Any,
    ) -> None:  # fmt: skip
        self._counters.state = state
        client = self._open(args)
        self._model = Adapters(client, model, optimizer)
        client.attach(optimizer=optimizer, scheduler=lr_scheduler, rng=True)
        client.attach(trainer=self._counters)
        scaler = getattr(optimizer, "scaler", None)  # of an AcceleratedOptimizer
        if scaler is not None:
            client.attach(scaler=scaler)
        self._last, self._generators = state.global_step, None
        place = _by_trainer(args, state, train_dataloader)
        resumption = self._resumption
        if resumption is not None and state.global_step == resumption.step:
            _into_training(model, optimizer)
            done = client.restore(resumption.asked)
            resumption.require(done.step)
            place = resumption.place or place
            self._generators = capture_rng()
            if self._counters.rank != args.process_index:  # this rank is new
                noted = self._counters.generators
                self._counters.generators = dict.fromkeys(noted, self._generators)
        elif resumption is not None:
            warn(
                f"training begins at step {state.global_step}, although pccheck_resume() found a "
                f"checkpoint of step {resumption.step}: the new checkpoints will replace it. To "
                "continue from it: train(resume_from_checkpoint=pccheck_resume(trainer))"
            )
        elif state.global_step:  # from a checkpoint of Trainer's own
            client.adopt()
        self._counters.rank = args.process_index
        self._counters.enter(args, place)

    def _before(self, event: str, args: Any, state: Any, handler: Any) -> None:
        """Before the first callback has an event."""
        if event == "on_epoch_begin":
            if self._counters.begin_pass():  # the resumed pass had no rows left
                self._leave_resumed()
            self._at("before on_epoch_begin")
        elif event == "on_step_begin" and (self._is_due(state) or self._generators is not None):
            self._at("before on_step_begin")
        elif event in _DURING and self._client is not None and _act(handler.callbacks, event):
            self._client.gate()

    def _after(self, event: str, args: Any, state: Any, control: Any, handler: Any) -> None:
        """After the last callback had an event."""
        if event == "on_epoch_begin":
            self._at("on_epoch_begin")  # samplers may draw the order of the data from them
        elif event == "on_step_begin" and self._generators is not None:
            _into_training(handler.model, handler.optimizer)
            assert self._client is not None and self._resumption is not None
            ran = args.eval_on_start or _act(handler.callbacks, *_AGAIN)
            if ran and not self._client.closed:  # callbacks have changed the state once more
                only = "model", "optimizer", "scheduler"
                self._client.restore(self._resumption.step, only=only)
            self._leave_resumed()
        elif event == "on_step_begin" and self._is_due(state):
            _into_training(handler.model, handler.optimizer)
            self._save(state)
        elif event == "on_train_end":
            self._counters.end(whole=control.should_epoch_stop or float(state.epoch or 0) % 1 == 0)
            self._end(args, state)

    def _at(self, moment: str) -> None:
        """Notes the generators for the next checkpoint. After a resume it sets them as they were at
        this moment, until the checkpoint was taken."""
        noted = self._counters.generators
        if self._generators is not None and moment in noted:
            restore_rng(noted[moment])
            return
        self._leave_resumed()
        noted[moment] = capture_packed()

    def _leave_resumed(self) -> None:
        """Where the checkpoint was taken: from here on all is as in the run before."""
        if self._generators is not None:
            restore_rng(self._generators)
            self._generators = None

    def _is_due(self, state: Any) -> bool:
        step = state.global_step
        return bool(step % self.every_n_steps == 0 and step != self._last)

    def _end(self, args: Any, state: Any) -> None:
        """Saves the last step, unless Trainer has loaded the weights of the best one."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self._save(state)
        if self._client is not None and self._given is None:
            self._client.close()
            self._client = None
        elif self._client is not None:  # the script may change the model as soon as train() returns
            self._client.gate()
        self._resumption = None

    def _open(self, args: Any) -> PCcheckClient:
        shared = AcceleratorState()
        if getattr(shared, "deepspeed_plugin", None) is not None:
            raise UsageError(
                "PCcheckCallback does not save the state of a DeepSpeed engine",
                hint="train without DeepSpeed, or remove the callback",
            )
        if self._client is None:
            sharded = getattr(shared, "fsdp_plugin", None) is not None
            replicated = args.world_size > 1 and not sharded
            options: dict[str, Any] = {"replicated": replicated} | self._options
            self._client = PCcheckClient(**options)
        return self._client

    def _save(self, state: Any) -> None:
        if self._client is None or state.global_step == self._last:
            return
        self._last = state.global_step
        without = f"training continues WITHOUT checkpoints from step {self._last} on"
        try:
            assert self._model is not None
            self._model.refresh()
            self._client.checkpoint(step=self._last)
        except UsageError as error:  # it was closed by the user, or by a newer client
            self._stop(
                f"{without}: {error.message}. Make one client for this job: "
                "PCcheckCallback(client=client)"
            )
        except UnsupportedStateError as error:  # of the first checkpoint
            self._stop(
                f"{without}, because {error.message}. Remove PCcheckCallback, and use Trainer's "
                'own checkpoints: TrainingArguments(save_strategy="steps")'
            )

    def _stop(self, why: str) -> None:
        """The run continues, and saves nothing more."""
        warn(why)
        if self._client is not None and self._given is None:
            self._client.close()
        self._client = None


def _surrounded(call_event: Callable[..., Any]) -> Callable[..., Any]:
    """Trainer's call of an event: PCcheck's callback acts before and after all others."""

    @functools.wraps(call_event)
    def call(self: Any, event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        ours = [one for one in self.callbacks if isinstance(one, PCcheckCallback)]
        for one in ours:
            one._before(event, args, state, self)
        control = call_event(self, event, args, state, control, **more)
        for one in ours:
            one._after(event, args, state, control, self)
        return control

    return call


CallbackHandler.call_event = _surrounded(CallbackHandler.call_event)


def _into_training(model: Any, optimizer: Any) -> None:
    """What Trainer does as a step begins. Afterwards only the optimizer's step changes weights:
    schedule-free optimizers exchange them here, and merged modules are taken apart."""
    if any(type(one).train is not torch.nn.Module.train for one in model.modules()):
        model.train()
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


def _act(callbacks: list[Any], *events: str) -> bool:
    """Whether a callback of the user's does something at one of these events."""
    return any(
        getattr(getattr(one, event), "__func__", None) is not getattr(TrainerCallback, event)
        for one in callbacks
        if not (
            isinstance(one, PCcheckCallback) or type(one).__module__.startswith("transformers.")
        )
        for event in events
    )


def _by_trainer(args: Any, state: Any, loader: Any) -> tuple[int, int]:
    """How many passes over the data Trainer counts, and how many updates in the next one."""
    updates = state.max_steps
    if has_length(loader):
        updates = max(-(-len(loader) // args.gradient_accumulation_steps), 1)
    passes, rest = divmod(state.global_step, updates)
    return passes, rest


def pccheck_resume(trainer: Any, step: int | None = None) -> str | None:
    """What `trainer.train(resume_from_checkpoint=...)` takes to continue from the newest valid
    checkpoint of the trainer's PCcheckCallback, or from that of `step`: the path of a temporary
    directory. None when there is no checkpoint yet: training begins at step 0.

    Every rank calls it, and all resume from the same step. Raises UsageError without that callback,
    else as PCcheckClient.restore does: DaemonUnreachableError while the checkpoints are unknown.
    """
    found = [one for one in trainer.callback_handler.callbacks if isinstance(one, PCcheckCallback)]
    if len(found) != 1:
        raise UsageError(
            f"pccheck_resume(trainer): the trainer has {len(found)} callbacks of PCcheck",
            hint="make it with one: Trainer(..., callbacks=[PCcheckCallback(every_n_steps=10)])",
        )
    return found[0]._resume(trainer, step)


class _Resumption:
    """A directory with Trainer's counters, for one `train()`. Removed with this object."""

    def __init__(
        self, step: int, asked: int | None, text: str, place: tuple[int, int] | None
    ) -> None:
        self.step, self.asked, self.place = step, asked, place
        self._folder = tempfile.TemporaryDirectory(prefix="pccheck-")
        folder = Path(self._folder.name) / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(text, encoding="utf-8")
        self.path = str(folder)

    def pass_by(self, trainer: Any) -> None:
        """Lets Trainer load no weights from this directory. Other paths are loaded as before."""
        load, path = trainer._load_from_checkpoint, self.path

        def unless_ours(resume_from_checkpoint: str, model: Any = None) -> None:
            if resume_from_checkpoint != path:
                load(resume_from_checkpoint, model)

        trainer._load_from_checkpoint = unless_ours

    def begin_at_place(self, trainer: Any) -> None:
        """Lets Trainer begin at the checkpoint's place in the data."""
        begin, path, place = trainer._init_training_state, self.path, self.place

        def here(
            max_steps: int, per_epoch: int, epochs: int, resume_from_checkpoint: Any, trial: Any
        ) -> Any:
            found = begin(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
            if resume_from_checkpoint != path or place is None or trainer.args.ignore_data_skip:
                return found
            return place[0], place[1] * trainer.args.gradient_accumulation_steps

        trainer._init_training_state = here

    def require(self, step: int) -> None:
        """Raises DamagedError for a step that is not that of Trainer's counters."""
        if step != self.step:
            raise DamagedError(
                f"the checkpoint of step {self.step} is damaged, and step {step} was restored "
                f"instead, but Trainer already has the counters of step {self.step}",
                hint=f"start again with pccheck_resume(trainer, step={step})",
            )
