"""Who has how much of the DRAM budget (--dram).

A session claims the bytes that it needs, and `shares.fair` divides the budget among the claims: the
`share` of each. Once a second, and after each change, these steps move memory in this order:

  step    when                         what moves
  end     two chunks for each session  A session without a share ends, if it has memory. A newer
          exceed the budget            session of a user ends before an older one, and one that
                                       neither saves nor loads before one that does.
  caches  sessions are below their     Tenants without a trainer give memory back, first that of the
          shares, too little is free   trainer that ended first. A cache younger than LEFT_ALONE_S
                                       is for a trainer that returns, and goes only to a session
                                       that never had its share.
  excess  caches were not enough       Live sessions give back what exceeds their shares, the
                                       largest excess first.
  grow    memory is free               Sessions below their shares get more, first those with less
                                       than two chunks.

The limit of a user (--max-dram-per-user) is a budget of its own for all steps; there young caches
go, too. While the sessions stay the same, shares stay the same, and no step takes a session below
its share or brings one above it: so memory comes to rest. However many sessions a user has, each
other user gets two chunks, as long as the budget has two chunks for each user."""

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
    had_share: bool = False  # all of what it claims now
    ends: bool = False  # so that others get two chunks

    @property
    def turn(self) -> int:
        """Of one user's sessions those with a lower turn get their two chunks first."""
        if self.ends:
            return 3  # a session ends only once
        if not self.port.grant.nbytes:
            return 2  # a new session ends no other session of its user
        return 0 if self.by.is_busy() else 1

    @property
    def lacks_bytes(self) -> int:
        return max(0, self.share_bytes - self.port.grant.aim_bytes)

    @property
    def excess_bytes(self) -> int:
        grant = self.port.grant
        return max(0, grant.aim_bytes - max(self.share_bytes, grant.floor_bytes))

    @property
    def lacks_least(self) -> bool:
        return self.port.grant.nbytes < self.port.grant.least_bytes


