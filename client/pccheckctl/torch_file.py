"""A checkpoint as a file for `torch.load(weights_only=True)`, or as a directory for
`torch.distributed.checkpoint`. Imports torch, and only this does.

What that loader refuses by default becomes the nearest thing it takes: NumPy arrays and scalars
become tensors and Python numbers, defaultdicts dicts, frozensets sets; each is noted by its path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

from pccheck_wire import tree
from pccheck_wire.errors import PccheckError, StorageFullError, UnsupportedStateError
from pccheck_wire.tree import Node, Tag

from .output_file import Output, OutputDirectory, OutputFile
from .reading import Reader
from .strides import contiguous_strides
from .subtree import extents_of
from .torch_names import NUMPY_TO_TORCH

#: dtypes that torch can hold but not save; their bytes are.
_UNSAVED = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    + ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"]
)


def write(reader: Reader, content: tree.Tree, output: Output) -> list[str]:
    """Fills `output`; every byte is checked on the way. Returns what was changed, by path.

    Raises DamagedError, or PccheckError when torch is not installed.
    """
    try:
        with signals_held():
            import torch

            from pccheck.restoring import rebuild

            from .spill import Room
    except ImportError as error:
        raise PccheckError(
            f"a torch file needs torch and NumPy, which cannot be imported: {error}",
            hint="pip install 'pccheck[torch]', or write safetensors: FILE.safetensors",
        ) from error
    plain = Plain(content.extents)
    root = plain.node(content.root, "")
    if isinstance(output, OutputDirectory):
        named(root)
    wanted = extents_of(root)
    with Room([content.extents[index] for index in wanted], output.target.parent) as room:
        memory = rebuild.Memory(content.extents, wanted, room.storage)
        if wanted:
            reader.read_into(memory.ranges)
        state = rebuild.state_of(memory, root)
        with _disk_errors(output.target.parent):
            if isinstance(output, OutputDirectory):
                _save_directory(state, output)
            else:
                assert isinstance(output, OutputFile)
                with os.fdopen(os.dup(output.descriptor), "wb") as file:
                    torch.save(state, file)
    return plain.changed


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM count when this ends: modules that torch tries to import swallow them, or
    are left half imported."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    """torch hides what the disk said, and that we are to end, behind errors of its own, some of
    which are no Exceptions."""
    try:
        yield
    except BaseException as error:
        hidden = _hidden(error)
        if isinstance(hidden, OSError) and hidden.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(
                f"{where} has no room for this state", hint="choose another --output"
            ) from error
        if hidden is None and not isinstance(error, PccheckError):
            raise UnsupportedStateError(
                f"torch cannot save this state: {_reason(error)}",
                hint="use --only NAME, or another --format",
            ) from error
        if hidden in (None, error):
            raise
        raise hidden from None


def _reason(error: BaseException) -> str:
    """What torch.distributed.checkpoint wraps, in a line."""
    wrapped = [found for found, _ in getattr(error, "failures", {}).values()]
    text = str(wrapped[0] if wrapped else error) or type(error).__name__
    return text.splitlines()[0]


def _hidden(error: BaseException) -> BaseException | None:
    """The first of these behind an error, or the error itself."""
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if isinstance(one, (OSError, KeyboardInterrupt, SystemExit)):
            return one
        if one is not None:
            left += [one.__cause__, one.__context__]
            left += [found for found, _ in getattr(one, "failures", {}).values()]
    return None


def named(root: Node) -> None:
    """Raises UnsupportedStateError for a state that a directory cannot hold."""
    if not isinstance(root, tree.Mapping) or not all(isinstance(key, str) for key, _ in root.items):
        raise UnsupportedStateError(
            "torch.distributed.checkpoint saves dicts with names, and this state is none",
            hint="use --only NAME, or --format torch",
        )


def _save_directory(state: dict[str, object], output: OutputDirectory) -> None:
    with signals_held():
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(output.temporary, sync_files=True)
    try:
        with warnings.catch_warnings(action="ignore"):  # that no process group is there
            save(state, storage_writer=writer, no_dist=True)
    except ValueError as error:  # names that coincide once they are joined by dots
        raise UnsupportedStateError(
            f"torch.distributed.checkpoint cannot save this state: {error}",
            hint="use --only NAME, or --format torch",
        ) from error


class Plain:
    """Rewrites a tree into one that the safe loader takes; `changed` says where."""

    def __init__(self, extents: list[tree.Extent]) -> None:
        self.extents = extents
        self.changed: list[str] = []

    def node(self, node: Node, path: str, *, key: bool = False) -> Node:
        """The node as the loader takes it; `key`: it must stay hashable."""
        if isinstance(node, tree.Sequence):
            return self._sequence(node, path, key)
        if isinstance(node, tree.Mapping):
            return self._mapping(node, path)
        if isinstance(node, tree.Array):
            return self._array(node, path)
        if isinstance(node, tree.Scalar):
            return self._scalar(node, path)
        if isinstance(node, tree.Tensor) and node.dtype in _UNSAVED:
            self._note(path, f"{node.dtype} became bytes")
            width = tree.ITEM_BYTES[node.dtype]
            name = "uint8" if width == 1 else "int16"
            return tree.Tensor(
                node.shape, node.strides, name, node.flags & ~tree.REQUIRES_GRAD, node.extent,
                node.offset,
            )  # fmt: skip
        return node

    def _sequence(self, node: tree.Sequence, path: str, key: bool) -> Node:
        tag = node.tag
        if tag is Tag.FROZENSET:
            tag = Tag.TUPLE if key else Tag.SET
            self._note(path, f"frozenset became {tag.name.lower()}")
        inner = key or tag is Tag.SET
        items = [
            self.node(item, tree.join(path, index), key=inner)
            for index, item in enumerate(node.items)
        ]
        return tree.Sequence(tag, items)

    def _mapping(self, node: tree.Mapping, path: str) -> Node:
        tag = node.tag
        if tag is Tag.DEFAULT:
            tag = Tag.DICT
            self._note(path, "defaultdict became dict")
        items = [
            (
                self.node(name, path, key=True),
                self.node(value, tree.join(path, tree.plain(name))),
            )
            for name, value in node.items
        ]
        return tree.Mapping(tag, items, attributes=node.attributes)

    def _array(self, node: tree.Array, path: str) -> Node:
        dtype = NUMPY_TO_TORCH.get(node.dtype, "")
        lead = self.extents[node.extent].lead + node.offset if node.extent >= 0 else 0
        if not dtype or lead % tree.ITEM_BYTES[dtype]:
            self._note(path, f"array of {node.dtype} was left out")
            return None
        self._note(path, "array became tensor")
        strides = list(contiguous_strides(node.shape, order=node.order))
        return tree.Tensor(node.shape, strides, dtype, 0, node.extent, node.offset)

    def _scalar(self, node: tree.Scalar, path: str) -> Node:
        from pccheck.restoring import rebuild

        self._note(path, "NumPy scalar became Python's")
        if not node.data:
            return ""
        value = rebuild.scalar(node).item()
        return value if isinstance(value, (bool, int, float, complex, str, bytes)) else str(value)

    def _note(self, path: str, what: str) -> None:
        self.changed.append(f"{path or '.'}: {what}")
