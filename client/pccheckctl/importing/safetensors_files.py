"""A safetensors file, or several with an index, as Hugging Face's libraries write them. The tensors
stay in the files until they are saved."""

from __future__ import annotations

import json
import math
import mmap
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pccheck_store.safetensors_layout import DTYPES, HEADER_BYTES_MAX, INDEX, PAIRS
from pccheck_wire.basics import some
from pccheck_wire.errors import DamagedError, PccheckError, UnsupportedStateError, UsageError

from .found import STEP_NAMES, Imported

_TORCH = {kind: name for name, kind in DTYPES.items()}


def read(path: Path) -> Imported:
    """Raises DamagedError, UnsupportedStateError, UsageError."""
    path = _chosen(path) if path.is_dir() else path
    if path.name.endswith(INDEX):
        tensors, metadata = _indexed(path)
    else:
        file = _File(path)
        tensors, metadata = {name: file.tensor(name) for name in file.entries}, file.metadata
    for name, kept in metadata.items():
        if isinstance(kept, str) and kept in tensors:
            tensors.setdefault(name, tensors[kept])  # tied, and stored once
    steps = [str(metadata.get(key, "")) for key in ("pccheck.step", *STEP_NAMES)]
    step = next((int(text) for text in steps if text.isdecimal()), None)
    whole_of = "" if "pccheck.only" in metadata else str(metadata.get("pccheck.job", ""))
    notes = [f"{name} is left out: it is not a tensor" for name in _values(metadata)]
    return Imported(tensors, step=step, flat=True, whole_of=whole_of, notes=notes)


def _values(metadata: Mapping[str, object]) -> list[str]:
    """What `pccheckctl export` has written beside the tensors."""
    try:
        found = json.loads(str(metadata.get("pccheck.values", "{}")))
    except ValueError:
        return []
    return list(found) if isinstance(found, dict) else []


def _chosen(place: Path) -> Path:
    """The file of a directory. Raises UsageError."""
    found = sorted(place.glob(f"*{INDEX}")) or sorted(place.glob("*.safetensors"))
    if len(found) != 1:
        raise UsageError(
            f"{place} has {len(found)} files, and any of them may be the model",
            hint=f"name one: {some(one.name for one in found)}" if found else "",
        )
    return found[0]


def _indexed(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        index = json.loads(path.read_bytes())
        names, metadata = index["weight_map"], index.get("metadata") or {}
        if not isinstance(names, dict) or not isinstance(metadata, dict):
            raise TypeError("weight_map or metadata is not an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"it is not an index: {error}") from error
    files: dict[str, _File] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, place in names.items():
        if not isinstance(place, str) or Path(place).name != place:
            raise _damaged(path, f"{place!r} is not the name of a file beside it")
        if place not in files:
            if not (path.parent / place).exists():
                raise PccheckError(
                    f"{path} names {place}, and there is no such file",
                    hint="copy all files of the model into one directory",
                )
            files[place] = _File(path.parent / place)
        if name not in files[place].entries:
            raise _damaged(path, f"{place} has no tensor {name!r}")
        tensors[name] = files[place].tensor(name)
    return tensors, metadata


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                (length,) = struct.unpack("<Q", file.read(8))
                if length > min(HEADER_BYTES_MAX, size - 8):
                    raise ValueError(f"a header of {length} bytes")
                header = json.loads(file.read(length))
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata: dict[str, Any] = header.pop("__metadata__", None) or {}
            self.entries: dict[str, Any] = header
            if not isinstance(self.metadata, dict):
                raise TypeError("its metadata is not an object")
        except (ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise _damaged(path, str(error)) from error
        self._base, self._end = 8 + length, size

    def tensor(self, name: str) -> torch.Tensor:
        """In a storage of its own, so that no tensor is saved as a part of another one."""
        try:
            entry = self.entries[name]
            kind, shape = entry["dtype"], list(entry["shape"])
            first, end = entry["data_offsets"]
            if kind not in _TORCH:
                raise UnsupportedStateError(
                    f"{self._path}: {name} has dtype {kind}, which torch or PCcheck lacks",
                    hint="convert it with the library that wrote it",
                )
            dtype = getattr(torch, _TORCH[kind])
            if kind == PAIRS:
                shape[-1], odd = divmod(shape[-1], 2)
                if odd:
                    raise ValueError("an odd number of pairs")
            if any(type(n) is not int or n < 0 for n in (*shape, first, end)):
                raise ValueError("a size below 0")
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes != end - first or self._base + end > self._end:
                raise ValueError(f"{end - first} bytes for {nbytes}")
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise _damaged(self._path, f"{name}: {error}") from error
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings(action="ignore"):  # the mapping is not writable
            data = torch.frombuffer(
                self._mapping, dtype=torch.uint8, count=nbytes, offset=self._base + first
            )
        return data.view(dtype).reshape(shape)


def _damaged(path: Path, reason: str) -> DamagedError:
    return DamagedError(
        f"{path} is not a complete safetensors file: {reason}",
        hint="copy or download it again; another format is named with --format",
    )
