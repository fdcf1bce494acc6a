"""Hugging Face's Trainer: a callback that saves, and what `train()` resumes from.

Trainer reads its counters from a directory. All else is restored in place, after Trainer has made
it.
"""

from __future__ import annotations

import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from pccheck.client import PCcheckClient
from pccheck.state.rng import capture_rng, restore_rng
from pccheck.warn import warn
from pccheck_wire.errors import DamagedError, UsageError


class PCcheckCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint with PCcheck every `every_n_steps` optimizer steps, and at the end.

    A checkpoint is taken when the next step begins: what evaluation and other callbacks did after
    the step before (metrics, weights, random numbers) is part of it, in whatever order they run.

    Args:
        every_n_steps: optimizer steps from one checkpoint to the next, counted by `global_step`.
        client: a PCcheckClient of this job, which the caller closes. Without `client`
            the callback makes a client from `job` and `options`, and closes that client when
            training ends. With several ranks that client has replicated=True, unless the model is
            sharded (FSDP).

    Raises UsageError; with DeepSpeed, whose state it cannot save, when training begins.
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
        self._counters = _Counters()
        self._resumption: _Resumption | None = None
        self._generators: dict[str, Any] | None = None  # of the first step after a resume
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
        self._resumption = _Resumption(found.step, step, self._counters.text)
        self._resumption.pass_by(trainer)
        return self._resumption.path

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
        lr_scheduler: Any = None, **_more: Any,
    ) -> None:  # fmt: skip
        self._counters.state = state
        client = self._open(args)
        client.attach(model=model, optimizer=optimizer, scheduler=lr_scheduler, rng=True)
        client.attach(trainer=self._counters)
        scaler = getattr(optimizer, "scaler", None)  # of an AcceleratedOptimizer
        if scaler is not None:
            client.attach(scaler=scaler)
        self._last, self._generators = state.global_step, None
        resumption = self._resumption
        if resumption is not None and state.global_step == resumption.step:
            done = client.restore(resumption.asked)
            resumption.require(done.step)
            if self._counters.rank != args.process_index:  # this rank is new
                self._counters.epoch_rng = None
            self._generators = capture_rng()
        elif resumption is not None:
            warn(
                f"training begins at step {state.global_step}, although pccheck_resume() found a "
                f"checkpoint of step {resumption.step}: the new checkpoints will replace it. To "
                "continue from it: train(resume_from_checkpoint=pccheck_resume(trainer))"
            )
        elif state.global_step:  # from a checkpoint of Trainer's own
            client.adopt()
        self._counters.rank = args.process_index

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """The generators as they were when this epoch began: samplers may draw its order from
        them."""
        if self._generators is not None:
            before = self._counters.epoch_rng
            restore_rng(before or self._generators)
            if before is None:  # saved between two epochs
                self._generators = None
        self._counters.epoch_rng = capture_rng()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """At this point Trainer has drawn the batches of the step."""
        if self._generators is not None:
            restore_rng(self._generators)
            self._generators = None
        if state.global_step % self.every_n_steps == 0:
            self._save(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        """Saves the last step, unless Trainer has loaded the weights of the best one."""
        if float(state.epoch or 0).is_integer():
            self._counters.epoch_rng = None
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self._save(state)
        if self._client is not None and self._given is None:
            self._client.close()
            self._client = None
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
        try:
            self._client.checkpoint(step=state.global_step)
        except UsageError as error:  # it was closed by the user, or by a newer client
            warn(
                f"training continues WITHOUT checkpoints from step {state.global_step} on: "
                f"{error.message}. Make one client for this job: PCcheckCallback(client=client)"
            )
            self._client = None


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


class _Counters:
    """Trainer's own state (counters, logs, metrics), and the generators at the epoch's beginning;
    attached like any other object with a state."""

    def __init__(self) -> None:
        self.state: Any = None
        self.trainer: Any = lambda: None
        self.text = ""  # of the checkpoint that was restored
        self.rank = 0
        self.epoch_rng: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._as_text(), "rank": self.rank, "epoch_rng": self.epoch_rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text, self.rank = state["state"], state["rank"]
        self.epoch_rng = state["epoch_rng"]

    def _as_text(self) -> str:
        """As Trainer writes it beside a checkpoint of its own."""
        if self.state is None:
            return ""
        fields = dict(vars(self.state))
        trainer = self.trainer()
        if trainer is not None:
            every = [*trainer.callback_handler.callbacks, trainer.control]
            exported = TrainerState(
                stateful_callbacks=[one for one in every if isinstance(one, ExportableState)]
            )
            fields["stateful_callbacks"] = exported.stateful_callbacks
        return json.dumps(fields, default=lambda value: getattr(value, "item", value.__str__)())


class _Resumption:
    """A directory with Trainer's counters, for one `train()`. Removed with this object."""

    def __init__(self, step: int, asked: int | None, text: str) -> None:
        self.step, self.asked = step, asked
        self._folder = tempfile.TemporaryDirectory(prefix="pccheck-")
        place = Path(self._folder.name) / f"checkpoint-{step}"
        place.mkdir()
        (place / "trainer_state.json").write_text(text, encoding="utf-8")
        self.path = str(place)

    def pass_by(self, trainer: Any) -> None:
        """Lets Trainer load no weights from this directory. Other paths are loaded as before."""
        load, path = trainer._load_from_checkpoint, self.path

        def unless_ours(resume_from_checkpoint: str, model: Any = None) -> None:
            if resume_from_checkpoint != path:
                load(resume_from_checkpoint, model)

        trainer._load_from_checkpoint = unless_ours

    def require(self, step: int) -> None:
        """Raises DamagedError for a step that is not that of Trainer's counters."""
        if step != self.step:
            raise DamagedError(
                f"the checkpoint of step {self.step} is damaged, and step {step} was restored "
                f"instead, but Trainer already has the counters of step {self.step}",
                hint=f"start again with pccheck_resume(trainer, step={step})",
            )
