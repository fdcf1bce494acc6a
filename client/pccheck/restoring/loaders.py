"""Data loaders after a restore: making their iterator draws random numbers, which the continued
training drew long before its checkpoint. So the generators are set a second time after that. And
iterators that were made before a restore are outdated by it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from pccheck.state.rng import capture_rng, restore_rng
from pccheck.warn import LOG

_DEPTH = 3  # of loaders in wrappers: Accelerate's has two


class Iterators:
    """Those that loaders of torchdata have before a restore. A state is for the next iterator: one
    that a loop, a cycle() or a prefetcher holds continues its own batches."""

    def __init__(self, things: Mapping[str, object]) -> None:
        found: dict[int, tuple[str, Any, str, Any]] = {}
        # A loader that is attached itself gets that name.
        for name, thing in sorted(things.items(), key=lambda item: not has_position(*item)):
            for loader, key in _loaders_in(thing, _DEPTH):
                found.setdefault(id(loader), (name, loader, key, vars(loader).get(key)))
        self._found = list(found.values())

    def restored(self, outdated: Callable[[str], None]) -> None:
        """Calls `outdated` with the name when an iterator that was made before the restore gives a
        batch after it; only of loaders that got a state."""
        for name, loader, key, iterator in self._found:
            if getattr(loader, "_next_iter_state_dict", None) is not None:  # of torchdata.nodes
                # Otherwise the next iter() would return the iterator that attach() has made when
                # it asked for the state, and drop the state.
                loader._it, loader._iter_for_state_dict = None, False
            if iterator is not None and vars(loader).get(key) is not iterator:
                _at_next_batch(iterator, functools.partial(outdated, name))


def _loaders_in(thing: object, depth: int) -> Iterator[tuple[Any, str]]:
    """The loaders of torchdata in it, and the attribute that has the iterator of each."""
    inside = getattr(thing, "__dict__", None)
    if not isinstance(inside, dict) or isinstance(thing, torch.nn.Module):
        return
    if is_torchdata(type(thing)):
        yield thing, "_iterator"
    elif type(thing).__module__.startswith("torchdata.nodes.") and "_iter_for_state_dict" in inside:
        yield thing, "_it"
    elif depth:
        for value in list(inside.values()):
            yield from _loaders_in(value, depth - 1)


def _at_next_batch(iterator: Any, call: Callable[[], None]) -> None:
    cls = type(iterator)

    def following(self: Any) -> Any:
        batch = cls.__next__(self)  # a finished one has none
        self.__class__ = cls
        call()
        return batch

    _change_class(iterator, {"__next__": following})


def is_loader(thing: object) -> bool:
    """Whether something attached yields batches."""
    own = isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
    return not own and hasattr(type(thing), "__iter__")


def is_torchdata(cls: type) -> bool:
    """Whether this is the class StatefulDataLoader, or made of it. A loader of Accelerate has such
    a class as its `__class__`, and another type."""
    return any(
        base.__name__ == "StatefulDataLoader" and base.__module__.startswith("torchdata.")
        for base in cls.__mro__
    )


def has_position(name: str, thing: object) -> bool:
    """Whether the state of something attached counts what one rank has had of its data."""
    return name == "loader" or is_torchdata(thing.__class__)


def stateless_sampler(loader: Any) -> str:
    """The class of torch's sampler in this StatefulDataLoader, if it draws an order that no state
    gives again; else "". torchdata has a RandomSampler of its own for shuffle=True."""
    if not is_torchdata(type(loader)):
        return ""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return type(sampler).__name__ if type(sampler) in drawing else ""


def begin_again(thing: Any) -> None:
    """attach() asked for the state: a StatefulDataLoader may have read ahead in another epoch."""
    if is_torchdata(thing.__class__):
        thing.load_state_dict({})


def set_again(loader: Any, set_generators: Callable[[], None]) -> None:
    """Calls `set_generators` once: for torch's loaders right after their next iterator was made,
    for others when the first batch of their next iteration arrives."""
    if hasattr(loader, "_get_iterator"):
        after_iterator(loader, lambda: set_generators)
    else:
        _at_first_batch(loader, set_generators)


def count_once(thing: Any) -> None:
    """Something attached has got its state. A StatefulDataLoader skips the batches of a data set
    without a state one by one when its next iterator is made, and torchdata counts them a second
    time: the next restore would skip twice as many."""
    if is_torchdata(type(thing)):
        after_iterator(thing, lambda: lambda: None)


def undo_draws(loader: Any) -> None:
    """Undoes what a StatefulDataLoader draws when it makes its next iterator, at any time."""
    after_iterator(loader, lambda: functools.partial(restore_rng, capture_rng()))


def after_iterator(loader: Any, before: Callable[[], Callable[[], None]]) -> None:
    """Calls `before` ahead of the next iterator, and what `before` returned right after it. At the
    end of an epoch a loader makes a second iterator, which draws as in uninterrupted training."""

    def get_iterator() -> Any:
        vars(loader).pop("_get_iterator", None)
        set_generators = before()
        made = made_iterator(loader)
        set_generators()
        return made

    loader._get_iterator = get_iterator


def made_iterator(loader: Any) -> Any:
    """A new iterator of a loader of torch or torchdata, with the count of the loader's state."""
    state = getattr(loader, "next_iter_state", None)
    made = type(loader)._get_iterator(loader)
    if state and is_torchdata(type(loader)):
        _correct_count(made, state)
    return made


def _correct_count(made: Any, state: dict[str, Any]) -> None:
    """Gives an iterator the count of the state from which it was made. With worker processes the
    state is the last snapshot, and how many batches came after it."""
    snapshot = state.get("_snapshot")
    if snapshot is None:
        made._num_yielded = state["_num_yielded"]
        return
    twice = made._num_yielded - snapshot["_snapshot_step"] - state["_steps_since_snapshot"]
    made._num_yielded -= twice
    made._snapshot["_snapshot_step"] -= twice


def _at_first_batch(loader: Any, set_generators: Callable[[], None]) -> None:
    cls = type(loader)
    cls = getattr(cls, "_pccheck_class", cls)  # of an earlier restore

    def once(self: Any) -> Iterator[Any]:
        self.__class__ = cls
        return _first(iter(self), set_generators)

    _change_class(loader, {"__iter__": once, "_pccheck_class": cls}, cls)


def _change_class(thing: Any, body: dict[str, Any], base: type | None = None) -> None:
    cls = base or type(thing)
    body |= {"__module__": cls.__module__}
    try:
        thing.__class__ = types.new_class(cls.__name__, (cls,), exec_body=lambda n: n.update(body))
    except TypeError as error:
        LOG.debug("the next batch of a %s is not noticed: %s", cls.__name__, error)


def _first(batches: Iterator[Any], set_generators: Callable[[], None]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number == 0:
            set_generators()
        yield batch
