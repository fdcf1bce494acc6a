"""How long finished jobs have been unused, in time that daemons have watched them.

The wall clock is not used: one that jumps (no NTP at boot, a bad RTC) would make every job old at
once. Only time on a running daemon's monotonic clock counts, kept over restarts in a small file.
Time without a daemon does not count, and losing the file restarts the count: a job may stay longer,
never shorter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pccheck_native.dropping import JobUse
from pccheckd.base import state_file

NAME = ".pccheckd.expiry.json"
SCHEMA = 1


@dataclass(slots=True)
class _Seen:
    last_write_s: float  # only compared, to notice new writes
    idle_s: float


class Idle:
    """The finished jobs of a storage directory; not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], _Seen] = {}

    def observe(self, finished: Iterable[JobUse], elapsed_s: float) -> None:
        """These are finished and not in use now, `elapsed_s` after the previous call. The count of
        any other job, and of one that was written to, restarts."""
        before, self._seen = self._seen, {}
        for job in finished:
            known = before.get((job.uid, job.job))
            same = known is not None and known.last_write_s == job.last_write_s
            idle_s = known.idle_s + elapsed_s if known is not None and same else 0.0
            self._seen[job.uid, job.job] = _Seen(job.last_write_s, idle_s)

    def idle_s(self, job: JobUse) -> float:
        known = self._seen.get((job.uid, job.job))
        return known.idle_s if known is not None else 0.0

    def load(self, storage: Path) -> None:
        """Loads the stored counts; invalid rows are skipped."""
        rows = state_file.load(storage / NAME, SCHEMA).get("jobs")
        for row in rows if isinstance(rows, list) else []:
            match row:
                case {
                    "uid": int(uid), "job": str(job), "last_write_s": float(last),
                    "idle_s": float(idle_s),
                }:  # fmt: skip
                    self._seen[uid, job] = _Seen(last, idle_s)

    def store(self, storage: Path) -> None:
        """Raises OSError."""
        rows = [
            {"uid": uid, "job": job, "last_write_s": seen.last_write_s, "idle_s": seen.idle_s}
            for (uid, job), seen in self._seen.items()
        ]
        state_file.store(storage / NAME, SCHEMA, {"jobs": rows})
