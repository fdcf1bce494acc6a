"""A job with ranks on several nodes, as this node has it: which start runs here, and how it begins.
This module keeps N4 of `pccheck_native/nodes/`: a promise is on the disk before anything follows
from it. `promising.py` keeps the others, and `restoring.py` has what the ranks ask for."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pccheck_native import _core
from pccheck_native.catalog import StoredCheckpoint
from pccheck_native.group import Held, Refused
from pccheck_native.nodes import alone, lists
from pccheck_native.nodes.beginning import decide
from pccheck_native.nodes.facts import FullName, Have, Said, SaveName
from pccheck_native.nodes.holding import Holding
from pccheck_native.nodes.lists import NodeHello, StartList
from pccheck_native.nodes.offers import (
    HeldPart,
    NodeServer,
    Offer,
    StartAnswer,
    StartRecord,
    Word,
    newest,
)
from pccheck_native.nodes.plain import ID, TEXT_MAX
from pccheck_wire.ends import Cause, Why
from pccheck_wire.errors import NoCheckpointError, PccheckError, RefusedError
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Hello, Open, Waiting
from pccheckd import VERSION
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.group.job import Job
from pccheckd.group.starts import Start
from pccheckd.peer.server import Peers
from pccheckd.tenancy.checkpoint import End
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import OpenVolume

from .carriers.carrier import Carrier
from .carriers.voice import StoreVoice
from .member import MemberPhase, NodeMember
from .names import Names
from .promising import Promising
from .records import Records
from .restoring import Restoring
from .travel.away import Away
from .travel.reach import unreachable
from .travel.sharing import Sharing

_T = TypeVar("_T")

#: How long a checkpoint waits until the nodes have agreed on what the start begins from. After that
#: checkpoints are skipped until they have.
AGREE_LIMIT_S = 10.0
#: How long a restore waits before its client is told for whom.
POINT_LIMIT_S = 5.0


class WideJob:
    """Owned by the daemon's nodes, one for each job with ranks on other nodes. It implements
    `NodeKeeper`."""

    def __init__(
        self, job: Job, engine: Engine, node: bytes, carrier: Carrier, voice: StoreVoice,
        peers: Peers,
    ) -> None:  # fmt: skip
        """`voice`: gives operations to trainers; it has none if the carrier is another one."""
        self._peers = peers
        self.job = job
        self.voice, self.carrier = voice, carrier
        self._engine = engine
        self.node = node  # its id ...
        self.host = socket.gethostname()[:TEXT_MAX]  # ... and how people know it
        self._records = Records(engine.config.storage, job.uid, job.name)
        self._known: dict[bytes, StartRecord] = {}  # the records, by start
        self._start: Start | None = None  # whose member runs
        self._names = Names(job)
        self.member: NodeMember | None = None
        self.promising = Promising(job, engine.config, self._names)
        self._restoring = Restoring(job, self._names)
        self.sharing = Sharing(job, engine, self._names)
        self.replicated = False
        self._promised: set[Path] = set()  # the volumes that have the promise
        self._task: asyncio.Task[None] | None = None
        self._limit: asyncio.Handle | None = None
        self._loaded = False
        self._adopting, self._reaching = asyncio.Lock(), asyncio.Lock()
        self._untold: list[str] = []  # warnings of the last answer, for a script
        job.on_decision, job.on_appeared = self.look, self._publish
        job.members.elsewhere.wanted = self._want

    async def load(self) -> None:
        """What this node keeps of the starts of the job. Raises PccheckError."""
        if self._loaded:
            return
        for record in await self._call(self._records.all):
            self._known[record.start] = record
        self._loaded = True
        await self._see_volumes()

    async def close(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        await self._end_member()

    def came(self, hello: Hello) -> None:
        """A process of a rank has joined a start."""
        self.replicated, self._restoring.is_fresh = hello.replicated, hello.fresh
        self.look()

    def gone(self, session: int) -> None:
        """The session of a process has ended."""
        self.voice.gone(session)
        self.look()

    @property
    def why_closed(self) -> str:
        """Why other nodes cannot read from this one, and what to do; "": they can."""
        why = self._peers.why_closed(self.job.uid)
        if not why:
            return ""
        return (
            f"job {self.job.name!r} runs on several nodes, and the others cannot read from the "
            f"pccheckd of host {self.host} ({why}): a rank that comes up elsewhere cannot read its "
            "part, and a new node gets no copy. Name the interface between the nodes on all nodes: "
            'pccheckd --listen eth0, or listen = "eth0" in pccheckd.toml'
        )

    def note(self, rank: int) -> str:
        """The same, for the first rank here."""
        start = self.start
        return self.why_closed if start is not None and rank == min(start.members) else ""

    @property
    def waits_s(self) -> float:
        """For how long a rank here has wanted to restore or save, and the nodes have not agreed."""
        start = self.start
        if start is None or not self._restoring.wanted.is_set():
            return 0.0
        agreed = self.job.members.elsewhere.agreed == start.incarnation
        return 0.0 if agreed else time.monotonic() - self._restoring.wanted_s

    @property
    def start(self) -> Start | None:
        """The one that this node takes part in, while processes of it live here."""
        start = self._start
        return start if start is not None and start.is_live and start.kind.is_wide else None

    # -- which start ---------------------------------------------------------------------------

    def look(self) -> None:
        """After each decision of the job, and when a process has come or gone."""
        start = self.job.members.starts.current
        if start is not self._start and self._loaded:
            self._follow(start)
        if self.member is not None and self.member.phase is MemberPhase.RUNNING:
            self._promise_in_new_volumes()
            self.promising.look()
            self._vacate()
            self._publish()

    def _publish(self) -> None:
        """The other nodes hear of what is new here."""
        if self.member is not None and self.member.phase is MemberPhase.RUNNING:
            self.member.changed()

    @property
    def moved(self) -> list[Tenant]:
        """The ranks that have volumes here, and are on another node in the present start."""
        mine, tenants = self.promising.mine, self.job.tenants
        if mine is None or self.start is None:
            return []
        here = self._known[mine.start].who.ranks_of(self.node)
        return [one for rank, one in tenants.items() if rank not in here and one.volumes.open]

    def _vacate(self) -> None:
        """Their volumes go when this start has as many globals as the nodes keep."""
        mine = self.promising.mine
        if mine is not None and sum(map(mine.is_own, mine.known)) >= self._engine.config.keep:
            for tenant in self.moved:
                if tenant.idle:
                    tenant.tasks.spawn(tenant.vacate())

    def _promise_in_new_volumes(self) -> None:
        every = {v.path: (t, v) for t in self.job.tenants.values() for v in t.volumes.open}
        made = every.keys() - self._promised
        self._promised = set(every)
        if self.promising.mine is not None:
            record = self._known[self.promising.mine.start]
            for tenant, item in (every[path] for path in made):
                tenant.tasks.spawn(self._promise_in(record, item))

    async def _promise_in(self, record: StartRecord, item: OpenVolume) -> None:
        with contextlib.suppress(OSError, ValueError, _core.NativeError, PccheckError):
            await self._call(self._records.promise, record, [item.volume])

    def _follow(self, start: Start | None) -> None:
        """The processes of another start have come."""
        if start is None or not start.kind.is_wide:
            self.job.members.elsewhere.kept.clear()
            self._start = start
            self._stop()
        elif start.closed and start.is_live:
            self._stop()
            self.job.members.elsewhere.alone = 0
            self._start, self.promising.mine = start, None
            self._restoring.begin(start)
            self._task = asyncio.create_task(self._run(start), name=f"nodes of {self.job.name}")
        elif self._start is not None and not self._start.is_live:
            self._stop()  # or a process of the new start would carry messages of the one before

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self.member = None

    async def _end_member(self) -> None:
        task = self._task
        self._stop()
        if task is not None:
            await asyncio.wait([task])

    async def _run(self, start: Start) -> None:
        self.member = member = NodeMember(self.carrier, f"{self.job.uid}/{self.job.name}", self)
        try:
            await self._adopt()
            known = self._known_of(start)
            last = await self._resume(start, known) if known is not None else 0
            self._restoring.is_ready = True
            self._restoring.wake()
            await member.run(known.who if known is not None else None, last)
        except Exception as error:
            LOG.exception("job %s: the agreement with the other nodes failed", self.job.name)
            why = self._translated(error)
            await member.fail(Refused(f"this node cannot go on: {why.message}", why.hint))
        if self.member is not None and self.member.refused is not None:
            self._refuse(self.member.refused)

    def _known_of(self, start: Start) -> StartRecord | None:
        """The record of a start that began before this daemon restarted. Its processes tell, not
        its id: they may have connected before the nodes agreed on one."""
        processes = {rank: one.process for rank, one in start.members.items()}
        found = (
            record
            for record in self._known.values()
            if record.born and lists.member_of(record.who, self.node, processes) is not None
        )
        return max(found, key=lambda record: record.promise, default=None)

    async def _resume(self, start: Start, known: StartRecord) -> int:
        """This daemon has restarted, and the start has begun: the last round that has an answer
        here."""
        start.id = known.start
        await self._begin_in_volumes(start)  # of ranks that came before it was known
        last, _ = known.restored[-1]
        if known.round == last:
            await self._take_up(start, known)
            return last
        # It promised a later round: until that has an answer, nothing is saved or offered.
        self._restoring.know(known)
        for member in start.members.values():
            member.round = known.round
        self._want()
        if self.member is not None:
            self.member.want_round(known.round)
        return last

    def _too_late(self) -> None:
        """The nodes have not agreed, or a rank of this node has not come: checkpoints that wait for
        that are skipped."""
        self._limit = None
        if self.job.members.waits_for_nodes:
            waited_s = time.monotonic() - self._restoring.wanted_s  # in this start, or round
            left_s = AGREE_LIMIT_S - waited_s
            if left_s <= 0:
                self._skip_waiting(self.why_not_agreed())
            self._limit = asyncio.get_running_loop().call_later(max(1.0, left_s), self._too_late)

    def why_not_agreed(self) -> str:
        """Whom this node waits for, or why in vain."""
        member = self.member if self._start is self.job.members.starts.current else None
        if member is not None and member.refused is not None:
            return f"this start is refused: {member.refused.reason}"
        words = (member.patient.silent or member.missing) if member is not None else ""
        if absent := self.job.members.absent():
            words = f"on this node {lists.listed(absent)} did not connect"
        words = words or "this node has just asked them"
        return f"the nodes of this job have not agreed yet: {words}"

    def _refuse(self, refused: Refused) -> None:
        self._skip_waiting(refused.reason, refused.hint)
        self._restoring.wake()

    def _skip_waiting(self, words: str, hint: str = "") -> None:
        end = End(State.SKIPPED, Why(Cause.DESCRIBED, words=words, hint=hint))
        for tenant in self.job.tenants.values():
            tenant.saves.number_waiting(end)

    # -- NodeKeeper: how a start begins ----------------------------------------------------------

    @property
    def is_live(self) -> bool:
        return self.start is not None

    def hello(self) -> NodeHello:
        start = self._start
        assert start is not None
        return NodeHello(
            self.node, self.host, start.kind.launch,
            start.world_size, {rank: one.process for rank, one in sorted(start.members.items())},
            self._promise(), self.replicated, version=VERSION,
        )  # fmt: skip

    def _promise(self) -> lists.Promise:
        return max((one.promise for one in self._known.values()), default=lists.Promise())

    def lives(self) -> StartList | None:
        """The list of another start of which a process lives here."""
        for start in self.job.members.starts.all():
            record = self._known.get(start.id)
            if start is not self._start and start.is_live and record is not None:
                return record.who
        return None

    def unanswered(self) -> StartList | None:
        """The list of the newest promise, if it has no answer here: this daemon has restarted."""
        newest = max(self._known.values(), key=lambda one: one.promise, default=None)
        return newest.who if newest is not None and not newest.born else None

    async def promise(self, found: StartList) -> Refused | None:
        """Durably: in the record of the start, and in the volumes of the job."""
        if found.start in self._known:  # before this daemon restarted
            return None
        record = StartRecord(found)
        ranks = sorted(self._start.members) if self._start is not None else []
        if found.replicated and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            return Refused(
                f"with replicated=True the ranks of a node divide one copy among them, and the "
                f"ranks of this node are not in a row: {ranks}",
                "let the launcher number them so (srun --distribution=block, mpirun --map-by slot)",
            )
        try:
            await self._keep_promise(record)
            self._promised = {v.path for t in self.job.tenants.values() for v in t.volumes.open}
        except RefusedError as refused:
            return Refused(refused.message, refused.hint)
        except (OSError, ValueError, _core.NativeError, PccheckError) as error:
            why = self._translated(error)
            return Refused(f"this node cannot promise the start: {why.message}", why.hint)
        return None

    def _translated(self, error: Exception) -> PccheckError:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, PccheckError):
            return error
        return translated(error, f"the record of the start in {self._engine.config.storage}")

    async def _keep(self, record: StartRecord, work: Callable[..., None], *more: object) -> None:
        """Changes a record on the disk, and then here; also if this task is cancelled meanwhile.
        Raises as `work` does."""

        async def kept() -> None:
            await self._call(work, record, *more)
            self._known[record.start] = record

        await asyncio.shield(kept())

    async def _keep_promise(self, record: StartRecord) -> None:
        """Writes the record, and the promise into the volumes of the job. Raises as `_keep`."""
        volumes = [v.volume for t in self.job.tenants.values() for v in t.volumes.open]
        await self._keep(record, self._records.promise, volumes)

    async def offer(self, found: StartList, round_: int) -> Offer:
        # The offer has the arguments of restore(); those of a fresh client are known before.
        if round_ or not self._restoring.is_fresh:
            await self._restoring.wanted.wait()
        if round_ > self._known[found.start].round:
            self.promising.mine, self.job.members.elsewhere.agreed = None, 0
            self._restoring.wanted_s = time.monotonic()
            record = self._known[found.start]._replace(round=round_)
            await self._keep(record, self._records.update)
        await self._refresh()
        mine = self._known[found.start]
        answers = (StartAnswer(found.start, n, one, mine.seen) for n, one in mine.restored)
        peer = await self._peers.server(self.job.uid, self.job.name)
        offer = self._offer(self._promise(), self._restoring.word(round_))
        return offer._replace(answers=tuple(answers), round=round_, peer=peer)

    async def holding(self) -> Holding:
        """What this node has of the job, for a person who asks another node."""
        if not self.is_live:
            await self._refresh()
        peer = await self._peers.server(self.job.uid, self.job.name)
        offer = self._offer(self._promise(), Word())._replace(peer=peer)
        return Holding(offer, VERSION, self.is_live)

    def _offer(self, promise: lists.Promise, word: Word) -> Offer:
        """What the volumes hold, in the first round of a start."""
        held = tuple(
            HeldPart(full, one.id.rank, one.id.digest, tenant.retention.is_usable(one))
            for tenant, one, full in self._names.every()
        )
        known = self.promising.known_globals()
        known |= alone.globals_alone((part.checkpoint for part in held), self._known)
        return Offer(
            self.node, self.host, promise, records=newest(self._known.values()),
            known=tuple(sorted(known)), parts=held, word=word,
        )  # fmt: skip

    async def reach(self) -> list[tuple[bytes, str]]:
        """The nodes of the last start that this one cannot read from, and why, for a person who
        asks another node."""
        async with self._reaching:
            servers = await self._call(self._records.servers)
            others = [one for one in servers if one.node != self.node]
            return await asyncio.to_thread(unreachable, others)

    async def record(
        self, found: StartList, answer: StartAnswer, servers: Sequence[NodeServer]
    ) -> None:
        """The answer of a round, on the disk before its ranks restore."""
        start = self._start
        assert start is not None
        record = self._known[found.start].with_answer(answer)
        await self._keep(record, self._records.update)
        self._warn(answer)
        if answer.round == 0:
            start.id = found.start
            await self._begin_in_volumes(start)
        await self._take_up(start, record)
        self._restoring.wake()
        if answer.round == 0:
            await self._forget()
        await self._keep_servers(servers)

    async def _keep_servers(self, servers: Sequence[NodeServer]) -> None:
        try:
            if servers:
                await self._call(self._records.keep_servers, servers)
        except OSError as error:
            LOG.warning("job %s: where its nodes are is not kept: %s", self.job.name, error)

    async def _forget(self) -> None:
        """Removes the records of starts that this node needs no more."""
        try:
            gone = {path.name for path in await self._call(self._records.forget)}
        except (OSError, PccheckError) as error:
            LOG.warning("job %s: old records of starts stay: %s", self.job.name, error)
            return
        self._known = {
            start: record
            for start, record in self._known.items()
            if f"start-{start.hex()}.json" not in gone
        }

    async def _begin_in_volumes(self, start: Start) -> None:
        """The volumes have the start under its number already; now it has its id."""
        for tenant in self.job.tenants.values():
            async with tenant.binding.lock:
                current = tenant.volumes.current
                if current is not None and current.begun == start.incarnation:
                    await tenant.binding.begin(
                        current, start.incarnation, start.world_size, start.id
                    )

    async def _take_up(self, start: Start, record: StartRecord) -> None:
        """The start has begun: its ranks may restore and save."""
        await self._see_volumes()
        round_, restored = record.restored[-1]
        self._restoring.know(record)
        elsewhere = self.job.members.elsewhere
        elsewhere.here[start.incarnation] = frozenset(start.members)
        elsewhere.agreed = start.incarnation
        self.promising.begin(start, restored, round_)
        stored = self._names.every()
        saved = {one.id.rank for _, one, full in stored if self.promising.is_own(full)}
        for rank, member in start.members.items():
            member.round = max(member.round, record.round, round_)
            # After a restart of this daemon the disk tells.
            member.moved = member.moved or (member.begun and rank in saved)
        for tenant in self.job.tenants.values():
            tenant.saves.number_waiting()
        self.job.settle()

    # -- a start of this node alone -----------------------------------------------------------

    async def _adopt(self) -> None:
        """What this node has saved without the others gets a record, which they will hear of."""
        async with self._adopting:  # each rank of a start alone comes here
            await self._refresh()
            tenants = self.job.tenants.values()
            saved = [one.id for t in tenants for one in t.volumes.checkpoints()]
            unrecorded = alone.unrecorded(
                saved, self.node, self.host, dict(self._known), replicated=self.replicated
            )
            for record in unrecorded:
                await self._keep_promise(record)
            await self._see_volumes()

    async def point_alone(self, start: Start | None, asked: Open, *, fresh: bool) -> Held | None:
        """What a start of this node alone restores; None: the rules of one node tell. Raises
        PccheckError if the other nodes may have gone on without this one, or have what it would
        restore."""
        if not self._known or start is None:
            return None
        await self._adopt()
        word = Word(asked.step, asked.start, tuple(asked.without), fresh)
        async with self._adopting:
            made = secrets.token_bytes(ID)
            known = self._known.values()
            found = alone.list_alone(self.node, self.host, made, start.world_size, known)
            answer = decide([self._offer(found.promise, word)], found, travel=True)
            if isinstance(answer, Refused):
                raise NoCheckpointError(answer.reason, hint=answer.hint)
            if start.id not in self._known:  # the first of its ranks
                await self._begin_alone(start, found, answer)
        self._warn(answer)
        if answer.restored is None:
            return None
        self.job.members.elsewhere.alone = self._names.sequence(answer.restored) or 0
        return self._restoring.held(answer.restored)

    def _warn(self, answer: StartAnswer) -> None:
        """In the log of the daemon, and of the script: some say that steps are lost."""
        for words in answer.warnings:
            LOG.warning("job %s: %s", self.job.name, words)
        self._untold = list(answer.warnings)

    def untold(self) -> list[str]:
        """For the first rank here that gets the answer."""
        untold, self._untold = self._untold, []
        return untold

    async def _begin_alone(self, start: Start, found: StartList, answer: StartAnswer) -> None:
        """Records what the start restores: if the start saves nothing, a later one restores that
        checkpoint, too."""
        record = StartRecord(found._replace(start=start.id)).with_answer(answer)
        try:
            await self._keep_promise(record)
        except (OSError, ValueError, _core.NativeError) as error:
            raise self._translated(error) from error

    # -- what a rank restores ------------------------------------------------------------------

    async def point(self, rank: int, process: bytes, asked: Open) -> Held | Away | Waiting | None:
        """What a process restores; None: there is nothing. Raises PccheckError."""
        deadline = time.monotonic() + POINT_LIMIT_S
        round_: int | None = None
        while time.monotonic() < deadline:
            start, member = self._start, self.member
            mine = self.job.members.starts.of(rank, process) is start
            if mine and member is not None and member.refused is not None:
                raise NoCheckpointError(member.refused.reason, hint=member.refused.hint)
            if start is not None and mine and self._restoring.is_ready:
                if round_ is None:
                    round_ = self._round(start, rank, asked)
                if round_ < 0:  # a look in mid-run, in which other ranks need not take part
                    return max(self.job.members.common(), default=None)
                if round_ in self._restoring.answers:
                    full = self._restoring.answers[round_]
                    if full is not None and (
                        away := await self._away(full, rank, round_, asked.before)
                    ):
                        return away
                    return self._restoring.found(full)
            await self._restoring.awake(deadline)
        return Waiting(self.why_not_agreed())

    async def _away(
        self, full: FullName, rank: int, round_: int, before: int | None
    ) -> Away | None:
        """What a rank reads of it from other nodes; None: this node has what the rank reads.
        `before`: what it could not read here."""
        start = self._start
        is_broken = before is not None and before == self._names.sequence(full)
        if start is None or self.member is None:
            return None
        if not is_broken and self._has(full, rank, start.world_size):
            return None
        homes = await self.member.homes(round_)
        if homes is None or homes.checkpoint != full:
            return None
        return Away(homes, self._names.sequence_or_new(full), self.node)

    def _has(self, full: FullName, rank: int, world_size: int) -> bool:
        """Of replicated state, any copy on this node will do."""
        record = self._known.get(full.start)
        if record is None or (record.who.world_size != world_size and not record.who.replicated):
            return False
        if record.who.replicated:
            return self._restoring.held(full) is not None and bool(self.parts_here(full))
        return any(one.id.rank == rank for one in self.parts_here(full))

    def parts_here(self, full: FullName) -> list[StoredCheckpoint]:
        """The intact parts that this node has of a checkpoint, by rank."""
        found = (
            one
            for tenant, one, name in self._names.every()
            if name == full and tenant.retention.is_usable(one)
        )
        return sorted(found, key=lambda one: one.id.rank)

    def _round(self, start: Start, rank: int, asked: Open) -> int:
        """The round in which a process restores now, and this node takes part; -1: none."""
        round_ = self._restoring.round_of(start, rank, asked)
        if round_ >= 0:
            self._want()
        if round_ > 0 and self.member is not None:
            self.member.want_round(round_)
        return round_

    def _want(self) -> None:
        self._restoring.want()
        if self._limit is None:
            self._limit = asyncio.get_running_loop().call_later(AGREE_LIMIT_S, self._too_late)

    # -- NodeKeeper: how it runs -----------------------------------------------------------------

    def have(self) -> Have | None:
        return self.promising.have()

    def heard(self, said: Said, lacks: Mapping[SaveName, str]) -> None:
        self.promising.heard(said, lacks)

    async def _refresh(self) -> None:
        for tenant in self.job.tenants.values():
            await tenant.volumes.refresh()
        await self._see_volumes()

    async def _see_volumes(self) -> None:
        await self._names.see(self._known.keys(), self._call)
        elsewhere = self.job.members.elsewhere
        for _, one, full in self._names.every():
            record = self._known[full.start]
            if not alone.is_alone(record) and (ranks := record.who.ranks_of(self.node)):
                elsewhere.here.setdefault(one.id.incarnation, ranks)
            if one.is_known_global:
                elsewhere.globals.add(one.id.sequence)

    async def _call(self, work: Callable[..., _T], *arguments: object) -> _T:
        return await self._engine.call(self.job.uid, work, *arguments)
