"""Reads checkpoints without training: for tools, and for integrations with other frameworks."""

from __future__ import annotations

import os

from pccheck.job.naming import identify
from pccheck.options import check_step
from pccheck.restoring.opened import OpenCheckpoint
from pccheck_native import catalog
from pccheck_store.directory import which
from pccheck_store.jobs import Stored, checkpoints_of, find_source
from pccheck_store.reading.state_reader import open_chosen
from pccheck_wire.basics import Closing, did_you_mean, some
from pccheck_wire.errors import NoCheckpointError, RefusedError


class Reader(Closing):
    """Finds and reads the checkpoints of one job, also while it trains. Use it as a context
    manager: it closes what it has opened.

    `job` is named as for PCcheckClient. A Reader asks the daemon. With `storage` it reads that
    directory, without a daemon or through the private daemon that serves the directory. Only the
    owner of the job and root may read it; `uid` chooses among jobs of several users.

    Raises DaemonUnreachableError, NoStoreError, RefusedError, UsageError.
    """

    def __init__(
        self,
        job: str | None = None,
        *,
        storage: str | os.PathLike[str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        uid: int | None = None,
    ) -> None:
        self.job = identify(job, 0, 1).job
        if uid is not None and os.geteuid() not in (0, uid):
            raise RefusedError(
                f"uid {os.geteuid()} may not read checkpoints of uid {uid}",
                hint="read them as that user or as root",
            )
        self._uid = uid
        self._source = find_source(storage, socket)
        self._open: list[OpenCheckpoint] = []

    def close(self) -> None:
        """Closes what was opened. May be called again."""
        while self._open:
            self._open.pop().close()

    def steps(self) -> list[Stored]:
        """Every checkpoint of the job, newest first; also those that only some ranks have."""
        return [stored for stored, _ in checkpoints_of(self._source, self.job, self._uid)]

    def newest(self) -> Stored | None:
        """The newest checkpoint that every rank of its world has, undamaged: the one that
        restore() takes. None when there is none."""
        return next((stored for stored in self.steps() if stored.complete), None)

    def open(
        self, step: int | None = None, *, sequence: int | None = None, partial: bool = False
    ) -> OpenCheckpoint:
        """Opens the newest complete checkpoint, of `step` or with `sequence` if given. Through a
        daemon it is leased: newer checkpoints do not replace it before it is closed or this process
        ends. When a new checkpoint would otherwise have no slot, the lease on the oldest checkpoint
        ends, and later reads of that checkpoint raise RecycledError.

        `partial`: also one of which only some ranks are here, such as those of one node of several.
        What they have saved can be read; `ranks` says which they are.

        Raises NoCheckpointError when there is none.
        """
        wanted = None if step is None else check_step(step)

        def choose() -> list[catalog.StoredCheckpoint]:
            return self._chosen(wanted, sequence, partial)

        opened = open_chosen(self._source, choose, OpenCheckpoint, partial=partial)
        self._open.append(opened)
        return opened

    def _chosen(
        self, step: int | None, sequence: int | None, partial: bool
    ) -> list[catalog.StoredCheckpoint]:
        """The parts of the chosen checkpoint, by rank."""
        found = checkpoints_of(self._source, self.job, self._uid)
        fits = [
            (stored, parts) for stored, parts in found
            if step in (None, stored.step) and sequence in (None, stored.sequence)
        ]  # fmt: skip
        for stored, parts in fits:
            if stored.complete or partial:
                return parts
        raise self._none(step, sequence, [stored for stored, _ in (fits or found)], bool(fits))

    def _none(
        self, step: int | None, sequence: int | None, near: list[Stored], chosen: bool
    ) -> NoCheckpointError:
        what = f"checkpoint{which(step, sequence)}"
        if not near:
            jobs = sorted({one.id.job for one in self._source.held(uid=self._uid).checkpoints})
            return NoCheckpointError(
                f"job {self.job!r} has no checkpoint in {self._source.path}",
                hint=f"{did_you_mean([self.job], jobs)}see: pccheckctl list",
            )
        if not chosen:
            return NoCheckpointError(
                f"job {self.job!r} has no {what}; it has steps {some(one.step for one in near)}",
                hint="newer checkpoints replace older ones; client.pin(step) keeps one",
            )
        best = near[0]
        damaged = [rank for rank, one in best.ranks.items() if one.damaged]
        lacking = [rank for rank in range(best.world_size) if rank not in best.ranks]
        why = f"damaged on ranks {damaged}" if damaged else f"missing on ranks {lacking}"
        return NoCheckpointError(
            f"job {self.job!r} has no {what} that is complete on every rank: "
            f"step {best.step} is {why}",
            hint=f"see: pccheckctl list {self.job}; open(partial=True) reads what is here",
        )
