"""DeepSpeed: its engine saves to PCcheck and loads from it, with the calls that scripts have.

    engine, *_ = deepspeed.initialize(...)
    install(engine, job="my-run")  # on every rank
    engine.load_checkpoint("checkpoints")
    ...
    engine.save_checkpoint("checkpoints")  # returns at once; the next update waits for the copy

See docs/frameworks.md. Tested with DeepSpeed 0.19.8.

Where a checkpoint is taken: in save_checkpoint(), which the script calls after engine.step(). Until
the next update the script may do anything: `commit`, which the engine calls right before an update,
waits for the copy, and buffers and the tensors of `client_state` are copied at once. A call between
two micro-batches is skipped: no checkpoint has their gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from pccheck.client import PCcheckClient
from pccheck.saving.handle import Checkpoint
from pccheck.state.attaching import Stateful
from pccheck.warn import Warner, warn
from pccheck_wire.errors import NoCheckpointError, PccheckError, UsageError

from .deepspeed_files import NAME, DeepspeedSource, DeepspeedState, settled, tags_of
from .objects import Objects

#: What DeepSpeed itself puts into a checkpoint.
_OWN = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)


def install(
    engine: DeepSpeedEngine,
    *,
    client: PCcheckClient | None = None,
    loader: Stateful | None = None,
    classes: Iterable[type] = (),
    **options: Any,
) -> PCcheckEngine:
    """From now on `engine.save_checkpoint` saves to PCcheck, and `engine.load_checkpoint` loads the
    newest checkpoint from there. Call it on every rank, after `deepspeed.initialize`.

    Args:
        client: a PCcheckClient(gate="manual") of this job, which the caller closes. Without it one
            is made from `options` (job=, autostart=, ...), which `engine.destroy()` closes.
        loader: a loader with a state; each rank saves its own.
        classes: of objects in the script's `client_state` that are neither tensors nor plain
            values. Only objects of these classes are stored, by their attributes, and only these
            are made when the checkpoint is loaded.

    Raises UsageError for what cannot be saved: pipelines, tensors that are offloaded to NVMe, and
    another checkpoint writer in DeepSpeed's configuration.
    """
    if client is not None and options:
        raise UsageError(
            f"install(client=..., {next(iter(options))}=...): the client has its options already",
            hint="give them to that PCcheckClient",
        )
    refused = [
        (isinstance(engine, PipelineEngine), "a PipelineModule"),
        (engine.zero_nvme_offload_optimizer(), "an optimizer that is offloaded to NVMe"),
        (type(engine.checkpoint_engine) is not TorchCheckpointEngine, "a checkpoint writer"),
    ]
    for is_refused, what in refused:
        if is_refused:
            raise UsageError(
                f"install(engine): the engine has {what}, which PCcheck does not replace",
                hint="change DeepSpeed's configuration, or save with DeepSpeed's own files",
            )
    return PCcheckEngine(engine, client, loader, classes, options)


class PCcheckEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's interface to what saves its checkpoints; made by `install`.

    It is "decoupled": DeepSpeed calls `commit` right before the next update, which waits there for
    the copy. What DeepSpeed calls a file is an item of the attached state. Files that are not part
    of a checkpoint (`save_16bit_model`) are written as before.
    """

    def __init__(
        self, engine: DeepSpeedEngine, client: PCcheckClient | None, loader: Stateful | None,
        classes: Iterable[type], options: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = "PCcheck"
        self.checkpoint: Checkpoint | None = None  #: the handle of the newest checkpoint
        self._mine = client is None
        mine: dict[str, Any] = {"gate": "manual", "rank": dist.get_rank()}
        mine["world_size"] = dist.get_world_size()
        self.client = client or PCcheckClient(**(mine | options))
        self._engine, self._files = engine, engine.checkpoint_engine
        self._save, self._load = engine.save_checkpoint, engine.load_checkpoint
        hint = "name it, in the run that saves too: install(engine, classes=[...])"
        self._objects = Objects((*_OWN, *classes), hint)
        self._info: CheckpointCommitInfo | None = None
        self._saving = False
        self._warner = Warner()
        self._source: DeepspeedSource | None = None
        self._state = DeepspeedState(engine.module)
        self.client.attach(rng=True, loader=loader, deepspeed=self._state)
        self._state.attached = True
        if engine.local_rank == 0:  # not only on rank 0: each node needs what all ranks load
            engine.save_non_zero_checkpoint = True
        engine.checkpoint_engine = self
        engine.save_checkpoint = self.save_checkpoint
        engine.load_checkpoint = self.load_checkpoint

    # -- saving --------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str, tag: object = None, *arguments: Any, **options: Any
    ) -> bool:
        """DeepSpeed's save_checkpoint(). Nothing but the directory is made in `save_dir`. Between
        two micro-batches it saves nothing, warns once, and returns False."""
        if self._is_between():
            self._warner.once(
                "between",
                "save_checkpoint() was called between the micro-batches of a step, whose "
                "gradients no checkpoint has, and is skipped: call it after the engine.step() "
                "that ends an accumulation. Training continues",
            )
            return False
        self._saving, self._info = True, None
        try:
            done = bool(self._save(save_dir, tag, *arguments, **options))
            assert self._info is not None
            if self.client.closed:
                warn(
                    "training continues WITHOUT checkpoints: the client was closed, by close() or "
                    "by a newer client for the job. Use one client: install(engine, client=client)"
                )
                return done
            self._state.saves = True  # without ZeRO most ranks have no file
            self.checkpoint = self.client.checkpoint(
                step=self._engine.global_steps, metadata={"tag": self._info.tag}
            )
            return done
        finally:
            self._saving = self._state.saves = False
            self._state.files = {}

    def _is_between(self) -> bool:
        """Whether gradients of this step are there, on every rank alike."""
        engine = self._engine
        chosen = engine._is_gradient_accumulation_boundary  # by the script; None: by counting
        if chosen is not None:
            return not chosen
        if not engine.managed_gradient_accumulation():  # each step() is an update
            return False
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not self._saving or self._info is None:  # the folder of a tag would stay empty
            Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def create(self, info: CheckpointCommitInfo) -> None:
        if self._saving:
            self._info = CheckpointCommitInfo(info.tag, info.save_dir, save_latest=False)

    def save(self, state_dict: Any, path: str) -> None:
        if not self._saving:
            self._files.save(state_dict, path)
            return
        name = Path(path).name
        plain: Any = self._objects.plain(state_dict, name)
        self._state.files[name] = settled(plain)

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # views are stored as views, so nothing has to be cloned first

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        return self._info

    def commit(self, info: CheckpointCommitInfo) -> None:
        """Called right before an update; and at the end of save_16bit_model()."""
        if info is self._info:
            self.client.gate()
            self._info = None

    def cleanup(self) -> None:
        """Called by engine.destroy()."""
        if self._mine:
            self.client.close()

    # -- loading -------------------------------------------------------------------------------

    def load_checkpoint(
        self, load_dir: str, tag: object = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
        load_module_only: bool = False, custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:  # fmt: skip
        """DeepSpeed's load_checkpoint(): the newest checkpoint of the job that all ranks have, or
        that with `tag`. If PCcheck has none, DeepSpeed loads what is in `load_dir`. When the
        optimizer is loaded, so are the generators and the loader.

        Raises NoCheckpointError for a `tag` that neither has, and as PCcheckClient.restore does.
        """
        whole = load_optimizer_states and not load_module_only
        if self._engine.zero_optimization_partition_weights() and not load_optimizer_states:
            raise UsageError(
                "load_checkpoint(load_optimizer_states=False) with ZeRO-3 reads DeepSpeed's files",
                hint="use load_module_only=True",
            )
        given = (
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
            custom_load_fn,
        )  # fmt: skip
        self.client.gate()
        step = None if tag is None else self._step_of(str(tag), Path(load_dir))
        if step == 0 or self._engine.load_universal_checkpoint():
            return self._load(load_dir, tag, *given)  # type: ignore[no-any-return]
        with tempfile.TemporaryDirectory(prefix="pccheck-") as folder:
            done = self.client.restore(step, only=None if whole else [NAME])
            if not done:
                return self._load(load_dir, tag, *given)  # type: ignore[no-any-return]
            tag = str(done.metadata["tag"])
            try:
                self._source = DeepspeedSource(self.client, done, self._state.files)
                self._source.make_names(Path(folder) / tag)
                loaded, client_state = self._load(folder, tag, *given)
            finally:
                self._state.files = {}
                if self._source is not None:
                    self._source.close()
                self._source = None
            return loaded and str(Path(load_dir) / tag / Path(loaded).name), client_state

    def load(self, path: str, map_location: Any = None) -> Any:
        if self._source is None:
            return self._files.load(path, map_location=map_location)
        name = Path(path).name
        return self._objects.made(self._source.read(name), name)

    def _step_of(self, tag: str, folder: Path) -> int:
        """The step that was saved with a tag; 0 when only a folder of DeepSpeed has it."""
        found: list[Any] = [0]
        if self._engine.global_rank == 0:
            try:
                found = [tags_of(self.client).get(tag, 0 if (folder / tag).is_dir() else -1)]
            except PccheckError as error:  # for all ranks: the others wait for the answer
                found = [f"{error.message} ({error.hint})"]
        dist.broadcast_object_list(found)
        if isinstance(found[0], str):
            raise NoCheckpointError(
                f"cannot look for the checkpoint with the tag {tag!r}: {found[0]}",
                hint="load without a tag to continue from the newest checkpoint",
            )
        if found[0] < 0:
            raise NoCheckpointError(
                f"job {self.client.place[0]!r} has no checkpoint with the tag {tag!r}, and there "
                f"is no folder {folder / tag}",
                hint="newer checkpoints replace older ones, unless client.pin(step) keeps them; "
                "see: pccheckctl list",
            )
        return int(found[0])
