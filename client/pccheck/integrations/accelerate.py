"""Hugging Face Accelerate: what an Accelerator has prepared is attached, and resumes in mid-epoch.

attach(client, accelerator)  # after prepare()
done = client.restore()
...
if accelerator.sync_gradients:
    client.checkpoint(step=step)

Where a checkpoint is taken: where the script calls checkpoint(), and nowhere else. What may run
after it is the script's own: a change of weights before the next optimizer.step() (an average that
is swapped, optimizer.train() of a schedule-free one) needs client.gate(). accumulate() sets
sync_gradients for each micro-batch, and optimizer.step() does nothing while it is False: a call
then comes between two micro-batches, and is skipped.
"""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset

from pccheck.client import PCcheckClient
from pccheck.restoring.loaders import after_iterator, count_once, made_iterator
from pccheck.state.attaching import Stateful
from pccheck.state.rng import capture_rng, restore_rng
from pccheck.warn import Warner
from pccheck_wire.errors import CheckpointFailedError, UsageError


def attach(
    client: PCcheckClient, accelerator: accelerate.Accelerator, *, loader: Any = None, **more: Any
) -> None:
    """Attaches all that `accelerator` has prepared or registered for checkpoints, and the
    generators.

    These are models, optimizers, schedulers, the scaler, custom objects, the epochs of the data
    loaders, and with use_stateful_dataloader=True their places in the data. Call it after
    `prepare()`, then `client.restore()`. With several processes, and models that are not sharded,
    the client should have replicated=True. Call `client.checkpoint(step=...)` only while
    `accelerator.sync_gradients` is true: gradients are not saved, so a call between two
    micro-batches is skipped, with one warning.

    Args:
        loader: the prepared loader that training draws from; default the first one.
        more: more things for PCcheckClient.attach.

    Raises UsageError when nothing is prepared, for DeepSpeed and Megatron (they keep their state
    themselves), and as PCcheckClient.attach does.
    """
    if accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
        raise UsageError(
            f"an Accelerator with {accelerator.distributed_type.value} keeps the state of training "
            "where it cannot be attached",
            hint="save with the engine's own checkpoints",
        )
    if not accelerator._models:
        raise UsageError(
            "attach(client, accelerator): nothing is prepared yet",
            hint="call it after accelerator.prepare(...)",
        )
    loaders = accelerator._dataloaders
    first = loader if loader is not None else next(iter(loaders), None)
    if loader is not None and not any(one is loader for one in loaders):
        raise UsageError(
            "attach(client, accelerator, loader=...): the accelerator has not prepared this loader",
            hint="pass what accelerator.prepare() returned for it",
        )
    if accelerator.use_stateful_dataloader:
        for one in loaders:
            _require_counted(one)
            base: Any = one.base_dataloader
            if base.num_workers and base._initial_iter_for_state_dict:
                # prepare() has made an iterator, whose workers read ahead in an order from before
                # the sampler had its seed: no resumed run draws that order again.
                base.load_state_dict({})
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    counters = _Counters(accelerator, first)
    things = {
        **_named("model", models),
        **_named("optimizer", [one.optimizer for one in accelerator._optimizers]),
        **_named("scheduler", [one.scheduler for one in accelerator._schedulers]),
        **_named("custom", accelerator._custom_objects),
        "accelerator": counters,
    }
    if accelerator.scaler is not None:
        things["scaler"] = accelerator.scaler
    if accelerator.use_stateful_dataloader:
        things |= _named("data", loaders)  # not `loader`: client.restore() would set generators
    client.attach(rng=True, **(things | more))
    counters.attached = True


def skip_first_batches(loader: Any, num_batches: int) -> Any:
    """The rest of an epoch, for a loader without a state. Like accelerate.skip_first_batches, but
    in the data order of the interrupted run, and with the random numbers that followed there.

    Call it after `client.restore()`, with the loader that `attach()` knows and the number of
    batches that training has already had in this epoch. Use the result for this epoch only, and
    the loader itself from the next epoch on. Raises UsageError for another loader.
    """
    epoch = getattr(loader, "_pccheck_epoch", None)
    if not isinstance(epoch, _Epoch):
        raise UsageError(
            "skip_first_batches(loader): attach(client, accelerator) does not know this loader",
            hint="pass the prepared loader that training draws from, after attach()",
        )
    if num_batches == 0:
        return loader
    # Of a stream Accelerate skips batches of all ranks, else those of its sampler.
    each = 1 if isinstance(loader.dataset, IterableDataset) else _joined(loader)
    rest = accelerate.skip_first_batches(loader, num_batches * each)
    if epoch.began:
        epoch.continue_in(rest)
    end = rest.end

    def end_of_epoch() -> None:
        end()
        loader.set_epoch(rest.iteration)  # as if `loader` had given these batches

    rest.end = end_of_epoch
    rest._pccheck_epoch = epoch
    return rest


