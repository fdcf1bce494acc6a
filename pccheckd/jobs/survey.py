"""Before READY, the commit records of every volume are read once, so that an unreadable disk or
volume is reported at the start, and not when a job resumes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from pccheck_native import catalog
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine

#: A slower disk does not delay the start any longer.
LIMIT_S = 10.0
NAMED_MAX = 8  # unreadable volumes with a line each in the log


@dataclass(frozen=True, slots=True)
class Survey:
    """The result; `complete` is False when the limit came first."""

    volumes: int = 0
    checkpoints: int = 0
    unreadable: int = 0
    complete: bool = True

    def __str__(self) -> str:
        if not self.complete:
            return "the volumes could not be read"
        unreadable = f", {self.unreadable} unreadable" if self.unreadable else ""
        return f"{self.volumes} volumes with {self.checkpoints} checkpoints{unreadable}"


async def take(engine: Engine) -> Survey:
    """Reads records only; data is verified when it is recovered. Never raises for a bad volume."""
    storage = engine.config.storage
    scan = asyncio.create_task(engine.look(os.getuid(), catalog.scan, storage))
    done, _ = await asyncio.wait({scan}, timeout=LIMIT_S)
    if not done:
        scan.add_done_callback(_looked_at)
        LOG.error(
            "the volumes in %s could not be listed within %g s: check the disk (dmesg)",
            storage, LIMIT_S,
        )  # fmt: skip
        return Survey(complete=False)
    try:
        found = scan.result()
    except OSError as error:
        LOG.error("the volumes in %s cannot be listed: %s", storage, error)
        return Survey(complete=False)
    for item in found.unreadable[:NAMED_MAX]:
        LOG.warning("%s cannot be read: %s", item.file.path, item.reason)
    survey = Survey(len(found.volumes), len(found.checkpoints), len(found.unreadable))
    LOG.info("%s holds %s", storage, survey)
    return survey


def _looked_at(task: asyncio.Task[catalog.Catalog]) -> None:
    """It came too late: its result is dropped."""
    if not task.cancelled():
        task.exception()
