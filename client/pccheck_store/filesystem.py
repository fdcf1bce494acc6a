"""`pccheck://JOB/STEP/NAME.safetensors` for fsspec: parts of checkpoints as files to read.

The files exist nowhere: the header is made from the tree, and the tensors are read from the volume,
at the offsets that the header gives them. Every byte is checked. Needs fsspec and no torch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem  # type: ignore[import-untyped]

from pccheck_native import catalog
from pccheck_wire import tree
from pccheck_wire.errors import UsageError

from .jobs import Stored, checkpoints_of, find_source
from .part_file import PartFile, parts_of
from .reading.source import Source
from .reading.state_reader import StateReader, open_chosen

NEWEST = "newest"  #: in the place of a step
ENDING = ".safetensors"


class PCcheckFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Jobs, in them the steps that can be restored (`newest` names the newest), and in a step a
    file for each part that has tensors: `model.safetensors`, `optimizer.safetensors`. What lies
    deeper can be opened, too: `model.layers.0.safetensors`. Names in a file begin after the part.

    It asks the daemon at `socket`, or reads the directory `storage`, as `pccheck.Reader` does;
    `uid` chooses among jobs of several users. An open file leases its checkpoint from the daemon.
    Missing jobs, steps and parts raise FileNotFoundError; reads raise as `Reader` does.
    """

    protocol = "pccheck"
    cachable = False  # a daemon may start or end

    def __init__(
        self,
        storage: str | None = None,
        socket: str | None = None,
        uid: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._place = storage, socket
        self._uid = uid

    @functools.cached_property
    def _source(self) -> Source:
        return find_source(*self._place)

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """Names, or with `detail` dicts: `name`, `type`, `size` in bytes, `mtime` in seconds since
        1970; of a step also `sequence`."""
        place = _Place.of(self._strip_protocol(path))
        if place.name:
            found = [self.info(path)]
        elif place.step:
            one, reader, content = self._opened(place)
            with reader:
                parts = parts_of(content)
                found = [_file(place, name, PartFile(one, reader, content, name)) for name in parts]
        elif place.job:
            found = [_step(place.job, stored) for stored, _ in self._checkpoints(place.job)]
        else:
            jobs = {one.id.job for one in self._source.held(uid=self._uid).checkpoints}
            found = [_directory(job) for job in sorted(jobs)]
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """As `ls` with `detail` has it."""
        place = _Place.of(self._strip_protocol(path))
        if not place.job:
            return _directory("")
        if not place.step:
            self._checkpoints(place.job)
            return _directory(place.job)
        if not place.name:
            return _step(place.job, self._chosen(place)[0]) | {"name": str(place)}
        one, reader, content = self._opened(place)
        with reader:
            return _file(place, place.name, PartFile(one, reader, content, place.name))

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any
    ) -> _OpenFile:
        if mode != "rb":
            raise UsageError(
                f"pccheck://{path} cannot be written: checkpoints are read here",
                hint="save with pccheck.PCcheckClient, or with pccheckctl import",
            )
        place = _Place.of(path)
        if not place.name:
            raise IsADirectoryError(path)
        one, reader, content = self._opened(place)
        try:
            file = PartFile(one, reader, content, place.name)
            options.pop("autocommit", None)
            return _OpenFile(self, path, file, block_size=block_size, **options)
        except BaseException:
            reader.close()
            raise

    def _checkpoints(self, job: str) -> list[tuple[Stored, list[catalog.StoredCheckpoint]]]:
        """Those that can be restored, newest first; of one step only the newest."""
        by_step: dict[int, tuple[Stored, list[catalog.StoredCheckpoint]]] = {}
        for stored, parts in checkpoints_of(self._source, job, self._uid):
            if stored.complete:
                by_step.setdefault(stored.step, (stored, parts))
        if not by_step:
            raise FileNotFoundError(f"job {job!r} has no checkpoint in {self._source.path}")
        return list(by_step.values())

    def _chosen(self, place: _Place) -> tuple[Stored, list[catalog.StoredCheckpoint]]:
        found = self._checkpoints(place.job)
        for stored, parts in found:
            if place.step in (NEWEST, str(stored.step)):
                return stored, parts
        steps = ", ".join(str(stored.step) for stored, _ in found)
        raise FileNotFoundError(f"job {place.job!r} has no step {place.step}; it has {steps}")

    def _opened(self, place: _Place) -> tuple[catalog.StoredCheckpoint, StateReader, tree.Tree]:
        return open_chosen(
            self._source,
            lambda: self._chosen(place)[1],
            lambda one, reader: (one, reader, reader.content()),
        )


class _Place(NamedTuple):
    """What a path names; the empty rest is absent."""

    job: str
    step: str
    name: str  #: of the file, without its ending

    @classmethod
    def of(cls, path: str) -> _Place:
        job, step, name, *more = [*path.strip("/").split("/"), "", "", ""][:4]
        if any(more) or (name and not name.endswith(ENDING)):
            raise FileNotFoundError(
                f"{path}: files are named JOB/STEP/NAME{ENDING}, such as JOB/newest/model{ENDING}"
            )
        return cls(job, step, name.removesuffix(ENDING))

    def __str__(self) -> str:
        parts = (self.job, self.step, self.name and self.name + ENDING)
        return "/".join(part for part in parts if part)


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "type": "directory", "size": 0}


def _step(job: str, stored: Stored) -> dict[str, Any]:
    durable_at = max(one.durable_at for one in stored.ranks.values())
    return _directory(f"{job}/{stored.step}") | {"mtime": durable_at, "sequence": stored.sequence}


def _file(place: _Place, name: str, file: PartFile) -> dict[str, Any]:
    found = {"type": "file", "size": file.size, "mtime": file.durable_at}
    return {"name": str(place._replace(name=name))} | found


class _OpenFile(AbstractBufferedFile):  # type: ignore[misc]
    def __init__(self, fs: PCcheckFileSystem, path: str, file: PartFile, **options: Any) -> None:
        self._file = file
        super().__init__(fs, path, "rb", size=file.size, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._file.read(start, end)

    def close(self) -> None:
        super().close()
        self._file.close()
