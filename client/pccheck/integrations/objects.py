"""Objects of named classes as plain values: what a framework puts into a state dict (enums,
configurations), without pickle. Nothing but these classes is ever made of a checkpoint."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from pccheck_wire import tree
from pccheck_wire.errors import StateMismatchError, UnsupportedStateError, UsageError

#: The key by which the stored form, a dict, says that it stands for an object.
OBJECT = "pccheck.object"

_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_SEQUENCES = (list, tuple)
_CUSTOM = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")


class Objects:
    """Enums, and objects whose whole state is in their `__dict__`, as dicts and back."""

    def __init__(self, classes: Iterable[type], hint: str) -> None:
        """`hint`: how the script names a class. Raises UsageError for a class that is neither."""
        self._classes: dict[str, type] = {}
        self._hint = hint
        for cls in classes:
            if not isinstance(cls, type) or not (issubclass(cls, Enum) or _is_plain(cls)):
                raise UsageError(
                    f"objects of {cls!r} cannot be stored as their attributes",
                    hint="name enums and classes without __slots__ and __reduce__, or store the "
                    "values of the object",
                )
            self._classes[_name(cls)] = cls

    def plain(self, value: object, path: str) -> object:
        """A copy with dicts in the place of objects. What is neither a container nor of a known
        class stays as it is. Raises UnsupportedStateError by path."""

        def described(item: Any, where: str) -> object:
            if isinstance(item, dict) and OBJECT in item:
                raise UnsupportedStateError(
                    f"{where}: the key {OBJECT!r} is reserved for objects", hint="use another key"
                )
            name = _name(type(item))
            if name not in self._classes:
                return item
            state = item.value if isinstance(item, Enum) else vars(item)
            return {OBJECT: name, "state": rebuilt(state, described, f"{where}.state")}

        return rebuilt(value, described, path)

    def made(self, value: object, path: str) -> object:
        """What `plain` was given. Raises StateMismatchError for a class that is not named."""

        def remade(item: Any, where: str) -> object:
            if not isinstance(item, dict) or OBJECT not in item:
                return item
            cls = self._classes.get(item[OBJECT])
            if cls is None:
                raise StateMismatchError(
                    f"{where} was an object of {item[OBJECT]}, and PCcheck makes only objects of "
                    "classes that the script names",
                    hint=self._hint,
                )
            state: Any = rebuilt(item["state"], remade, f"{where}.state")
            if issubclass(cls, Enum):
                try:
                    return cls(state)
                except ValueError as error:
                    raise StateMismatchError(
                        f"{where}: {state!r} is not a value of {cls.__name__}"
                    ) from error
            one = cls.__new__(cls)
            vars(one).update(state)
            return one

        return rebuilt(value, remade, path)


def rebuilt(value: Any, change: Callable[[Any, str], Any], path: str, inside: Any = ()) -> Any:
    """`value` with `change(item, path)` in the place of each item, containers as well; what is a
    container afterwards is copied, and so on for its items. Raises UnsupportedStateError."""
    found = change(value, path)
    if found is not value or type(value) not in _MAPPINGS + _SEQUENCES:
        return found
    if id(value) in inside:
        raise UnsupportedStateError(f"{path}: the container contains itself")
    inside = (*inside, id(value))
    if type(value) in _SEQUENCES:
        items = enumerate(value)
        return type(value)(rebuilt(v, change, tree.join(path, i), inside) for i, v in items)
    made = copy.copy(value)
    for key, item in value.items():
        made[key] = rebuilt(item, change, tree.join(path, key), inside)
    return made


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_plain(cls: type) -> bool:
    """Whether its objects are what is in their `__dict__`: nothing customises their copies."""
    return (
        cls is not object
        and all(getattr(cls, name) is getattr(object, name) for name in _CUSTOM)
        and not hasattr(cls, "__setstate__")
        and not any(vars(one).get("__slots__") for one in cls.__mro__)
    )
