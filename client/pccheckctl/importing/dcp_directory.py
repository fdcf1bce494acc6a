"""A directory of torch.distributed.checkpoint, of any number of ranks. Pickles in it may name only
what such a directory has: nothing in it is executed."""

from __future__ import annotations

import io
import math
import pickle
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from pccheck_store.selection import contiguous_strides
from pccheck_wire.errors import PccheckError, UnsupportedStateError
from pccheckctl.export.torch_file import noted_step, storages

from .found import Imported
from .torch_file import refused

#: What the metadata of a directory consists of.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def read(path: Path) -> Imported:
    """Raises UnsupportedStateError for pickles that need code, PccheckError for what is damaged."""
    reader = _Reader(path)
    try:
        metadata = reader.read_metadata()
        flat = _places(metadata)
        with warnings.catch_warnings(action="ignore"):  # torch misses a process group
            load(flat, storage_reader=reader, planner=_Planner(path), no_dist=True)
        names = metadata.planner_data
        nested = unflatten_state_dict(flat, names) if isinstance(names, dict) else flat
        return Imported.of_state(_numbered(nested), noted_step(path))
    except CheckpointException as error:
        failure: BaseException = next(iter(error.failures.values()))[0]
    except Exception as error:  # of a damaged or a foreign file
        failure = error
    raise _why(path, failure)


def _why(path: Path, error: BaseException) -> BaseException:
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    if isinstance(error, (PccheckError, OSError)) and not missing:
        return error
    if isinstance(error, pickle.UnpicklingError):
        return refused(path, error)
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return PccheckError(
        f"{path} is not a complete directory of torch.distributed.checkpoint: {reason}",
        hint="name the directory that has the file .metadata, with the files of all ranks",
    )


def _places(metadata: Metadata) -> dict[str, Any]:
    """Memory for every tensor, or, where all would take more than half of the memory, a file."""
    found = metadata.state_dict_metadata
    tensors = {k: v for k, v in found.items() if isinstance(v, TensorStorageMetadata)}
    sizes = {
        name: math.prod(one.size) * one.properties.dtype.itemsize for name, one in tensors.items()
    }
    make = storages(sizes.values(), Path(tempfile.gettempdir()))
    places: dict[str, Any] = dict.fromkeys(found)
    for name, one in tensors.items():
        made = torch.empty(0, dtype=one.properties.dtype)
        places[name] = made.set_(make(sizes[name]), 0, one.size, contiguous_strides(one.size))
    return places


def _numbered(value: Any) -> Any:
    """torch.distributed.checkpoint makes texts of keys: those of an optimizer's state are numbers
    again. It leaves out empty dicts: an optimizer without state, such as SGD, has one."""
    if isinstance(value, list):
        return [_numbered(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _numbered(item) for key, item in value.items()}
    listed = made.get("param_groups")
    groups = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if any("params" in group for group in groups):
        state = made.setdefault("state", {})
        members = [one for group in groups for one in group.get("params") or ()]
        if isinstance(state, dict) and all(type(one) is int for one in members):
            made["state"] = {int(k) if k.isdecimal() else k: v for k, v in state.items()}
    return made


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: Any, **_more: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError("its .metadata holds another kind of object")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            return lambda *parts: "/".join(parts)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11 pickles an enum's member
            return _member
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _member(owner: type, name: str) -> object:
    from enum import EnumType

    if not isinstance(owner, EnumType):
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    return owner.__members__[name]


class _Planner(DefaultLoadPlanner):
    """Loads values as safely as tensors are loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsupportedStateError(
                f"{name}: {refused(self._path, error).message}",
                hint="where you trust it, load it in Python, and save it without that value",
            ) from error
        self.original_state_dict[name] = loaded
