"""A state -> nodes of the tree, and views on memory.

Nothing is copied here. What cannot be represented is refused by its path in the state.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError
from pccheck_wire.tree import ITEM_BYTES, Node, Tag

from . import devices, shards
from .extents import View

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)
}
#: What torch makes of the sequences of a tree.
SEQUENCES = tree.SEQUENCES | {Tag.SIZE: torch.Size}
_FACTORIES = {factory: name for name, factory in tree.FACTORIES.items()}
_ARRAY_KINDS = "biufcSUmM"
_KEY_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes))


class Flattener:
    """Collects nodes and views of one state or of several."""

    def __init__(self, row: shards.DividingRanks = shards.ALONE) -> None:
        """`row`: replicas of DTensors on these ranks are stored once."""
        self.views: list[View] = []
        self._row = row
        self.sharded = False  #: whether any of it is a DTensor
        self._open: set[int] = set()  # the containers around the value

    def node(self, value: object, path: str) -> Node:
        """The node of a value; its tensors are added to `views`.

        Raises UnsupportedStateError that names the path of what cannot be represented.
        """
        make = _MAKERS.get(type(value))
        if make is not None:
            return make(self, value, path)
        if issubclass(type(value), np.generic):  # isinstance() runs code of a proxy
            return _scalar(value, path)
        if shards.is_sharded(value):
            return self.shard(value, path)
        raise _unsupported(value, path)

    def _enter(self, owner: object, path: str) -> None:
        if id(owner) in self._open:
            raise UnsupportedStateError(
                f"{path}: the container contains itself", hint="save it without the cycle"
            )
        if len(self._open) >= tree.DEPTH_MAX - 4:
            raise UnsupportedStateError(
                f"{path}: nested more than {tree.DEPTH_MAX - 4} levels deep",
                hint="save a flatter structure",
            )
        self._open.add(id(owner))

    def sequence(self, value: Any, path: str) -> Node:
        if set(map(type, value)) <= _KEY_TYPES:  # long lists of numbers: parameter ids, generators
            return tree.Sequence(_SEQUENCE_TAGS[type(value)], list(value))
        self._enter(value, path)
        items = [self.node(item, tree.join(path, index)) for index, item in enumerate(value)]
        self._open.discard(id(value))
        return tree.Sequence(_SEQUENCE_TAGS[type(value)], items)

    def hashed(self, value: Any, path: str) -> Node:
        return tree.Sequence(
            _SEQUENCE_TAGS[type(value)], [_key(item, f"{path}{{...}}") for item in tuple(value)]
        )

    def mapping(self, value: Any, path: str) -> Node:
        self._enter(value, path)
        items: list[tuple[Node, Node]] = []
        for key, item in tuple(value.items()):  # another thread may add some meanwhile
            key_node = _key(key, path)
            items.append((key_node, self.node(item, tree.join(path, key))))
        factory, attributes = "", None
        if type(value) is collections.defaultdict:
            factory = _factory(value.default_factory, path)
        elif type(value) is collections.OrderedDict and hasattr(value, "_metadata"):
            attributes = self.node(value._metadata, f"{path}._metadata")
        self._open.discard(id(value))
        return tree.Mapping(_MAPPING_TAGS[type(value)], items, factory, attributes)

    def tensor(self, value: Any, path: str) -> tree.Tensor:
        _check_tensor(value, path)
        device = devices.device_of(value)
        flags = tree.REQUIRES_GRAD if value.requires_grad else 0
        if device != devices.HOST:
            flags |= tree.ON_DEVICE
        if type(value) is torch.nn.Parameter:
            flags |= tree.PARAMETER
        elif getattr(value, "_is_buffer", False):
            flags |= tree.BUFFER
        node = tree.Tensor(list(value.shape), list(value.stride()), DTYPE_NAMES[value.dtype], flags)
        nbytes = tree.span_bytes(node.shape, node.strides, ITEM_BYTES[node.dtype])
        if nbytes:
            storage = value.untyped_storage()
            _require_memory(storage, value.data_ptr() + nbytes, path)
            self.views.append(
                View(
                    path, node, value.data_ptr(), nbytes, storage.data_ptr(), storage,
                    device=device, tensor=value,
                )
            )  # fmt: skip
        return node

    def shard(self, value: Any, path: str) -> Node:
        """The local part of a DTensor, or what this rank stores of that part."""
        if type(shards.LOCAL(value)) is not torch.Tensor:
            raise _unsupported(shards.LOCAL(value), path)
        part, offsets = shards.stored_part(value, shards.offsets_of(value, path), self._row, path)
        node = self._block(part, path)
        node.flags |= tree.REQUIRES_GRAD if value.requires_grad else 0
        node.flags |= tree.PARAMETER if isinstance(value, torch.nn.Parameter) else 0
        mesh = value.device_mesh
        return tree.Shard(
            node, list(value.shape), offsets, list(mesh.shape), list(mesh.mesh_dim_names or ()),
            list(map(str, value.placements)),
        )  # fmt: skip

    def block(self, value: shards.Shard, path: str) -> Node:
        """A block that is given with its place, without a mesh."""
        part = value.tensor
        places = zip(value.offsets, part.shape, value.shape, strict=False)
        if not part.dim() == len(value.shape) == len(value.offsets) or any(
            at < 0 or at + size > whole for at, size, whole in places
        ):
            raise UnsupportedStateError(
                f"{path}: a Shard of {tuple(part.shape)} at {tuple(value.offsets)} is not inside "
                f"of a tensor of {tuple(value.shape)}",
                hint="Shard(tensor, shape of the whole tensor, offsets in it)",
            )
        node = self._block(part, path)
        return tree.Shard(node, list(value.shape), list(value.offsets), [], [], [])

    def _block(self, part: torch.Tensor, path: str) -> tree.Tensor:
        if type(part) not in (torch.Tensor, torch.nn.Parameter):
            raise _unsupported(part, path)
        first = len(self.views)
        node = self.tensor(part, path)
        for view in self.views[first:]:
            view.sharded = True
        self.sharded = True
        return node

    def array(self, value: Any, path: str) -> Node:
        if value.dtype.kind not in _ARRAY_KINDS:
            raise UnsupportedStateError(
                f"{path}: a NumPy array of dtype {value.dtype} cannot be stored",
                hint="convert it to numbers or text",
            )
        order = "C" if value.flags.c_contiguous else "F"
        if not value.flags.forc:
            value = np.ascontiguousarray(value)
            order = "C"
        node = tree.Array(value.dtype.str, list(value.shape), order, value.nbytes)
        if value.nbytes:
            address = value.__array_interface__["data"][0]
            constant = type(value.base) is bytes  # NumPy never makes such an array writeable
            self.views.append(
                View(path, node, address, value.nbytes, address, value, constant=constant)
            )
        return node


def _plain(_flattener: Flattener, value: Any, _path: str) -> Node:
    node: Node = value
    return node


def _dtype(_flattener: Flattener, value: Any, path: str) -> Node:
    if value not in DTYPE_NAMES:
        raise UnsupportedStateError(f"{path}: the dtype {value} cannot be stored")
    return tree.Named(Tag.DTYPE, DTYPE_NAMES[value])


_SEQUENCE_TAGS: dict[Any, Tag] = {made: tag for tag, made in SEQUENCES.items()}
_MAPPING_TAGS: dict[Any, Tag] = {
    dict: Tag.DICT, collections.OrderedDict: Tag.ORDERED, collections.Counter: Tag.COUNTER,
    collections.defaultdict: Tag.DEFAULT,
}  # fmt: skip
_MAKERS: dict[type, Callable[[Flattener, Any, str], Node]] = {
    **dict.fromkeys(_KEY_TYPES, _plain),
    **dict.fromkeys((list, tuple, torch.Size), Flattener.sequence),
    **dict.fromkeys((set, frozenset), Flattener.hashed),
    **dict.fromkeys(_MAPPING_TAGS, Flattener.mapping),
    **dict.fromkeys((torch.Tensor, torch.nn.Parameter), Flattener.tensor),
    np.ndarray: Flattener.array,
    torch.dtype: _dtype,
    torch.device: lambda _, value, __: tree.Named(Tag.DEVICE, str(value)),
    shards.Shard: Flattener.block,
    tree.Sequence: _plain,
}


def _key(value: object, path: str) -> Node:
    """A key of a mapping or an item of a set: a scalar, or a tuple or frozenset of such."""
    if type(value) in _KEY_TYPES:
        return value  # type: ignore[return-value]
    if type(value) in (tuple, frozenset):
        items = [_key(item, path) for item in value]  # type: ignore[attr-defined]
        return tree.Sequence(_SEQUENCE_TAGS[type(value)], items)
    raise UnsupportedStateError(
        f"{path}: a key or set item of type {type_name(value)} cannot be stored",
        hint="use int, str, float, bool, None, bytes, complex, or tuples of those",
    )


def _factory(made_by: object, path: str) -> str:
    """The name of a defaultdict's factory."""
    for factory, name in _FACTORIES.items():
        if factory is made_by:  # == and hash() may be code of the user
            return name
    raise UnsupportedStateError(
        f"{path}: a defaultdict with a factory of type {type_name(made_by)} cannot be stored",
        hint=f"use a dict, or one of {', '.join(filter(None, tree.FACTORIES))}",
    )


