"""Who has how much of the DRAM budget.

A session that copies or loads claims the bytes that it needs. `shares.fair` turns the claims into
shares, and this module moves memory until each session has its share, by these rules:

1. While the budget holds what all sessions claim, nothing is taken back.
2. A session needs at least two chunks. When there are not two for each session, they are assigned
   in rounds, to one session of each user per round. A session that has memory and is assigned none
   ends. Of one user's sessions the newest ends first; one that saves or loads ends after those that
   do not. A session that reconnects is refused, with the numbers, until there is room.
3. Else tenants without a trainer give memory back, in the order in which their trainers ended:
   their memory is a cache. A trainer that ended less than LEFT_ALONE_S ago may return and recover
   from the cache, so the cache stays, unless a session that never had its share needs room.
4. Then live sessions give back what exceeds their share, the largest excess first.
5. Free memory goes to sessions below their share, first to those with less than two chunks.

The limit of a user (--max-dram-per-user) is a budget of its own, and all rules apply to it. That
user's caches count, too; rule 3 takes them without waiting.

So the sessions of one user, however many, leave a session of another user two chunks, as long as
there are two chunks for each user. Users share the rest as `fair` computes.

Shares change only when a session begins, ends or claims more. Rules 3 to 5 take no session below
its share and bring none above it, so no memory moves while the sessions stay the same."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pccheck_wire.basics import size_text, some
from pccheck_wire.errors import RefusedError
from pccheckd.base.background import Background, happened
from pccheckd.base.errors import SHORTAGE_HINT
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.core.port import Port
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key

from .shares import Demand, fair

if TYPE_CHECKING:
    from .sessions import Session

LEFT_ALONE_S = 60.0
#: A trainer's Register has a deadline of half a minute; it gets its answer before that.
CLAIM_LIMIT_S = 15.0
PAUSE_S = 1.0
_RETRY_S = 0.05


@dataclass(slots=True, eq=False)
class Claim:
    by: Session
    port: Port
    who: Key
    wanted_bytes: int
    share_bytes: int = 0
    settled: bool = False  # it has had its share

    @property
    def lacks_bytes(self) -> int:
        return max(0, self.share_bytes - self.port.aim_bytes)

    @property
    def excess_bytes(self) -> int:
        return max(0, self.port.aim_bytes - max(self.share_bytes, self.port.floor_bytes))

    @property
    def lacks_least(self) -> bool:
        return self.port.granted_bytes < self.port.least_bytes


class Memory(Background):
    """Owns the claims. On the loop only; memory itself moves in the ports' threads."""

    def __init__(self, engine: Engine, tenants: Callable[[], Iterable[Tenant]]) -> None:
        self._config = engine.config
        self._engine = engine
        self._tenants = tenants
        self._claims: dict[int, Claim] = {}  # by session
        self._releasing: dict[Port, asyncio.Task[None]] = {}
        self._ending: set[Port] = set()  # of sessions that end so that others get two chunks
        self._changed = asyncio.Event()
        self._stale = True  # something has changed since the last balance
        self._balanced_s = 0.0

    # -- claims --------------------------------------------------------------------------------

    async def claim(self, by: Session, wanted_bytes: int) -> int:
        """DRAM for a session: at least two chunks when this returns; more follows in the
        background, up to its fair share. Returns the present amount. Raises RefusedError with the
        numbers."""
        claim = self.enter(by, wanted_bytes)
        port = claim.port
        claim.settled = claim.settled and wanted_bytes <= claim.wanted_bytes
        claim.wanted_bytes = max(wanted_bytes, port.least_bytes)
        self._stale = True
        deadline = time.monotonic() + CLAIM_LIMIT_S
        if port.granted_bytes:
            await port.send_segments()
        while True:
            self._changed.clear()
            if self._claims.get(by.number) is not claim:
                raise RefusedError("the session has ended")
            # Once for all that wait.
            if self._stale or time.monotonic() - self._balanced_s >= _RETRY_S:
                self.balance()
            if not claim.lacks_least:
                return port.granted_bytes
            self._require_room(claim)
            if time.monotonic() > deadline:  # the claim stays, so that the next try finds room
                raise self._too_late(claim)
            await happened(self._changed, _RETRY_S)

    def enter(self, by: Session, wanted_bytes: int) -> Claim:
        """The claim of a session; a new one claims `wanted_bytes`. Raises RefusedError."""
        if by.port is None or by.tenant is None or by.ending:
            raise RefusedError("the session has ended")
        claim = self._claims.get(by.number)
        if claim is None:
            wanted = max(by.port.least_bytes, wanted_bytes)
            claim = self._claims[by.number] = Claim(by, by.port, by.tenant.key, wanted)
        return claim

    def gone(self, session: int) -> None:
        """The session has ended: its memory is a cache now, or was given back."""
        claim = self._claims.pop(session, None)
        if claim is not None:
            self._ending.discard(claim.port)

    def share_bytes(self, session: int) -> int:
        claim = self._claims.get(session)
        return claim.share_bytes if claim is not None else 0

    def wanted_bytes(self, port: Port) -> int:
        """What the session of a port claims; 0 without a session."""
        return next((c.wanted_bytes for c in self._claims.values() if c.port is port), 0)

    def used_bytes(self) -> dict[int, int]:
        """DRAM by user: of sessions, and of tenants without one."""
        used: Counter[int] = Counter()
        for uid, port in self._ports():
            used[uid] += port.granted_bytes
        return dict(used)

    # -- who gets what -------------------------------------------------------------------------

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S)
            self.balance()

    def balance(self) -> None:
        """Decides, and starts to move memory."""
        self._stale, self._balanced_s = False, time.monotonic()
        if self._claims:
            self._divide()
            self._end_surplus()
            self._renew()
            self._make_room()
            self._hand_out()

    def _divide(self) -> None:
        claims = list(self._claims.values())
        shares = fair(
            max(0, self._engine.pool.usage()[0] - self._bound_bytes()),
            [Demand(c.by.uid, c.port.least_bytes, c.wanted_bytes, c.port.chunk_bytes, self._turn(c))
             for c in claims],
            self._config.max_dram_per_user_bytes,
        )  # fmt: skip
        for claim, share in zip(claims, shares, strict=True):
            claim.share_bytes = share

    def _turn(self, claim: Claim) -> int:
        """Of one user's sessions the lower turns get their two chunks first: a new session ends no
        other session of its user, and a session is not ended twice."""
        if claim.port in self._ending:
            return 3
        if not claim.port.granted_bytes:
            return 2
        return 0 if claim.by.is_busy() else 1

    def _end_surplus(self) -> None:
        """Rule 2. Without a new session of another user, or a lower limit, this ends none: what the
        sessions have fits into the budget."""
        for claim in self._claims.values():
            port = claim.port
            if claim.share_bytes or not port.granted_bytes or port in self._ending:
                continue
            LOG.warning(
                "%s: session ended: the DRAM is too small for two chunks for each of %d sessions. "
                "This user has the most sessions, or exceeds --max-dram-per-user. The client "
                "reconnects when memory is free; raise --dram or lower --chunk",
                claim.who, len(self._claims),
            )  # fmt: skip
            self._ending.add(port)
            claim.by.give_way()

    def _renew(self) -> None:
        """Replaces memory that a process of an earlier session may still write to."""
        for claim in self._claims.values():
            if claim.port.left and claim.port not in self._ending:
                self._resize(claim, claim.port.aim_bytes)

    def _make_room(self) -> None:
        """Rules 1, 3 and 4, for each user's own limit and then for the budget."""
        claims = [claim for claim in self._claims.values() if claim.port not in self._ending]
        limit = self._config.max_dram_per_user_bytes
        for uid in {claim.by.uid for claim in claims} if limit else ():
            mine = [claim for claim in claims if claim.by.uid == uid]
            will = sum(self._will_bytes(port) for owner, port in self._ports() if owner == uid)
            self._take(mine, will + sum(c.lacks_bytes for c in mine) - limit, uid)
        budget, used = self._engine.pool.usage()
        will = used + sum(self._will_bytes(p) - p.granted_bytes for _, p in self._ports())
        self._take(claims, will + sum(claim.lacks_bytes for claim in claims) - budget, None)

    def _take(self, claims: list[Claim], short: int, uid: int | None) -> None:
        """Makes tenants and sessions give back `short` bytes: those of one user, or of all."""
        now_ns = time.monotonic_ns()
        urgent = uid is not None or any(c.lacks_bytes and not c.settled for c in claims)
        for tenant in sorted(self._without_trainer(uid), key=lambda t: t.last_used_ns):
            port = tenant.port
            if short <= 0 or port is None:
                break
            if not tenant.quiet:  # as its checkpoints are written
                short -= port.aim_bytes - _least(tenant, port)
                port.resize(_least(tenant, port), self._moved, stuck=lambda: None)  # no trainer
            elif urgent or tenant.finished or now_ns - tenant.last_used_ns > LEFT_ALONE_S * 1e9:
                short -= port.granted_bytes
                self._releasing[port] = asyncio.create_task(self._release(tenant, port))
        for claim in sorted(claims, key=lambda claim: -claim.excess_bytes):
            back = min(claim.excess_bytes, short)
            if back <= 0:
                return
            LOG.info("%s: returns %s of DRAM for others", claim.who, size_text(back))
            self._resize(claim, claim.port.aim_bytes - back)
            short -= back

    def _hand_out(self) -> None:
        """Rule 5. Memory of sessions that are growing has been promised already."""
        budget, used = self._engine.pool.usage()
        limit = self._config.max_dram_per_user_bytes
        promised: Counter[int] = Counter()
        for uid, port in self._ports():
            promised[uid] += max(0, port.aim_bytes - port.granted_bytes)
        has = self.used_bytes()
        free = budget - used - promised.total()
        for claim in sorted(self._claims.values(), key=lambda claim: not claim.lacks_least):
            uid, more = claim.by.uid, min(claim.lacks_bytes, free)
            if limit:
                more = min(more, limit - has[uid] - promised[uid])
            more -= more % claim.port.chunk_bytes
            if more > 0:
                self._resize(claim, claim.port.aim_bytes + more)
                free -= more
                promised[uid] += more
            enough = 0 < claim.share_bytes <= claim.port.granted_bytes
            claim.settled = claim.settled or enough

    def _resize(self, claim: Claim, aim_bytes: int) -> None:
        claim.port.resize(aim_bytes, self._moved, claim.by.keeps_memory)

    # -- small ---------------------------------------------------------------------------------

    def _will_bytes(self, port: Port) -> int:
        """What a port has when the present resizes have ended."""
        return 0 if port in self._releasing or port in self._ending else port.aim_bytes

    def _without_trainer(self, uid: int | None) -> list[Tenant]:
        """Tenants, of one user or of all, that can return memory: caches, written checkpoints."""
        claimed = {claim.port for claim in self._claims.values()}
        found = []
        for tenant in self._tenants():
            port = tenant.port
            if port is None or port in claimed or port in self._releasing or tenant.lock.locked():
                continue
            has_more = port.aim_bytes > _least(tenant, port)
            if tenant.owner is None and has_more and uid in (None, tenant.key.uid):
                found.append(tenant)
        return found

    def _bound_bytes(self) -> int:
        """Memory that is in use until a disk has ended its writes."""
        claimed = {claim.port for claim in self._claims.values()}
        return sum(
            max(tenant.port.least_bytes, tenant.port.floor_bytes)
            for tenant in self._tenants()
            if tenant.port is not None and tenant.port not in claimed and tenant.ledger.live()
        )

    async def _release(self, tenant: Tenant, port: Port) -> None:
        """Makes a tenant without a trainer give back all its memory."""
        try:
            async with tenant.lock:
                ours = tenant.owner is None and tenant.port is port  # no trainer came meanwhile
                if ours and await port.release_memory():
                    LOG.info("%s: its cache was released for others", tenant.key)
        finally:
            del self._releasing[port]
            self._moved()

    def _moved(self) -> None:
        """The amount of memory has changed."""
        self._stale = True
        self._changed.set()

    def _ports(self) -> Iterator[tuple[int, Port]]:
        """Every port with memory, and its user."""
        seen = set()
        for claim in self._claims.values():
            seen.add(claim.port)
            yield claim.by.uid, claim.port
        for tenant in self._tenants():
            if tenant.port is not None and tenant.port not in seen:
                yield tenant.key.uid, tenant.port

    def _require_room(self, claim: Claim) -> None:
        """Raises RefusedError when there are no two chunks for it: waiting does not help."""
        by, least = claim.by, claim.port.least_bytes
        limit, budget = self._config.max_dram_per_user_bytes, self._engine.pool.usage()[0]
        mine = [one for one in self._claims.values() if one.by.uid == by.uid]
        needs = f"{claim.who} needs at least two chunks ({size_text(least)}) of DRAM"
        refusal = None
        if limit and sum(one.port.least_bytes for one in mine) > limit:
            used = [
                f"{one.who} has {size_text(one.port.granted_bytes)}"
                for one in mine
                if one is not claim
            ]
            refusal = RefusedError(
                f"{needs}, and the limit of uid {by.uid} is {size_text(limit)} "
                f"(--max-dram-per-user): {some(used) or 'nothing is used'}",
                hint="end one of these jobs (pccheckctl drop frees the cache of an ended one), or "
                "raise --max-dram-per-user", retryable=True,
            )  # fmt: skip
        elif sum(one.port.least_bytes for one in self._claims.values()) > budget:
            refusal = RefusedError(
                f"{needs}, and {size_text(budget)} (--dram) are less than two chunks for each of "
                f"{len(self._claims)} sessions, {len(mine)} of them of uid {by.uid}",
                hint="end some of these sessions, raise --dram, or lower --chunk",
                retryable=True,
            )  # fmt: skip
        # Without a claim, memory under way could not be taken back.
        if refusal is not None and claim.share_bytes < least and not claim.port.resizes:
            self.gone(by.number)
            raise refusal

    def _too_late(self, claim: Claim) -> RefusedError:
        budget, used = self._engine.pool.usage()
        back = sum(max(0, p.granted_bytes - self._will_bytes(p)) for _, p in self._ports())
        least = claim.port.least_bytes
        needs = (
            f"{claim.who} needs at least two chunks ({size_text(least)}) of DRAM: "
            f"{size_text(used)} of {size_text(budget)} (--dram) are used"
        )
        if used + least <= budget:
            return RefusedError(
                f"{needs}, but the system refuses the rest: memory limit reached",
                hint=f"lower --dram of pccheckd, or {SHORTAGE_HINT}", retryable=True,
            )  # fmt: skip
        return RefusedError(
            f"{needs}; {size_text(back)} of them are being returned, which took longer than "
            f"{CLAIM_LIMIT_S:g} s",
            hint="try again; if it fails again, check for a slow disk or a stopped trainer: "
            "pccheckctl status", retryable=True,
        )  # fmt: skip


def _least(tenant: Tenant, port: Port) -> int:
    """What a tenant without a trainer keeps: nothing once its checkpoints are written."""
    return 0 if tenant.quiet else max(port.least_bytes, port.floor_bytes)
