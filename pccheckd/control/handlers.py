"""Requests: decode, one domain call, reply. A bad request fails that request and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator

from pccheck_native import _core, subset
from pccheck_native.transfer import PULL, Case, Decision, offered
from pccheck_wire import codec, messages, packing
from pccheck_wire.basics import SAME_VERSION_HINT
from pccheck_wire.errors import (
    InternalError,
    NoCheckpointError,
    PccheckError,
    ProtocolError,
    RefusedError,
    UsageError,
    WaitTimeoutError,
)
from pccheckd.base.access import require_access
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.config import text as config_text
from pccheckd.core import exposing
from pccheckd.jobs import pinning, recovery
from pccheckd.jobs.sessions import Session, Sessions
from pccheckd.observe import report
from pccheckd.tenancy.checkpoint import RankCheckpoint
from pccheckd.tenancy.ledger import Ledger
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import PAYLOAD_BYTES_MAX, Key
from pccheckd.upkeep import expiry
from pccheckd.upkeep.scrub import Scrubber

from . import verification

GOODBYE_LIMIT_S = 60.0
DESCRIBE_LIMIT_S = 1.0  # the client waits for twice as long
TRACE_S_MAX = 1e8
FAILED_MAX = 1 << 40

_TRAINER_ONLY = (
    messages.Register,
    messages.Expose,
    messages.Lend,
    messages.Chose,
    messages.Describe,
    messages.Restored,
    messages.Pin,
    messages.Carry,
    messages.Goodbye,
)
_NOT_OBSERVER = (*_TRAINER_ONLY, messages.Open, messages.Read)
_NEEDS_STORAGE = (messages.Open, messages.ListVolumes, messages.Verify, messages.Drop)


def failure(error: BaseException) -> messages.Failure:
    """The answer to the peer; an internal error is logged with its traceback."""
    why = error if isinstance(error, PccheckError) else translated(error, "the request")
    if isinstance(why, InternalError):
        LOG.error("a request failed", exc_info=error)
    return messages.Failure(why.code, why.message[:2000], why.hint[:2000], why.retryable)


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Adds a fix to the error of an unreadable message: usually the versions differ."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(
            f"{what} cannot be read: {error.message}", hint=SAME_VERSION_HINT
        ) from error


class Handlers:
    def __init__(self, sessions: Sessions, scrubber: Scrubber | None = None) -> None:
        self._engine, self._config = sessions.engine, sessions.config
        self._registry = sessions.registry
        self._sessions = sessions
        self._scrubber = scrubber
        self._started_ns = time.monotonic_ns()
        self._turns: dict[tuple[int, str], asyncio.Lock] = {}

    async def answer(self, uid: int, data: bytes) -> bytes | None:
        """A request, over either channel: its token names the session. None when there is nothing
        to answer. Never raises."""
        number, request, session = 0, None, None
        try:
            with readable("the request"):
                plain = packing.unpack(data)
                number = _number(plain)
                request = codec.from_plain(plain, messages.Request)
            session = self._sessions.by_token(uid, request.token)
            body = await self._handle(session, request.body)
            if not number or body is None:
                return None
            reply = messages.Reply(number, body)
            if isinstance(body, messages.Report):  # it may be long
                return await self._engine.document(session.uid, codec.encode, reply)
            return codec.encode(reply)
        except Exception as error:  # the edge of this request
            why = failure(error)
            if number or request is None:
                return codec.encode(messages.Reply(number, why))
            who = session.key if session is not None else "unknown session"
            LOG.info("%s: request %r failed: %s", who, request.body.TAG, why.message)
            return None  # the peer reads no answer

    async def _handle(
        self, session: Session, body: messages.RequestBody
    ) -> messages.ReplyBody | None:
        if isinstance(body, _TRAINER_ONLY) and session.role is not messages.Role.TRAINER:
            raise RefusedError(f"request {body.TAG!r} requires a trainer session")
        if isinstance(body, _NOT_OBSERVER) and session.role is messages.Role.OBSERVER:
            raise RefusedError(f"request {body.TAG!r} requires a trainer or reader session")
        if isinstance(body, _NEEDS_STORAGE):
            await self._engine.require_storage(session.uid)
        match body:
            case messages.Register():
                return await self._register(session, body)
            case messages.Expose():
                await self._expose(session, body)
            case messages.Lend():
                room = self._sessions.room_descriptors(session)
                session.descriptors.receive(body, room=room)
            case messages.Chose():
                session.chose(*exposing.checked(body))
            case messages.Describe():
                return await self._describe(session, body)
            case messages.Open():
                return await recovery.open_checkpoint(session, body, self._registry.engine)
            case messages.Read():
                await recovery.read(session, self._registry.memory, body)
            case messages.Restored():
                assert session.job is not None
                return await session.job.restored(session.rank, session.process, body)
            case messages.Pin():
                await pinning.pin(session, body)
            case messages.Carry():
                if session.wide is None:
                    raise RefusedError("this rank's job does not run on several nodes")
                return await session.wide.voice.carry(session.number, body)
            case messages.Pause():
                return self._sessions.pause(session, body.pids)
            case messages.Goodbye():
                await self._goodbye(session, body)
            case messages.Status():
                return messages.Report(await self._status(session))
            case messages.ListServers():
                found = await self._engine.look(
                    session.uid, report.servers, session.uid, self._registry
                )
                return messages.Report(found)
            case messages.ListVolumes():
                found = await self._engine.look(
                    session.uid, report.listing, session.uid, self._config, body.job,
                    report.known_globals(self._registry),
                )  # fmt: skip
                memory = report.in_memory(session.uid, self._registry, body.job)
                return messages.Report(found | {"in_memory": memory})
            case messages.ConfigShow():
                return messages.Report(config_text.document(self._config, "daemon"))
            case messages.Verify():
                return messages.Report(await self._verify(session, body))
            case messages.Drop():
                work = functools.partial(expiry.drop, self._registry, session.uid, body)
                if body.dry_run:
                    return messages.Report(await work())
                return messages.Report(await self._whole(session.uid, body.TAG, work))
            case messages.Trace():
                return messages.Report(await self._trace(session, body))
        return messages.Done()

    async def _register(self, session: Session, body: messages.Register) -> messages.Registered:
        tenant = session.tenant
        assert tenant is not None
        if not 0 < body.payload_bytes <= PAYLOAD_BYTES_MAX:
            raise UsageError(f"$.body.payload_bytes must be 1 to 2**50 (got {body.payload_bytes})")
        _count_failed(tenant, body.failed)
        tenant.readiness.registers = True
        try:
            await self._engine.require_storage(session.uid)
            answer = await self._volume_and_dram(session, tenant, body)
        except PccheckError as error:
            if not session.ending:
                tenant.seat.refuse_room(error, session.number)
            raise
        finally:
            tenant.readiness.registers = False
        tenant.seat.give_room()
        return answer

    async def _volume_and_dram(
        self, session: Session, tenant: Tenant, body: messages.Register
    ) -> messages.Registered:
        job = session.job
        assert job is not None
        volume = await tenant.readiness.register(body.payload_bytes)
        memory = self._registry.memory
        states = messages.STATES_IN_MEMORY if body.levels >> _core.LEVEL_MEMORY & 1 else 2
        tenant.unparking.fills_disk = not body.levels >> _core.LEVEL_DISK & 1
        wanted = memory.wanted_for(tenant, body.payload_bytes, states=states)
        granted = await memory.claim(session, wanted)
        expected = max(granted, min(wanted, memory.share_bytes(session.number)))
        lanes = min(volume.info.slots - volume.info.keep, self._config.in_flight)
        return messages.Registered(
            slots=volume.info.slots, keep=volume.info.keep, in_flight=lanes,
            granted_bytes=granted, expected_bytes=expected, volume=str(volume.path),
            absent=job.members.absent(),
            incarnation=job.members.registered(session.rank, session.process),
            start=session.start,
            effective_in_flight=round(min(lanes, 1 + expected / body.payload_bytes), 2),
            note=session.wide.note(session.rank) if session.wide is not None else "",
        )  # fmt: skip

    async def _expose(self, session: Session, body: messages.Expose) -> None:
        """No other task runs until the first await: pieces are taken in the order of arrival."""
        tenant = session.tenant
        if tenant is None or session.ending:
            raise RefusedError("the session has ended")
        case = Case(self._engine.driver.state)
        _require_pull(offered(case))
        whole = session.exposing.take(body, room_bytes=self._sessions.room_bytes(session))
        if whole is None:
            return
        self._sessions.require_map(session, body.descriptors)
        lot = await session.descriptors.collect(body.map, body.descriptors)
        try:
            _require_pull(await tenant.pulling.expose(session.number, body.map, whole, lot, case))
        finally:
            lot.close()

    async def _describe(self, session: Session, body: messages.Describe) -> messages.Described:
        """Waits until the records have what the page shows already: the core writes the page."""
        assert session.tenant is not None
        if body.sequence:
            return _became(session.tenant, body)
        self._engine.deliver()  # the page may have shown more already
        ledger = session.tenant.ledger
        found = ledger.find(session.number, body.snapshot)
        if found is None:
            raise NoCheckpointError(f"snapshot {body.snapshot} is not known, or too old")
        await ledger.until(lambda: not found.live and ledger.knows_newer(found), DESCRIBE_LIMIT_S)
        return _described(found, ledger)

    async def _goodbye(self, session: Session, body: messages.Goodbye) -> None:
        tenant, job = session.tenant, session.job
        assert tenant is not None and job is not None
        if not session.took_leave:
            session.took_leave = True
            _count_failed(tenant, body.failed)
        job.write_parked()
        asked = job.members.numbering.asked(session.rank)
        if not await tenant.ledger.settled(GOODBYE_LIMIT_S, asked):
            raise WaitTimeoutError(f"checkpoints are still being saved after {GOODBYE_LIMIT_S:g} s")
        if body.done:
            await tenant.binding.finish()

    async def _status(self, session: Session) -> report.Document:
        async with self._turn(session.uid, "document"):
            return await report.status(
                session.uid, self._registry, self._sessions.all(), self._started_ns,
                self._scrubber.document() if self._scrubber else None,
            )  # fmt: skip

    async def _trace(self, session: Session, body: messages.Trace) -> report.Document:
        if not 0 <= body.last_s <= TRACE_S_MAX:
            raise UsageError(f"$.body.last_s must be 0 to {TRACE_S_MAX:g} (got {body.last_s:g})")
        async with self._turn(session.uid, "document"):
            make = report.trace(session.uid, self._registry, body.last_s)
            return await self._engine.document(session.uid, make)

    def _turn(self, uid: int, kind: str) -> asyncio.Lock:
        """Of one kind a user has one at a time, however many it requests."""
        return self._turns.setdefault((uid, kind), asyncio.Lock())

    async def _whole(
        self, uid: int, kind: str, work: Callable[[], Coroutine[object, object, report.Document]]
    ) -> report.Document:
        """Work that ends also when its asker goes: half a drop leaves a job's files locked, and a
        file that a thread still reads must stay open."""
        turn = self._turn(uid, kind)
        await turn.acquire()
        begun = asyncio.get_running_loop().create_task(work())

        def ended(_: object) -> None:
            turn.release()
            if not begun.cancelled():
                begun.exception()  # retrieved here, as the asking session may have ended

        begun.add_done_callback(ended)
        return await asyncio.shield(begun)

    async def _verify(self, session: Session, body: messages.Verify) -> report.Document:
        uid = session.uid if body.uid < 0 else body.uid
        require_access(session.uid, uid, "read checkpoints")
        try:
            part = subset.parse(body.subset, body.seed) if body.subset else None
        except ValueError as error:
            raise UsageError(f"$.body.subset: {error}") from error
        gone = threading.Event()

        async def work() -> report.Document:
            _, tenant = await self._registry.existing(Key(uid, body.job, body.rank))
            async with tenant.uses.read():
                volumes = [(item.path, item.volume) for item in tenant.volumes.open]
                reports = tenant.retention.reports
                document = await self._engine.scan(
                    session.uid, verification.verify, volumes, body.sequence, part, ends=gone.is_set
                )
                if part is None:
                    await _judge(tenant, document, reports)
            if body.sequence and not document["checkpoints"]:
                raise NoCheckpointError(f"{tenant.key} has no durable checkpoint {body.sequence}")
            return document

        try:
            return await self._whole(session.uid, body.TAG, work)
        finally:
            gone.set()


def _count_failed(tenant: Tenant, count: int) -> None:
    if not 0 <= count <= FAILED_MAX:
        raise UsageError(f"$.body.failed must be 0 to {FAILED_MAX} (got {count})")
    if count:
        tenant.saves.failed_before_request(count)


def _require_pull(offer: Decision) -> None:
    if offer.transfer != PULL:
        raise RefusedError(offer.reason, hint=offer.hint, retryable=offer.may_pass)


def _described(found: RankCheckpoint, ledger: Ledger) -> messages.Described:
    reason, hint, _ = found.sentence
    superseded = found.state is messages.CheckpointState.SUPERSEDED
    newer = (ledger.newer_than(found) if superseded else None) or (0, None)
    return messages.Described(
        found.snapshot, found.state, found.id.sequence, found.id.step, reason, hint, *newer
    )


def _became(tenant: Tenant, body: messages.Describe) -> messages.Described:
    """What became of a checkpoint that an earlier daemon had copied. Raises NoCheckpointError when
    it is lost."""
    if (inherited := tenant.ledger.of_sequence(body.sequence)) is not None:
        return _described(inherited, tenant.ledger)
    if (found := tenant.volumes.checkpoint(body.sequence)) is not None:
        state, name = messages.CheckpointState.DURABLE, found.id
        return messages.Described(body.snapshot, state, name.sequence, name.step)
    raise NoCheckpointError(f"{tenant.key} has no durable checkpoint {body.sequence}")


def _number(plain: object) -> int:
    """The number of a request that may be unreadable otherwise, so that the peer gets an answer; or
    0."""
    number = plain.get("number") if isinstance(plain, dict) else None
    return number if type(number) is int and 0 <= number < 2**63 else 0


async def _judge(tenant: Tenant, document: report.Document, reports: int) -> None:
    """All of each was read: removes the damage flag of intact ones, also in the document."""
    checkpoints = document["checkpoints"]
    assert isinstance(checkpoints, list)
    for item in checkpoints:
        item["cleared"] = item["valid"] and await tenant.retention.found_whole(
            item["sequence"], reports=reports
        )
        item["damaged"] = item["damaged"] and not item["cleared"]
