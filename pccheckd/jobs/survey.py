"""Before READY, the commit records of every volume are read once, so that an unreadable disk or
volume is reported at the start, and not when a job resumes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pccheck_native import catalog, layout
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.tenancy.volumes import Key

#: A slower disk does not delay the start any longer.
LIMIT_S = 10.0
NAMED_MAX = 8  # unreadable volumes with a line each in the log


class Fault(NamedTuple):
    """A volume, or a directory that may have volumes, whose checkpoints may be missing."""

    key: Key  # a directory of all jobs of a user: job ""
    path: Path
    text: str
    mark: tuple[int, ...]  # what was there then


@dataclass(slots=True)
class Survey:
    """The result; `complete` is False when the limit came first."""

    volumes: int = 0
    checkpoints: int = 0
    complete: bool = True
    faults: list[Fault] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.complete:
            return "the volumes could not be read"
        unreadable = f", {len(self.faults)} unreadable" if self.faults else ""
        return f"{self.volumes} volumes with {self.checkpoints} checkpoints{unreadable}"

    def look(self) -> None:
        """Forgets the faults of files that have changed since: a daemon reads them again when
        their job is loaded. Blocks."""
        self.faults = [fault for fault in self.faults if layout.mark(fault.path) == fault.mark]


async def take(engine: Engine) -> Survey:
    """Reads records only; data is verified when it is recovered. Never raises for a bad volume."""
    storage = engine.config.storage
    scan = asyncio.create_task(engine.look(os.getuid(), _read, storage))
    done, _ = await asyncio.wait({scan}, timeout=LIMIT_S)
    if not done:
        scan.add_done_callback(lambda late: late.cancelled() or late.exception())  # dropped
        LOG.error(
            "the volumes in %s could not be listed within %g s: check the disk (dmesg)",
            storage, LIMIT_S,
        )  # fmt: skip
        return Survey(complete=False)
    try:
        survey = scan.result()
    except OSError as error:
        LOG.error("the volumes in %s cannot be listed: %s", storage, error)
        return Survey(complete=False)
    for fault in survey.faults[:NAMED_MAX]:
        LOG.warning("%s", fault.text)
    LOG.info("%s holds %s", storage, survey)
    return survey


def _read(storage: Path) -> Survey:
    found = catalog.scan(storage)
    told = [(one.file, f"{one.file.path} cannot be read: {one.reason}") for one in found.unreadable]
    told += [(file, f"{file.path}: {catalog.RECORD_LOST}") for file in found.incomplete]
    faults = [
        Fault(Key(file.uid, file.job, file.rank), file.path, text, layout.mark(file.path))
        for file, text in told
    ]
    return Survey(len(found.volumes), len(found.checkpoints), faults=faults)