def _scalar(value: Any, path: str) -> Node:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedStateError(
            f"{path}: a NumPy scalar of dtype {value.dtype} cannot be stored"
        )
    return tree.Scalar(value.dtype.str, value.tobytes())


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _unsupported(value: object, path: str) -> UnsupportedStateError:
    where = path or "the state"
    if issubclass(type(value), torch.Tensor):
        return UnsupportedStateError(
            f"{where}: a tensor of the subclass {type_name(value)} cannot be stored",
            hint="pass its plain tensors, or leave it out",
        )
    return UnsupportedStateError(
        f"{where}: a value of type {type_name(value)} cannot be stored",
        hint="convert it to plain Python values, tensors or NumPy arrays, or leave it out",
    )


def _require_memory(storage: torch.UntypedStorage, end: int, path: str) -> None:
    """Raises for a tensor without its memory, which sharding frameworks leave behind."""
    if storage.data_ptr() == 0 or end > storage.data_ptr() + storage.nbytes():
        raise UnsupportedStateError(
            f"{path or 'the state'}: a tensor whose memory was freed cannot be stored",
            hint="leave it out, or save when its memory is there",
        )


def require_storable(value: torch.Tensor, path: str) -> None:
    """Raises as `Flattener.node()` does, much faster. What is in a DTensor is not checked."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        _check_tensor(value, path)
    elif not shards.is_sharded(value):
        raise _unsupported(value, path)


def _check_tensor(value: torch.Tensor, path: str) -> None:
    why = hint = ""
    if value.is_nested:
        why = "a nested tensor"
    elif value.layout is not torch.strided:
        why = f"a tensor of layout {value.layout}"
        is_sparse = value.layout is not torch._mkldnn  # type: ignore[attr-defined]
        hint = "store its indices and values" if is_sparse else "pass tensor.to_dense()"
    elif value.device.type == "meta":
        why = "a tensor on the meta device, which has no data"
    elif value.device.type not in ("cpu", "cuda"):
        why = f"a tensor on {value.device}"
        hint = "pass tensor.cpu(): only CPU and CUDA tensors are saved directly"
    elif devices.device_of(value) >= devices.DEVICES_MAX:
        why = f"a tensor on {value.device}, beyond {devices.DEVICES_MAX} GPUs,"
        hint = "show this process its own GPUs only, by CUDA_VISIBLE_DEVICES"
    elif value.is_quantized or value.dtype not in DTYPE_NAMES:
        why = f"a tensor of dtype {value.dtype}"
        hint = "pass its int_repr(), and its scale and zero point" if value.is_quantized else ""
    elif value.is_conj() or value.is_neg():
        why = "a lazily conjugated or negated view"
        hint = "call .resolve_conj() or .resolve_neg()"
    elif torch._C._functorch.is_functorch_wrapped_tensor(value):
        why = "a tensor inside of a functorch transform"
    if why:
        raise UnsupportedStateError(f"{path or 'the state'}: {why} cannot be stored", hint=hint)
