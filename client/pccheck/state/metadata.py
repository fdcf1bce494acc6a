"""What `checkpoint(metadata=)` takes: a dict by value, in the types of JSON, for every reader."""

from __future__ import annotations

import collections
import datetime
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pccheck.warn import in_words
from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError

from .flatten import Flattener

METADATA_NUMBERS_MAX = 65536  # of one array
METADATA_DEPTH_MAX = 64


def metadata_node(value: object) -> tree.Node:
    """Raises UnsupportedStateError by path."""
    return None if value is None else Flattener().node(_json(value, "metadata", 0), "metadata")


def _json(value: Any, path: str, depth: int) -> Any:
    try:
        return _converted(value, path, depth)
    except UnsupportedStateError:
        raise
    except Exception as error:  # of a method; also without a value, or on a lost GPU
        raise UnsupportedStateError(
            f"{path}: type {type(value).__name__} cannot be read as metadata: {in_words(error)}",
            hint="use numbers, text, dicts and lists",
        ) from error


def _converted(value: Any, path: str, depth: int) -> Any:
    if depth > METADATA_DEPTH_MAX:
        raise UnsupportedStateError(
            f"{path[:80]}: nested more than {METADATA_DEPTH_MAX} levels deep",
            hint="attach it instead: attach(extra={...})",
        )
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        count = int(np.prod(value.shape))
        if count > METADATA_NUMBERS_MAX:
            raise UnsupportedStateError(
                f"{path} has {count} numbers, and the limit in metadata is {METADATA_NUMBERS_MAX}",
                hint="attach it instead: attach(extra={...})",
            )
        value = value.tolist()
    if value is None or type(value) in (bool, int, float, str):
        return value
    for plain in (bool, int, float, str):  # enumerations, NumPy's str
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Mapping):
        return {_key(k, path): _json(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [_json(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise UnsupportedStateError(
        f"{path}: type {type(value).__name__} cannot be metadata",
        hint="use numbers, text, dicts and lists; attach the rest: attach(extra={...})",
    )


def _key(key: object, path: str) -> str:
    if isinstance(key, (str, int, float, np.generic)):
        return str(key)
    raise UnsupportedStateError(
        f"{path}: the key {key!r:.80} is neither text nor a number", hint="use str(key)"
    )
