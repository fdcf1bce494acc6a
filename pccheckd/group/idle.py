"""When the disk is idle: what is in memory only is written then. All volumes are on one disk, so
this looks at the ranks of every job, and no checkpoint that is for the disk is delayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from pccheckd.tenancy.tenant import Tenant

#: The next checkpoint for the disk is this many times as far away as a write takes: trainers are
#: not regular, and neither are disks.
MARGIN = 2.0


class Use(NamedTuple):
    """What a rank does with the disk."""

    moves: bool  # a checkpoint of it is on a lane, or waits for one
    saves: bool  # its trainer saves to the disk, too ...
    next_s: float  # ... and until it does, as far as is known; inf: it has not yet


def is_idle(mine: Iterable[Use], others: Iterable[Use], write_s: float) -> bool:
    """Whether the disk takes a write of so long, of a job whose ranks are `mine`. A job that saves
    to the disk as well gives it nothing more: its own next one would find memory full."""
    return all(not (one.moves or one.saves) for one in mine) and all(
        not one.moves and not (one.saves and one.next_s <= MARGIN * write_s) for one in others
    )


class IdleDisk:
    """Owned by the registry: jobs ask for the disk here."""

    def __init__(
        self, tenants: Callable[[], Iterable[Tenant]], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._tenants = tenants  # of all jobs
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []  # jobs that found it busy, by their `look`
        self._last: Callable[[], None] | None = None  # the one that got it last

    def takes(self, mine: Collection[Tenant], look: Callable[[], None]) -> bool:
        """Whether the job with these ranks may write now what it has in memory. If other jobs have
        the disk, `look` is called once it may be idle, in turn."""
        if look in self._waiting:
            self._waiting.remove(look)
        uses = [self._use(tenant) for tenant in mine]
        if not is_idle(uses, (), 0.0):
            return False
        others = [tenant for tenant in self._tenants() if tenant not in mine]
        if self._moves(others):
            self._waiting.append(look)
            return False
        if not is_idle(uses, map(self._use, others), _write_s(mine, others)):
            return False
        if self._last == look and self._waiting:  # the others first
            self._call()
            look()
            return False
        self._last = look
        return True

    def moved(self) -> None:
        """A checkpoint may have ended: jobs that found the disk busy look again."""
        if self._waiting and not self._moves(self._tenants()):
            self._call()

    def _call(self) -> None:
        waiting, self._waiting = self._waiting, []
        for look in waiting:
            look()

    def _moves(self, tenants: Iterable[Tenant]) -> bool:
        return any(tenant.ledger.moving() for tenant in tenants)

    def _use(self, tenant: Tenant) -> Use:
        saves = tenant.seat.owner is not None and not tenant.unparking.fills_disk
        return Use(bool(tenant.ledger.moving()), saves, tenant.ledger.next_s(self._clock()))


def _write_s(mine: Iterable[Tenant], others: Iterable[Tenant]) -> float:
    """How long the disk has for the newest in memory of each rank, all at once; 0: not known."""
    known = max((tenant.ledger.bytes_per_s for tenant in others), default=0.0)
    longest = 0.0
    for tenant in mine:
        speed = tenant.ledger.bytes_per_s or known
        parked = tenant.ledger.parked()[-1:]
        if speed and parked:
            longest = max(longest, parked[0].payload_bytes / speed)
    return longest