class Dram(Background):
    """Owns the claims. On the loop only; memory itself moves in the ports' threads."""

    def __init__(self, engine: Engine, tenants: Callable[[], Iterable[Tenant]]) -> None:
        self._config = engine.config
        self._engine = engine
        self._tenants = tenants
        self._claims: dict[int, Claim] = {}  # by session
        self._releasing: dict[Port, asyncio.Task[None]] = {}
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
        claim.had_share &= wanted_bytes <= claim.wanted_bytes
        claim.wanted_bytes = max(wanted_bytes, port.grant.least_bytes)
        self._stale = True
        deadline = time.monotonic() + CLAIM_LIMIT_S
        if port.grant.nbytes:
            await port.grant.send_segments()
        while True:
            self._changed.clear()
            if self._claims.get(by.number) is not claim:
                raise RefusedError("the session has ended")
            # Once for all that wait.
            if self._stale or time.monotonic() - self._balanced_s >= _RETRY_S:
                self.balance()
            if not claim.lacks_least:
                return port.grant.nbytes
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
            wanted = max(by.port.grant.least_bytes, wanted_bytes)
            claim = self._claims[by.number] = Claim(by, by.port, by.tenant.key, wanted)
        return claim

    def wanted_for(self, tenant: Tenant, payload_bytes: int, *, states: int = 2) -> int:
        """DRAM for so many checkpoints of this size, within the rank's share of the budget."""
        owner, port = tenant.seat.owner, tenant.binding.port
        if owner is None or port is None:
            raise RefusedError("the session has ended")
        chunk, budget = port.chunk_bytes, self._config.dram_bytes
        share = min(self._config.max_dram_per_user_bytes or budget, budget)
        wanted = -(-payload_bytes // chunk) * chunk * states
        most = share // owner.local_world_size // chunk * chunk
        return max(2 * chunk, min(wanted, most))

    def gone(self, session: int) -> None:
        """The session has ended: its memory is a cache now, or was given back."""
        self._claims.pop(session, None)

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
            used[uid] += port.grant.nbytes
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
            self._end()
            self._make_room()
            self._grow()

    def _divide(self) -> None:
        claims = list(self._claims.values())
        shares = fair(
            max(0, self._engine.pool.usage()[0] - self._bound_bytes()),
            [Demand(c.by.uid, c.port.grant.least_bytes, c.wanted_bytes, c.port.chunk_bytes, c.turn)
             for c in claims],
            self._config.max_dram_per_user_bytes,
        )  # fmt: skip
        for claim, share in zip(claims, shares, strict=True):
            claim.share_bytes = share

    def _end(self) -> None:
        for claim in self._claims.values():
            if claim.ends or claim.share_bytes or not claim.port.grant.nbytes:
                continue
            LOG.warning(
                "%s: session ended: the DRAM is too small for two chunks for each of %d sessions. "
                "This user has the most sessions, or exceeds --max-dram-per-user. The client "
                "reconnects when memory is free; raise --dram or lower --chunk",
                claim.who, len(self._claims),
            )  # fmt: skip
            claim.ends = True
            claim.by.give_way()

    def _make_room(self) -> None:
        """Takes what is missing from caches, then from excess: within each user's limit, then
        within the budget."""
        claims = [claim for claim in self._claims.values() if not claim.ends]
        limit = self._config.max_dram_per_user_bytes
        for uid in {claim.by.uid for claim in claims} if limit else ():
            mine = [claim for claim in claims if claim.by.uid == uid]
            will = sum(self._will_bytes(port) for owner, port in self._ports() if owner == uid)
            short = will + sum(c.lacks_bytes for c in mine) - limit
            self._take_excess(mine, self._take_caches(short, uid, young=True))
        budget, used = self._engine.pool.usage()
        will = used + sum(self._will_bytes(p) - p.grant.nbytes for _, p in self._ports())
        short = will + sum(claim.lacks_bytes for claim in claims) - budget
        young = any(claim.lacks_bytes and not claim.had_share for claim in claims)
        self._take_excess(claims, self._take_caches(short, None, young=young))

    def _take_caches(self, short: int, uid: int | None, *, young: bool) -> int:
        """From tenants of one user, or of all. Returns how much is still missing."""
        before_ns = time.monotonic_ns() - int(LEFT_ALONE_S * 1e9)
        for tenant, port in self._caches(uid):
            if short <= 0:
                break
            if not tenant.quiet:  # as its checkpoints are written
                least = _least(tenant, port)
                short -= port.grant.aim_bytes - least
                port.grant.resize(least, self._moved, stuck=lambda: None)  # no trainer
            elif young or tenant.volumes.is_done or tenant.seat.last_used_ns < before_ns:
                short -= port.grant.nbytes
                self._releasing[port] = asyncio.create_task(self._release(tenant, port))
        return short

    def _take_excess(self, claims: list[Claim], short: int) -> None:
        for claim in sorted(claims, key=lambda claim: -claim.excess_bytes):
            back = min(claim.excess_bytes, short)
            if back <= 0:
                return
            LOG.info("%s: returns %s of DRAM for others", claim.who, size_text(back))
            aim_bytes = claim.port.grant.aim_bytes - back
            claim.port.grant.resize(aim_bytes, self._moved, claim.by.keeps_memory)
            short -= back

    def _grow(self) -> None:
        """Memory of sessions that are growing has been promised already."""
        budget, used = self._engine.pool.usage()
        limit = self._config.max_dram_per_user_bytes or budget
        user: Counter[int] = Counter()  # what each user has, and is promised
        for uid, port in self._ports():
            user[uid] += max(port.grant.aim_bytes, port.grant.nbytes)
        free = budget - used - (user.total() - sum(self.used_bytes().values()))
        for claim in sorted(self._claims.values(), key=lambda claim: not claim.lacks_least):
            more = max(0, min(claim.lacks_bytes, free, limit - user[claim.by.uid]))
            more -= more % claim.port.chunk_bytes
            # A process of an earlier session may still write to what is left: that is replaced.
            if more or (claim.port.grant.left and not claim.ends):
                aim_bytes = claim.port.grant.aim_bytes + more
                claim.port.grant.resize(aim_bytes, self._moved, claim.by.keeps_memory)
                free -= more
                user[claim.by.uid] += more
            claim.had_share |= 0 < claim.share_bytes <= claim.port.grant.nbytes

    def _will_bytes(self, port: Port) -> int:
        """What a port has when the present resizes have ended."""
        ends = any(claim.ends and claim.port is port for claim in self._claims.values())
        return 0 if ends or port in self._releasing else port.grant.aim_bytes

    def _unclaimed(self) -> Iterator[tuple[Tenant, Port]]:
        claimed = {claim.port for claim in self._claims.values()}
        for tenant in self._tenants():
            if tenant.binding.port is not None and tenant.binding.port not in claimed:
                yield tenant, tenant.binding.port

    def _caches(self, uid: int | None) -> list[tuple[Tenant, Port]]:
        """What tenants without a trainer, of one user or of all, can return, in this order."""
        found = [
            (tenant, port) for tenant, port in self._unclaimed()
            if tenant.seat.owner is None and uid in (None, tenant.key.uid)
            if port not in self._releasing and not tenant.binding.lock.locked()
            if port.grant.aim_bytes > _least(tenant, port)
        ]  # fmt: skip
        return sorted(found, key=lambda item: item[0].seat.last_used_ns)

    def _bound_bytes(self) -> int:
        """Memory that is in use until a disk has ended its writes."""
        return sum(
            max(port.grant.least_bytes, port.grant.floor_bytes)
            for tenant, port in self._unclaimed() if tenant.ledger.live()
        )  # fmt: skip

    async def _release(self, tenant: Tenant, port: Port) -> None:
        """Makes a tenant without a trainer give back all its memory."""
        try:
            async with tenant.binding.lock:
                ours = (
                    tenant.seat.owner is None and tenant.binding.port is port
                )  # no trainer came meanwhile
                if ours and await port.release_memory():
                    LOG.info("%s: its cache was released for others", tenant.key)
        finally:
            del self._releasing[port]
            self._moved()

    def _moved(self) -> None:
        """The amount of memory has changed."""
        self._stale = True
        self._changed.set()

    def _ports(self) -> list[tuple[int, Port]]:
        """Every port with memory, and its user."""
        claimed = [(claim.by.uid, claim.port) for claim in self._claims.values()]
        return claimed + [(tenant.key.uid, port) for tenant, port in self._unclaimed()]

    def _require_room(self, claim: Claim) -> None:
        """Raises RefusedError when there are no two chunks for it: waiting does not help."""
        uid, least = claim.by.uid, claim.port.grant.least_bytes
        # Without a claim, memory under way could not be taken back.
        if claim.share_bytes >= least or claim.port.grant.resizes:
            return
        limit, budget = self._config.max_dram_per_user_bytes, self._engine.pool.usage()[0]
        mine = [one for one in self._claims.values() if one.by.uid == uid]
        if limit and sum(one.port.grant.least_bytes for one in mine) > limit:
            used = [f"{one.who} has {size_text(one.port.grant.nbytes)}"
                    for one in mine if one is not claim]  # fmt: skip
            why = (
                f"the limit of uid {uid} is {size_text(limit)} (--max-dram-per-user): "
                f"{some(used) or 'nothing is used'}"
            )
            hint = (
                "end one of these jobs (pccheckctl drop frees the cache of an ended one), or raise "
                "--max-dram-per-user"
            )
        elif sum(one.port.grant.least_bytes for one in self._claims.values()) > budget:
            why = (
                f"{size_text(budget)} (--dram) are less than two chunks for each of "
                f"{len(self._claims)} sessions, {len(mine)} of them of uid {uid}"
            )
            hint = "end some of these sessions, raise --dram, or lower --chunk"
        else:
            return
        self.gone(claim.by.number)
        raise RefusedError(f"{_needs(claim)}, and {why}", hint=hint, retryable=True)

    def _too_late(self, claim: Claim) -> RefusedError:
        budget, used = self._engine.pool.usage()
        back = sum(max(0, p.grant.nbytes - self._will_bytes(p)) for _, p in self._ports())
        why = f"{size_text(used)} of {size_text(budget)} (--dram) are used"
        if used + claim.port.grant.least_bytes <= budget:
            why += ", but the system refuses the rest: memory limit reached"
            hint = f"lower --dram of pccheckd, or {SHORTAGE_HINT}"
        else:
            why += (
                f"; {size_text(back)} of them are being returned, which took longer than "
                f"{CLAIM_LIMIT_S:g} s"
            )
            hint = (
                "try again; if it fails again, check for a slow disk or a stopped trainer: "
                "pccheckctl status"
            )
        return RefusedError(f"{_needs(claim)}: {why}", hint=hint, retryable=True)


def _needs(claim: Claim) -> str:
    least = size_text(claim.port.grant.least_bytes)
    return f"{claim.who} needs at least two chunks ({least}) of DRAM"


def _least(tenant: Tenant, port: Port) -> int:
    """What a tenant without a trainer keeps: nothing once its checkpoints are written."""
    return 0 if tenant.quiet else max(port.grant.least_bytes, port.grant.floor_bytes)
