"""Lightning: checkpoints beside training, and `Trainer.fit(ckpt_path="pccheck://")`.

trainer = Trainer(callbacks=[PCcheckCallback(every_n_steps=10)], enable_checkpointing=False)
trainer.fit(model, ckpt_path="pccheck://")  # the newest checkpoint, or from the start
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader

from pccheck.client import PCcheckClient, open_client
from pccheck.restoring.loaders import count_once, stateless_sampler
from pccheck.restoring.reading import Found
from pccheck.state.flatten import Flattener
from pccheck.state.rng import restore_rng
from pccheck.warn import LOG, warn
from pccheck_wire.errors import UnsupportedStateError, UsageError

from .lightning_beside import Tuners, beside, restore
from .lightning_io import PCcheckIO, place_of
from .lightning_moments import AFTER_BATCH, AT_BATCH, AT_END, AT_EPOCH, Moments

__all__ = ["PCcheckCallback", "PCcheckIO"]

_HYPERPARAMETERS = re.compile("(datamodule_)?(hparams|hyper_parameters)")


class _Rest:
    """What Lightning saves beside parameters and optimizers: loops, loaders, schedulers, callbacks,
    precision, hyper-parameters, and what hooks add."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._refused: set[str] | None = None
        self.moment = ""  # of the save, if PCcheckCallback has chosen it
        self.exchanged = False

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        made = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        made.pop("optimizer_states")
        if _same(made["state_dict"], trainer.lightning_module.state_dict()):
            made.pop("state_dict")  # otherwise on_save_checkpoint() has changed it
        if self._refused is None:
            self._refused = {key for key in made if _HYPERPARAMETERS.match(key) and _odd(made, key)}
        rank = trainer.global_rank, trainer.world_size
        if self.moment == AT_EPOCH:
            # A resumed run calls on_train_epoch_start again: it may set what no checkpoint has.
            for counts in made["loops"]["fit_loop"]["epoch_progress"].values():
                counts["started"] -= 1
        made["pccheck"] = {
            "rank": rank, "moment": self.moment, "exchanged": self.exchanged, **beside(trainer)
        }  # fmt: skip
        return {key: value for key, value in made.items() if key not in self._refused}

    def load_state_dict(self, _state: dict[str, Any]) -> NoReturn:
        raise UsageError(
            "a state of Lightning is restored by Lightning, not by restore()",
            hint='call trainer.fit(model, ckpt_path="pccheck://")',
        )


def _same(these: Mapping[str, Any], those: Mapping[str, Any]) -> bool:
    return these.keys() == those.keys() and all(
        one.data_ptr() == two.data_ptr()
        for one, two in zip(these.values(), those.values(), strict=True)
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
    )


def _odd(made: dict[str, Any], key: str) -> bool:
    """Whether hyper-parameters cannot be stored; Lightning does not restore them."""
    try:
        Flattener().node(made[key], key)
    except UnsupportedStateError as error:
        warn(f"checkpoints leave out {key!r}, which resuming does not need: {error}")
        return True
    return False


