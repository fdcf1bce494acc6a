"""A job: the ranks of one user's training run. It numbers incarnations and decides for the group:
which step all ranks recover, which step is global."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pccheck_native import catalog
from pccheck_wire.errors import NoCheckpointError, RefusedError, WaitTimeoutError

from .logs import LOG
from .tenants import Tenant
from .volumes import GLOBAL

SETTLE_LIMIT_S = 600.0

#: (incarnation, step): what ranks have in common.
Common = tuple[int, int]


class Job:
    """Owned by the registry; its tenants come and go, its incarnations only grow."""

    def __init__(self, uid: int, name: str) -> None:
        self.uid = uid
        self.name = name
        self.incarnation = 0
        self.launch = ""
        self.tenants: dict[int, Tenant] = {}
        self.lock = asyncio.Lock()
        self.joining = asyncio.Lock()  # held while a rank becomes a member
        self._joined: set[int] = set()
        self._decisions: dict[int | None, Common | None] = {}
        self._global: Common | None = None
        self._global_lock = asyncio.Lock()

    @property
    def idle(self) -> bool:
        """No rank of it is connected, written or read: it may be closed."""
        return all(tenant.idle for tenant in self.tenants.values())

    @property
    def leaving(self) -> bool:
        """A rank's trainer has ended, and is being drained."""
        return any(tenant.leaving for tenant in self.tenants.values())

    def join(self, rank: int, launch: str) -> int:
        """The incarnation of a rank that connects.

        Ranks that say the same launch share one; without a launch a rank that connects a second
        time starts the next, and the others join it.
        """
        known = max((t.volumes.newest_incarnation() for t in self.tenants.values()), default=0)
        again = launch != self.launch if launch else rank in self._joined
        if not self._joined or again:
            self.incarnation = max(self.incarnation, known) + 1
            self.launch = launch
            self._joined.clear()
            self._decisions.clear()
            self._global = None  # said again, in case the flags were lost or let go
        self._joined.add(rank)
        return self.incarnation

    async def decide(
        self, world_size: int, step: int | None, incarnation: int, *, memoise: bool
    ) -> Common | None:
        """What every rank of the group recovers in this incarnation; None when no rank has
        anything. With `memoise` decided once, so that ranks that ask later get the same.

        Raises NoCheckpointError with the numbers when ranks have nothing in common.
        """
        async with self.lock:
            if memoise and incarnation != self.incarnation:
                raise RefusedError(
                    "another rank has started the job anew", hint="restart all ranks of the job"
                )
            if memoise and step in self._decisions:
                return self._decisions[step]
            for tenant in list(self.tenants.values()):
                if not await tenant.ledger.settled(SETTLE_LIMIT_S, before_incarnation=incarnation):
                    raise WaitTimeoutError(
                        f"{tenant.key}: checkpoints of the run before are still being written"
                    )
                await tenant.volumes.refresh()
            decision = self._common(world_size, step)
            if memoise:
                await self.update_global(world_size)  # or a faster rank recycles it
                self._decisions[step] = decision
            LOG.info("job %r of uid %d recovers (run, step) %s", self.name, self.uid, decision)
            return decision

    def _common(self, world_size: int, step: int | None) -> Common | None:
        having = self._checkpoints(world_size)
        if not any(having.values()):
            return None
        wanted = {
            rank: [found for found in checkpoints if step in (None, found.step)]
            for rank, checkpoints in having.items()
        }
        shared = catalog.common_step(wanted, world_size)
        if shared is None:
            missing = [rank for rank, checkpoints in wanted.items() if not checkpoints]
            what = "no step" if step is None else f"step {step} is not one"
            raise NoCheckpointError(
                f"{what} that all {world_size} ranks of job {self.name!r} have durable "
                f"(ranks without: {missing or 'none'}; newest steps: {_newest(having)})",
                hint="start as many ranks as in the run before, on this node, or with fresh=True",
            )
        return shared.incarnation, shared.step

    def sequence_of(self, rank: int, common: Common) -> int:
        """The newest checkpoint of a rank with this incarnation and step; 0 without one."""
        tenant = self.tenants.get(rank)
        for found in tenant.volumes.checkpoints() if tenant else []:
            if (found.incarnation, found.step) == common:
                return found.sequence
        return 0

    async def update_global(self, world_size: int) -> None:
        """Flags the newest step that every rank has durable, so that no rank recycles it.

        The one before loses its flag only when every rank has the new one flagged.
        """
        async with self._global_lock:
            if len(self.tenants) < world_size:
                return
            shared = catalog.common_step(self._checkpoints(world_size), world_size)
            if shared is None or (shared.incarnation, shared.step) == self._global:
                return
            newest = shared.incarnation, shared.step
            for rank in range(world_size):
                sequence = self.sequence_of(rank, newest)
                if not await self.tenants[rank].retention.flag(sequence, set_=GLOBAL):
                    return  # recycled meanwhile: the older one stays the global one
            self._global = newest
            for rank in range(world_size):
                await self.tenants[rank].became_global(self.sequence_of(rank, newest))

    def _checkpoints(self, world_size: int) -> dict[int, list[catalog.Checkpoint]]:
        return {
            rank: self.tenants[rank].readable() if rank in self.tenants else []
            for rank in range(world_size)
        }


def _newest(having: Mapping[int, list[catalog.Checkpoint]]) -> str:
    newest = [f"rank {rank}: {found[0].step}" for rank, found in having.items() if found]
    return ", ".join(newest[:8]) or "none"
