"""A PCcheckClient in the process has checkpoints of its own, in a job of its own. A snapshot notes
which; a restore says when the process should rather be started again from one of those."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from pccheck_native import _core
from pccheck_store.documents import rows, whole
from pccheck_store.observer import Observer
from pccheck_store.reading.source import Source


def newest_steps(jobs: Iterable[str], socket: str | None) -> dict[str, int]:
    """Of each training job of this user, the newest step that the daemon holds; 0: none."""
    with Observer(socket) as observer:
        listed = {job: rows(observer.listing(job, uid=os.geteuid()), "checkpoints") for job in jobs}
    return {
        job: max((whole(one, "step") for one in found), default=0) for job, found in listed.items()
    }


def later(source: Source, seen: Mapping[str, int]) -> list[str]:
    """What the jobs of the process hold that is newer than what its client had seen: a restored
    process would make these steps again."""
    found = []
    for job, step in seen.items():
        held = source.held(job=job, uid=os.geteuid()).checkpoints
        steps = [one.id.step for one in held if not one.flags & _core.SLOT_IMAGE]
        if steps and max(steps) > step:
            found.append(
                f"job {job!r} has a checkpoint of step {max(steps)}, and the client in this "
                f"snapshot knows step {step}: start the program again to go on from the newer one"
            )
    return found