class PCcheckCallback(Callback):
    """Saves after every `every_n_steps`-th optimizer step, beside training.

    Args:
        every_n_steps: 0 saves only to paths: `trainer.save_checkpoint("pccheck://JOB/STEP")`.
        client: the script's own client. Without it the callback uses an open client of this process
            for the job, or makes a client with `options` (of PCcheckClient) for each fit, and
            closes that client after the fit.

    With several ranks (DDP) those of each node store one copy (`replicated=True`). Raises
    UsageError for strategies that shard parameters or optimizer.
    """

    def __init__(
        self, every_n_steps: int = 1, *, client: PCcheckClient | None = None, **options: Any
    ) -> None:
        if every_n_steps < 0:
            raise UsageError(
                f"every_n_steps={every_n_steps} is below 0", hint="use 1, 2, 3 ...; 0 for never"
            )
        self.every_n_steps = every_n_steps
        self._given, self._options = client, options
        self._mine: PCcheckClient | None = None  # to be closed here
        self._io: PCcheckIO  # from `setup` on
        self._moments: Moments | None = None  # while training
        self._tuners = Tuners()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, of a trainer for example, makes a client of its own for the same job."""
        kept = {name: value for name, value in vars(self).items() if name != "_io"}
        job = {"job": self._given.place[0]} if self._given is not None else {}
        fresh = {"_given": None, "_mine": None, "_moments": None, "_options": self._options | job}
        return kept | fresh

    @property
    def client(self) -> PCcheckClient:  # from `setup` on
        return self._io.client

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        _require_whole(trainer)
        self._end_moments()  # of a fit() that failed
        files = strategy.checkpoint_io
        client = self._given or (files.client_or_none if isinstance(files, PCcheckIO) else None)
        if client is None or (self._given is None and client.closed):
            client = self._open(trainer)
        if isinstance(files, PCcheckIO):
            files = files.files
        self._io = io = PCcheckIO(client, files)
        io.optional = stage == "fit"
        for each in trainer.checkpoint_callbacks:
            if stage == "fit" and isinstance(each, ModelCheckpoint):
                io.check(each, trainer.default_root_dir)
        strategy.checkpoint_io = io
        # No function in a function: a trainer can be pickled.
        strategy.save_checkpoint = partial(_save, io, strategy)  # type: ignore[method-assign]
        strategy.remove_checkpoint = partial(_remove, io, strategy)  # type: ignore[method-assign]

    def _open(self, trainer: Trainer) -> PCcheckClient:
        rank, world_size = trainer.global_rank, trainer.world_size
        options = {"replicated": world_size > 1} | self._options
        if found := open_client(options.get("job"), rank, world_size):
            return found
        self._mine = PCcheckClient(rank=rank, world_size=world_size, **options)
        return self._mine

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._io.found:
            self._tuners.skip(trainer, checkpoint.get("pccheck", {}))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found, mine = self._io.found, (trainer.global_rank, trainer.world_size)
        if found:
            checkpoint = found.state["lightning"]
            if checkpoint.get("pccheck", {}).get("rank") not in (None, mine):
                found.state.pop("rng")
                checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
                warn(
                    f"rank {mine[0]} of {mine[1]} did not save step {found.step}: its generators "
                    "stay as they are, and its loader begins at the start of its data"
                )
        elif found is not None:
            if mine[0] == 0:  # Lightning has printed that it restores from the path
                LOG.warning(
                    "PCcheck: job %r has no checkpoint yet, so training begins at step 0",
                    self.client.place[0],
                )
            trainer.ckpt_path = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rest = _Rest(trainer)
        optimizers = {f"optimizer{i}": each for i, each in enumerate(trainer.optimizers)}
        self.client.attach(rng=True, model=pl_module, lightning=self._rest, **optimizers)
        self._io.attached = True
        self._tuners.call_again()
        self._moments = Moments(trainer, self)
        self._warn_of_loaders(trainer)
        # Released: it is a whole state, and of this fit() only.
        found, self._io.found = self._io.found, None
        if found:
            self._continue(trainer, found)

    def _continue(self, trainer: Trainer, found: Found) -> None:
        """Called after Lightning has restored its state. Lightning makes its iterators before the
        samplers know their epoch, and after a finished epoch without the loaders' states; making
        them draws random numbers."""
        if trainer.global_step != found.step:
            raise UsageError(
                f"step {found.step} was loaded, and training would begin with step "
                f"{trainer.global_step}: trial steps in a callback have reset Lightning's counters",
                hint="make trial steps before fit(), with lightning.pytorch.tuner.Tuner(trainer)",
            )
        loop, checkpoint = trainer.fit_loop, found.state["lightning"]
        assert loop._combined_loader is not None and loop._data_fetcher is not None
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, trainer.current_epoch)
        if states := checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"):
            loop._combined_loader._load_state_dicts(states)
            for loader in loop._combined_loader.flattened:
                count_once(loader)
            iter(loop._data_fetcher)
        if "rng" in found.state:
            restore_rng(found.state["rng"])
        mine = checkpoint.get("pccheck", {})
        restore(trainer, mine)
        assert self._moments is not None
        self._moments.resumed = moment = mine.get("moment", "")
        if moment:
            self._moments.begin_epoch = lambda: self._begin_epoch(trainer, found)
        if moment in (AT_EPOCH, AT_END):
            # Lightning would find the counters of the finished epoch, and end the new epoch, too.
            loop.epoch_loop.restarting = False

    def _begin_epoch(self, trainer: Trainer, found: Found) -> None:
        """Hooks that ran before the save have run again: on_train_start, and at an epoch's start
        on_train_epoch_start. What they change in the model and the generators is undone."""
        moment = found.state["lightning"]["pccheck"]["moment"]
        if moment != AT_END:
            for name, tensor in trainer.lightning_module.state_dict().items():
                if isinstance(tensor, torch.Tensor) and name in found.state["model"]:
                    tensor.copy_(found.state["model"][name])
            if "rng" in found.state:
                restore_rng(found.state["rng"])
        if moment in (AT_EPOCH, AT_END):
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]

    def save(self, trainer: Trainer, moment: str) -> None:
        """Called by `Moments`."""
        if self.client.closed:
            warn(
                "training continues WITHOUT checkpoints: the client was closed, by close() or by a "
                "newer client for the job. Use one client: PCcheckCallback(client=client)"
            )
            return
        if moment in (AT_BATCH, AT_EPOCH):  # training continues
            for optimizer in trainer.optimizers:
                if callable(train := getattr(optimizer, "train", None)):
                    train()  # schedule-free: its weights do not change while they are copied
        assert self._moments is not None
        self._rest.moment, self._rest.exchanged = moment, self._moments.exchanged
        self.client.checkpoint(step=trainer.global_step)
        self._rest.moment = ""
        if moment in (AFTER_BATCH, AT_END):
            self.client.gate()  # hooks of this run follow, and may change what is copied

    def _end_moments(self) -> None:
        if self._moments is not None:
            self._moments.remove()
        self._moments = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_moments()
        self._tuners.call_again()
        if self._mine is not None:
            self._mine.close()

    def _warn_of_loaders(self, trainer: Trainer) -> None:
        why = ""
        for loader in CombinedLoader(trainer.train_dataloader).flattened:
            if not hasattr(loader, "state_dict"):
                why = (
                    f"{type(loader).__name__} has no state. Use torchdata's StatefulDataLoader "
                    "(pip install torchdata), which takes the same arguments"
                )
            elif _draws_order(loader):
                why = (
                    f"the order of {type(loader).__name__}(shuffle=True) on several ranks is not "
                    "saved. Make it with sampler=DistributedSampler(dataset, seed=...)"
                )
            elif sampler := stateless_sampler(loader):
                why = (
                    f"{sampler} has no state. Use shuffle=True, or a sampler whose order follows "
                    "from the epoch (docs/python.md, recipes)"
                )
            elif sized_len(loader) is None:
                why = "Lightning fetches a batch of a loader without a length in advance"
        if why and trainer.is_global_zero:
            warn(
                "a run that is resumed in the middle of an epoch does not get the batches that "
                f"would have come: {why}. All else is resumed"
            )


def _save(
    io: PCcheckIO, strategy: Strategy, checkpoint: Any, filepath: Any, storage_options: Any = None
) -> None:
    """A strategy's save_checkpoint(): every rank saves to paths of PCcheck, rank 0 to others."""
    if place_of(filepath):
        io.save_checkpoint(checkpoint, filepath, storage_options)
    else:
        type(strategy).save_checkpoint(strategy, checkpoint, filepath, storage_options)


def _remove(io: PCcheckIO, strategy: Strategy, filepath: Any) -> None:
    """A strategy's remove_checkpoint(): a pin is that of a node, so every rank unpins."""
    if place_of(filepath):
        io.remove_checkpoint(filepath)
    else:
        type(strategy).remove_checkpoint(strategy, filepath)


def _draws_order(loader: Any) -> bool:
    """Whether Lightning divides an order among the ranks that the loader's own sampler draws. In a
    StatefulDataLoader Lightning puts its sampler into a batch sampler."""
    holders = (loader, getattr(loader, "batch_sampler", None))
    return any(isinstance(getattr(h, "sampler", None), DistributedSamplerWrapper) for h in holders)


def _require_whole(trainer: Trainer) -> None:
    name = type(trainer.strategy).__name__
    if type(trainer.strategy).save_checkpoint is not Strategy.save_checkpoint:
        raise UsageError(
            f"{name} saves shards with its own code, not through a CheckpointIO",
            hint="use DDP or one device with PCcheckCallback; FSDP2 in a loop of your own: "
            "docs/ranks.md",
        )
