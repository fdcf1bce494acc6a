"""Paths of PCcheck for Lightning: what they name, and what saves to and loads from them.

`pccheck://JOB` means the newest checkpoint of the job, `pccheck://JOB/STEP` and
`pccheck://JOB/epoch=1-step=STEP.ckpt` that of a step. All other paths are files, as before.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import Any, NamedTuple

import fsspec  # type: ignore[import-untyped]
import lightning
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from pccheck.client import PCcheckClient
from pccheck.restoring.reading import Found
from pccheck.state.rng import capture_rng
from pccheck.warn import warn
from pccheck_store.filesystem import ENDING, PCcheckFileSystem
from pccheck_wire.errors import (
    NoCheckpointError,
    PccheckError,
    RefusedError,
    StateMismatchError,
    UsageError,
)

SCHEME = "pccheck"
#: How long a save to a path waits until the checkpoint is durable, and may be pinned.
DURABLE_LIMIT_S = 600.0
#: ... on all ranks, once this rank has its part.
GLOBAL_LIMIT_S = 30.0
_A_STEP = 12345  # to see whether a path names the step


class _Names(PCcheckFileSystem):
    """Lets ModelCheckpoint accept `dirpath="pccheck://JOB"`: finds nothing, and asks no daemon."""

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path.endswith(ENDING):
            return super().info(path, **options)
        raise FileNotFoundError(path)


fsspec.register_implementation(SCHEME, _Names, clobber=True)


class CheckpointPath(NamedTuple):
    """What a path names; an empty `name` is the newest checkpoint."""

    job: str
    name: str
    step: int | None


def place_of(path: object) -> CheckpointPath | None:
    """None for a file. Raises UsageError."""
    found = re.fullmatch(rf"{SCHEME}:/{{1,2}}([^/]*)/?(.*)", str(path))
    if found is None:
        return None
    job, name = found.groups()
    number = re.search(r"(?<![a-z_])step=(\d+)", name) or re.fullmatch(r"(\d+)(?:\.ckpt)?", name)
    if name and number is None:
        raise UsageError(
            f"{path}: no step is named, and the checkpoints of a job are found by their steps",
            hint='use "pccheck://JOB/STEP", and {step} in the filename= of a ModelCheckpoint; '
            'instead of "last", "pccheck://JOB" is the newest',
        )
    return CheckpointPath(job, name, int(number[1]) if number else None)


class _Nothing(dict[str, Any]):
    """Stands for a job without a checkpoint. It is false, so Lightning restores nothing."""

    def __bool__(self) -> bool:
        return False


class PCcheckIO(CheckpointIO):
    """Saves to and loads from paths that begin with pccheck://; `files` handles other paths.

    `PCcheckCallback` installs one. Without the callback: `Trainer(plugins=[PCcheckIO(client)])`.
    Saving returns at once for `pccheck://JOB`. A path with a step returns when the checkpoint is
    durable and pinned. Removing that path unpins the checkpoint: newer ones then replace it.
    Lightning removes a path after it has saved the next one: a pin without a free slot is tried
    again then.
    """

    def __init__(self, client: PCcheckClient, files: CheckpointIO | None = None) -> None:
        self.client_or_none: PCcheckClient | None = client
        self.files = files or TorchCheckpointIO()
        self.attached = False  #: the client knows what to save
        self.optional = True  #: whether training may begin without a checkpoint
        self.found: Found | None = None  #: what was loaded
        self._paths: dict[int, set[str]] = defaultdict(set)  # that keep a step, or should
        self._refused: dict[int, RefusedError] = {}  # steps without a pin, until a slot is free

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"client_or_none": None}

    @property
    def client(self) -> PCcheckClient:
        """Raises UsageError for a copy, of a trainer for example, which has none."""
        if self.client_or_none is None:
            raise UsageError(
                "a copy of PCcheckIO has no client",
                hint="make PCcheckIO(client) anew, with a client of this process",
            )
        return self.client_or_none

    def _own(self, path: object) -> CheckpointPath | None:
        place, mine = place_of(path), self.client.place[0]
        if place is not None and place.job not in ("", mine):
            raise UsageError(
                f"{path} is of job {place.job!r}, and this process saves job {mine!r}",
                hint=f'use "pccheck://" or "pccheck://{mine}", or give that job to '
                "PCcheckCallback(job=...); pccheckctl export reads any job",
            )
        return place

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """A failure of the daemon or the storage is a warning. Raises UsageError for a path that
        names another job or step, and for parameters without the rest."""
        place = self._own(path)
        if place is None:
            self.files.save_checkpoint(checkpoint, path, storage_options)
            return
        step = int(checkpoint["global_step"])
        if place.step not in (None, step):
            raise UsageError(
                f"{path}: the training is at step {step}", hint=f'save to "pccheck://JOB/{step}"'
            )
        if "optimizer_states" not in checkpoint:
            raise _only_weights(str(path))
        state = None if self.attached else {"lightning": checkpoint, "rng": capture_rng()}
        made = self.client.checkpoint(state, step=step, metadata={"path": str(path)})
        if not place.name:
            return
        self._give_up(but=step)
        self._paths[step].add(str(path))
        try:
            made.wait_durable(DURABLE_LIMIT_S)
            made.wait_global(GLOBAL_LIMIT_S)
            self.client.pin(step)
        except RefusedError as error:
            self._refused[step] = error
        except PccheckError as error:
            self._warn_not_kept(step, error)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns all tensors on the CPU. A falsy result means that there is no checkpoint yet, and
        training begins at step 0. Raises what `PCcheckClient.recover` does."""
        place = self._own(path)
        if place is None:
            given = {} if map_location is None else {"map_location": map_location}
            return self.files.load_checkpoint(path, **given, weights_only=weights_only)
        self.found = found = self.client.recover(place.step)
        if not found:
            if not self.optional:
                raise NoCheckpointError(
                    f"{path}: job {self.client.place[0]!r} has no checkpoint yet",
                    hint="train first, or leave ckpt_path= out to use the model as it is",
                )
            return _Nothing({"pytorch-lightning_version": lightning.__version__})
        if place.step is not None:
            self.client.adopt()
        return _lightnings(found, path)

    def remove_checkpoint(self, path: Any) -> None:
        place = self._own(path)
        if place is None:
            self.files.remove_checkpoint(path)
        elif place.step is not None:
            self._paths[place.step].discard(str(path))
            if self._paths[place.step]:
                return  # another ModelCheckpoint keeps the step
            try:
                self._refused.pop(place.step, None)
                self.client.unpin(place.step)
            except PccheckError as error:
                warn(f"{path} still takes a slot: {error}")
            for step in tuple(self._refused):  # a slot may be free now
                del self._refused[step]
                try:
                    self.client.pin(step)
                except PccheckError as error:
                    self._warn_not_kept(step, error)

    def _give_up(self, *, but: int | None = None) -> None:
        """No removal has freed a slot."""
        for step in self._refused.keys() - {but}:
            error = self._refused.pop(step)
            if self.client.place[1] == 0:
                self._warn_not_kept(step, error)

    def _warn_not_kept(self, step: int, error: PccheckError) -> None:
        paths = ", ".join(sorted(self._paths[step]))
        warn(f"{paths}: not kept when newer checkpoints come; training continues: {error}")

    def check(self, files: ModelCheckpoint, default: str) -> None:
        """Raises UsageError if saves of `files`, in its directory or `default`, would raise."""
        folder = str(files.dirpath or default)
        if place_of(f"{folder}/{_A_STEP}") is None:
            return
        if files.save_last:
            raise UsageError(
                f"ModelCheckpoint({folder!r}, save_last={files.save_last}): the last checkpoint of "
                "a job has no path of its own",
                hint='remove save_last: fit(ckpt_path="pccheck://") continues from the newest one',
            )
        if files.save_weights_only:
            raise _only_weights(f"ModelCheckpoint({folder!r}, save_weights_only=True)")
        name = files.format_checkpoint_name({"step": torch.tensor(_A_STEP)})
        self._own(f"{folder}/{name.removeprefix(folder).lstrip('/')}")

    def teardown(self) -> None:
        self._give_up()
        self.files.teardown()


def _only_weights(what: str) -> UsageError:
    return UsageError(
        f"{what}: training cannot resume from parameters without the optimizer, and the newest "
        "checkpoint of a job is for resuming",
        hint="give ModelCheckpoint(save_weights_only=True) a directory for files",
    )


def _lightnings(found: Found, path: object) -> dict[str, Any]:
    """The checkpoint as Lightning saved it."""
    state = found.state
    if not isinstance(state, dict) or "lightning" not in state:
        raise StateMismatchError(
            f"{path}: step {found.step} was not saved by PCcheckCallback or PCcheckIO",
            hint="use another job name, or continue with the script that saved it",
        )
    checkpoint: dict[str, Any] = state["lightning"]
    if "model" in state:
        checkpoint.setdefault("state_dict", state["model"])
        keys = itertools.takewhile(state.__contains__, map("optimizer{}".format, itertools.count()))
        checkpoint["optimizer_states"] = [state[key] for key in keys]
    return checkpoint