class _Epoch:
    """The generators as they were when a loader began its epoch: the data order may be drawn from
    them. Also continues an epoch in the middle."""

    def __init__(self, loader: Any) -> None:
        self.began: dict[str, Any] = {}
        self.generators: dict[str, Any] | None = None  # of a checkpoint, for the next batch
        # DataLoaderDispatcher has none: rank 0 draws for all.
        self._order = getattr(loader, "synchronized_generator", None)
        self._note_in(loader)
        loader._pccheck_epoch = self

    def _note_in(self, loader: Any) -> None:
        base, begin = loader.base_dataloader, type(loader).begin

        def at_begin() -> None:
            self._note(makes=False)  # torchdata's loader has made its first iterator before
            begin(loader)

        def at_iterator() -> Any:
            self._note(makes=True)
            return made_iterator(base)

        loader.begin, base._get_iterator = at_begin, at_iterator

    def _note(self, *, makes: bool) -> None:
        self.began = {"rng": capture_rng(), "makes": makes}
        if self._order is not None:
            self.began["order"] = self._order.get_state()

    def _begin_again(self) -> None:
        restore_rng(self.began["rng"])
        if self._order is not None:
            self._order.set_state(self.began["order"])

    def continue_in(self, loader: Any) -> None:
        """Gives the next iterator of `loader` the order of the interrupted epoch. Restores the
        generators of the checkpoint after the first batch, because iterators draw until then."""
        base, generators = loader.base_dataloader, self.generators or capture_rng()

        def once() -> Any:
            if self.began["makes"]:
                self._begin_again()
            made = made_iterator(base)
            if not self.began["makes"]:
                self._begin_again()
            if not _is_read(loader):
                # Its state may be of the end of the epoch before: then the loader makes another.
                if not getattr(made, "_finished", False):
                    restore_rng(generators)
                    self._note_in(loader)
                return made
            fetch = made._next_data

            def first() -> Any:
                made._next_data = fetch
                batch = fetch()
                restore_rng(generators)
                self._note_in(loader)
                return batch

            made._next_data = first
            return made

        vars(loader).pop("begin", None)
        base._get_iterator = once

    def begin_after(self, loader: Any) -> None:
        """A loader whose state is the end of an epoch makes an iterator only to find that end: the
        generators are restored after it, and the epoch, which a seedable sampler counts there."""
        generators = self.generators or capture_rng()

        def begin() -> None:
            restore_rng(generators)
            loader.set_epoch(loader.iteration)
            self._note_in(loader)

        after_iterator(loader.base_dataloader, lambda: begin)


def _dispatches(loader: Any) -> bool:
    """Whether rank 0 reads for all ranks: isinstance() sees the class of the loader in it."""
    return issubclass(type(loader), DataLoaderDispatcher)


def _is_read(loader: Any) -> bool:
    """Whether this rank draws batches from its iterator."""
    return not _dispatches(loader) or loader.state.process_index == 0


def _joined(loader: Any) -> int:
    """How many batches of the loader in it make one batch of all ranks."""
    whole = not _dispatches(loader) or loader.split_batches or loader.submesh_tp
    return 1 if whole else loader.state.num_processes


def _require_counted(loader: Any) -> None:
    """On n ranks Accelerate takes n - 1 from the count of batches in a state: also if it splits
    one batch, where that is wrong, and never with worker processes, where it can be needed."""
    ranks = loader.state.num_processes if _dispatches(loader) else 1
    if ranks > 1 and (_joined(loader) == 1) == (loader.num_workers == 0):
        kind = f"num_workers={loader.num_workers} and split_batches={loader.split_batches}"
        raise UsageError(
            f"attach(client, accelerator): on {ranks} ranks, Accelerate's state of a loader with "
            f"dispatch_batches, {kind} counts other batches than training has had",
            hint="use DataLoaderConfiguration(dispatch_batches=False), or "
            "use_stateful_dataloader=False with PCcheck's skip_first_batches",
        )


def _named(name: str, things: list[Any]) -> dict[str, Stateful]:
    """`name` for the first, then `name_1`, `name_2`."""
    return {f"{name}_{index}" if index else name: thing for index, thing in enumerate(things)}


class _Counters:
    """What an Accelerator counts: micro-batches since the last step, and each loader's epochs."""

    def __init__(self, accelerator: accelerate.Accelerator, first: Any) -> None:
        self._accelerator = accelerator
        self._loaders = accelerator._dataloaders
        self._first = first
        self._epoch = _Epoch(first) if first is not None else None
        self._warner = Warner()
        self.attached = False  # attach() itself may be called at any time

    def state_dict(self) -> dict[str, Any]:
        if self.attached and not self._accelerator.sync_gradients:
            what = "checkpoint() was called between the micro-batches of a step, whose gradients "
            what += "no checkpoint has"
            then = "call it only while accelerator.sync_gradients is true"
            self._warner.once("between", f"{what}, and is skipped: {then}. Training continues")
            raise CheckpointFailedError(what, hint=then)
        return {
            "step": self._accelerator.step,
            "epochs": [loader.iteration + self._is_over(loader) for loader in self._loaders],
            "began": self._epoch.began if self._epoch else {},
            "over": self._first is not None and self._is_over(self._first),
            "rng": capture_rng(),
            "rank": self._rank,
        }

    @property
    def _rank(self) -> list[int]:
        """Also of how many: a loader of one process draws its order in another way."""
        return [self._accelerator.process_index, self._accelerator.num_processes]

    def _is_over(self, loader: Any) -> bool:
        """Whether this is the last batch of an epoch, which loaders count after the loop."""
        active = self._accelerator.gradient_state.active_dataloader
        epoch = getattr(loader, "_pccheck_epoch", None)
        mine = active is loader or (epoch and getattr(active, "_pccheck_epoch", None) is epoch)
        return bool(mine) and bool(active.end_of_dataloader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for loader, number in zip(self._loaders, state["epochs"], strict=True):
            loader.set_epoch(number)
            if loader is not self._first:  # whose iterators _Epoch makes
                count_once(loader.base_dataloader)
        if self._epoch is None:
            return
        same = state["rank"] == self._rank
        self._epoch.began = state["began"] if same else {}
        self._epoch.generators = state["rng"] if same else None
        if self._accelerator.use_stateful_dataloader and self._epoch.began:
            go_on = self._epoch.begin_after if state["over"] else self._epoch.continue_in
            go_on(self._first)
