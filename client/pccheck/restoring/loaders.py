"""Data loaders after a restore: making their iterator draws random numbers, which the continued
training drew long before its checkpoint. So the generators are set a second time after that."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pccheck.warn import LOG


def is_loader(thing: object) -> bool:
    """Whether something attached yields batches."""
    own = isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
    return not own and hasattr(type(thing), "__iter__")


def is_torchdata(thing: object) -> bool:
    """Whether this is a StatefulDataLoader, or one of Accelerate's around it: that one shows the
    inner loader's class as its `__class__`."""
    return any(
        cls.__name__ == "StatefulDataLoader" and cls.__module__.startswith("torchdata.")
        for cls in thing.__class__.__mro__
    )


def has_position(name: str, thing: object) -> bool:
    """Whether the state of something attached counts what one rank has had of its data."""
    return name == "loader" or is_torchdata(thing)


def begin_again(thing: Any) -> None:
    """attach() asks for the state, for which a StatefulDataLoader makes an iterator: it may have
    read ahead in the order of another epoch."""
    if is_torchdata(thing):
        thing.load_state_dict({})


def set_again(loader: Any, set_generators: Callable[[], None]) -> None:
    """Calls `set_generators` once: for torch's loaders right after their next iterator was made,
    for others when the first batch of their next iteration arrives."""
    if hasattr(loader, "_get_iterator"):
        _after_iterator(loader, set_generators)
    else:
        _at_first_batch(loader, set_generators)


def _after_iterator(loader: Any, set_generators: Callable[[], None]) -> None:
    """At the end of an epoch a loader makes a second iterator, which draws as in uninterrupted
    training."""
    vars(loader).pop("_get_iterator", None)  # of an earlier restore
    make = loader._get_iterator

    def get_iterator() -> Any:
        vars(loader).pop("_get_iterator", None)
        made = make()
        set_generators()
        return made

    loader._get_iterator = get_iterator


def _at_first_batch(loader: Any, set_generators: Callable[[], None]) -> None:
    cls = type(loader)
    cls = getattr(cls, "_pccheck_class", cls)  # of an earlier restore

    def once(self: Any) -> Iterator[Any]:
        self.__class__ = cls
        return _first(iter(self), set_generators)

    body = {"__iter__": once, "__module__": cls.__module__, "_pccheck_class": cls}
    try:
        loader.__class__ = types.new_class(cls.__name__, (cls,), exec_body=lambda n: n.update(body))
    except TypeError as error:
        LOG.debug("generators are not set a second time for a %s: %s", cls.__name__, error)


def _first(batches: Iterator[Any], set_generators: Callable[[], None]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number == 0:
            set_generators()
        yield batch
