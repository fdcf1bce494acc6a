"""A checkpoint as a file for `torch.load(weights_only=True)`, or as a directory for
`torch.distributed.checkpoint`. Only this module imports torch, and only when it writes.

What that loader refuses becomes the nearest thing that it takes: NumPy arrays and scalars become
tensors and Python numbers, defaultdicts dicts, frozensets sets; each is noted with its path.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import signal
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pccheck_native.cgroups import available
from pccheck_store.reading.state_reader import StateReader
from pccheck_store.selection import as_tensor
from pccheck_wire import tree
from pccheck_wire.errors import PccheckError, StorageFullError, UnsupportedStateError
from pccheck_wire.tree import Node, Tag
from pccheckctl.output.files import NOTE, Output, reserve

if TYPE_CHECKING:
    import torch

_ALIGN = 64  # of torch's own memory, at least

#: dtypes that torch can hold but not save; their bytes are.
_UNSAVED = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    + ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"]
)


def write(reader: StateReader, content: tree.Tree, output: Output) -> list[str]:
    """Fills `output`; every byte is checked on the way. Returns what was changed, by path.

    Raises DamagedError, or PccheckError when torch is not installed.
    """
    try:
        with signals_held():
            import torch

            from pccheck.restoring import rebuild
            from pccheck.state.extents import pack
    except ImportError as error:
        raise PccheckError(
            f"cannot write a torch file without torch and NumPy: {error}",
            hint="pip install 'pccheck[torch]', or write safetensors: FILE.safetensors",
        ) from error
    plain = Plain(content.extents)
    root = plain.node(content.root, "")
    if output.directory:
        named(root)
    wanted = tree.extents_of(root)
    sizes = (content.extents[index].lead + content.extents[index].nbytes for index in wanted)
    place = output.target.parent
    memory = rebuild.Memory(content.extents, wanted, storages(sizes, place))
    if wanted:
        reader.read_into(pack(memory.ranges))
    state = rebuild.state_of(memory, root)
    with _disk_errors(place):
        if output.directory:
            _save_directory(state, output.temporary)
        else:
            with os.fdopen(os.dup(output.descriptor), "wb") as file:
                torch.save(state, file)
        _note_step(output, content.step)
    return plain.changed


def _note_step(output: Output, step: int) -> None:
    """Where no loader looks, `import` finds the step of the checkpoint again: in a file beside
    those of a directory, or as the comment of the archive that a torch file is."""
    note = json.dumps({"step": step}).encode()
    if output.directory:
        (output.temporary / NOTE).write_bytes(note)
        return
    with os.fdopen(os.dup(output.descriptor), "r+b") as file, zipfile.ZipFile(file, "a") as archive:
        archive.comment = note


def noted_step(path: Path) -> int | None:
    """What `write` noted; None for what other software wrote."""
    try:
        if path.is_dir():
            note = (path / NOTE).read_bytes()
        else:
            with zipfile.ZipFile(path) as archive:
                note = archive.comment
        step = json.loads(note)["step"]
    except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
        return None
    return step if type(step) is int and step >= 0 else None


def storages(sizes: Iterable[int], beside: Path) -> Callable[[int], torch.UntypedStorage]:
    """Makes storages of these sizes: in memory, or, when they would take more than half of the
    memory, in a file without a name, which goes with the last of them. Raises StorageFullError."""
    import torch

    total_bytes = sum(map(_aligned, sizes))
    if total_bytes <= available()[0] // 2:
        return lambda nbytes: torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryFile(dir=beside) as file:
        reserve(file.fileno(), total_bytes, beside)
        area = mmap.mmap(file.fileno(), total_bytes)
    used = 0

    def make(nbytes: int) -> torch.UntypedStorage:
        nonlocal used
        at, used = used, used + _aligned(nbytes)
        if nbytes == 0:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        bytes_of_file = torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=at)
        return bytes_of_file.untyped_storage()

    return make


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect when this ends: modules that torch imports swallow them, or
    would be left half imported. The thread of a progress bar takes none."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    """torch hides errors of the disk, and Ctrl-C, behind its own errors, some of which are not
    Exceptions."""
    try:
        yield
    except BaseException as error:
        wrapped = [found for found, _ in getattr(error, "failures", {}).values()]
        for one in _behind(error):
            if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFullError(
                    f"{where} has no space for this state", hint="choose another --output"
                ) from error
            if isinstance(one, (OSError, KeyboardInterrupt, SystemExit)):
                raise one from None
        if isinstance(error, PccheckError):
            raise
        reason = str(wrapped[0] if wrapped else error) or type(error).__name__
        raise UnsupportedStateError(
            f"torch cannot save this state: {reason.splitlines()[0]}",
            hint="use --only NAME, or another --format",
        ) from error


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error, then the errors that it wraps or follows."""
    if error is not None:
        yield error
        for found, _ in getattr(error, "failures", {}).values():
            yield from _behind(found)
        yield from _behind(error.__cause__)
        yield from _behind(error.__context__)


def named(root: Node) -> None:
    """Raises UnsupportedStateError for a state that a directory cannot hold."""
    if not isinstance(root, tree.Mapping) or not all(isinstance(key, str) for key, _ in root.items):
        raise UnsupportedStateError(
            "torch.distributed.checkpoint saves only dicts whose keys are strings",
            hint="use --only NAME, or --format torch",
        )


def _save_directory(state: dict[str, object], place: Path) -> None:
    with signals_held():
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(place, sync_files=True)
    try:
        with warnings.catch_warnings(action="ignore"):  # it misses a process group
            save(state, storage_writer=writer, no_dist=True)
    except ValueError as error:  # names that are equal once dots join them
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
        items = enumerate(node.items)
        return tree.Sequence(
            tag, [self.node(item, tree.join(path, index), key=inner) for index, item in items]
        )

    def _mapping(self, node: tree.Mapping, path: str) -> Node:
        tag = node.tag
        if tag is Tag.DEFAULT:
            tag = Tag.DICT
            self._note(path, "defaultdict became dict")
        items: list[tuple[Node, Node]] = []
        for name, value in node.items:
            inner = self.node(value, tree.join(path, tree.plain(name)))
            items.append((self.node(name, path, key=True), inner))
        return tree.Mapping(tag, items, attributes=node.attributes)

    def _array(self, node: tree.Array, path: str) -> Node:
        made = as_tensor(node)
        lead = self.extents[node.extent].lead + node.offset if node.extent >= 0 else 0
        if made is None or lead % tree.ITEM_BYTES[made.dtype]:
            self._note(path, f"array of {node.dtype} was left out")
            return None
        self._note(path, "array became tensor")
        return made

    def _scalar(self, node: tree.Scalar, path: str) -> Node:
        from pccheck.restoring import rebuild

        self._note(path, "NumPy scalar became Python's")
        if not node.data:
            return ""
        value = rebuild.scalar(node).item()
        return value if isinstance(value, (bool, int, float, complex, str, bytes)) else str(value)

    def _note(self, path: str, what: str) -> None:
        self.changed.append(f"{path or '.'}: {what}")
