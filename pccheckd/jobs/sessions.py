"""Sessions: the connected processes, their roles and what they own. A session ends with its
peer."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pccheck_native import _core, layout
from pccheck_native.places import places
from pccheck_native.transfer import PUSH, PUSHED, Case, Decision, offered
from pccheck_wire import codec
from pccheck_wire.basics import PROTOCOL_VERSION, size_text
from pccheck_wire.errors import NoCheckpointError, RefusedError, UsageError
from pccheck_wire.messages import Hello, MakeWay, Paused, Role, Welcome, require_job_name
from pccheckd import VERSION
from pccheckd.base.access import require_access
from pccheckd.base.background import Tasks
from pccheckd.base.logs import LOG
from pccheckd.core.descriptors import Descriptors, held_max
from pccheckd.core.engine import PortShape
from pccheckd.core.exposing import UNFINISHED_BYTES_MAX, Exposing
from pccheckd.core.grant import BACK_LIMIT_S
from pccheckd.core.port import DETACH_LIMIT_S, GRACE_S, STEP_S, Owner, Port
from pccheckd.front.endpoints import ControlServer
from pccheckd.group.job import Job
from pccheckd.group.starts import Arrival
from pccheckd.nodes.wide import WideJob
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key

from .registry import Registry

READER_CHUNKS = 8
CONNECTIONS_PER_UID_MAX = 192
PAUSED_MAX = 32  # of a request's items
#: GPU memory that the daemon maps for all sessions of a user: that of a node with 16 GPUs. One
#: session may map a quarter of the bytes.
PIECES_PER_UID_MAX = 16 * _core.EXPOSED_PIECES_MAX
EXPOSED_BYTES_PER_UID_MAX = 16 << 40


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end, according to the kernel."""

    uid: int
    gid: int
    pid: int
    gone: Callable[[], bool] = lambda: False  # whether it disconnected before the answer


@dataclass(slots=True, eq=False)
class Session:
    number: int
    token: bytes
    role: Role
    uid: int
    pid: int
    kernel_pid: int  # 0 when it is in another PID namespace; `pid` is then its own claim
    connected_ns: int
    job_name: str = ""
    rank: int = 0
    world_size: int = 1  # 1 when this rank alone saves
    solo: bool = False
    process: bytes = b""
    incarnation: int = 0
    storage: str = ""  # which directory its volumes are in
    #: How its tensors are transferred, and why: its latest report.
    transfer: str = ""
    transfer_reason: str = ""
    exposing: Exposing = field(default_factory=Exposing)
    descriptors: Descriptors = field(default_factory=Descriptors)
    job: Job | None = None
    tenant: Tenant | None = None
    wide: WideJob | None = None  # of a trainer whose job has ranks on other nodes
    was_wide: WideJob | None = None  # of one whose job had them before, and runs here alone
    port: Port | None = None
    endpoint: str = ""  # for its requests; "" for an observer
    gone: Callable[[], bool] = lambda: False  # as `Peer.gone`
    tell: Callable[[bytes], None] = lambda _: None  # sends a packet that nobody asked for
    told: bool = False  # to make way for a snapshot of its process
    ending: bool = False
    took_leave: bool = False  # its Goodbye has arrived; it may arrive again
    #: By load id: whose checkpoint is read, and its sequence.
    loads: dict[int, tuple[Tenant, int]] = field(default_factory=dict)
    broken: asyncio.Event = field(default_factory=asyncio.Event)  # it has to end
    gives_way: bool = False  # it ends so that another user's session has memory

    @property
    def key(self) -> Key | str:
        """Whose checkpoints it saves or reads, for the log."""
        return self.tenant.key if self.tenant is not None else f"uid {self.uid}"

    def is_busy(self) -> bool:
        """Whether a checkpoint is in flight, or one is being loaded."""
        trains = self.role is Role.TRAINER
        return bool(self.loads or (trains and self.tenant and self.tenant.ledger.live()))

    @property
    def start(self) -> bytes:
        """The id of the start that its process belongs to; b"": it belongs to none."""
        return self.job.members.of(self.rank, self.process).id if self.job else b""

    async def begin_load(self, load: int, tenant: Tenant, sequence: int) -> None:
        """A checkpoint is read: its volumes stay open until `end_load`. Raises UsageError."""
        await tenant.uses.begin_read()
        if load in self.loads:
            tenant.uses.end_read()
            raise UsageError(f"load {load} is in progress")
        self.loads[load] = tenant, sequence

    def end_load(self, load: int) -> None:
        """Does nothing for a load that has ended."""
        tenant, _ = self.loads.pop(load, (None, 0))
        if tenant is not None:
            tenant.uses.end_read()

    def chose(self, transfer: str, reason: str) -> None:
        """How its tensors are transferred, and why."""
        self.transfer, self.transfer_reason = transfer, reason

    def follow(self) -> None:
        """It restores: it belongs to the newest start of its job."""
        if self.job is not None:
            self.incarnation = self.job.members.follow(self.rank, self.process)

    def give_way(self) -> None:
        self.gives_way = True
        self.broken.set()

    def keeps_memory(self) -> None:
        """Ends a session that did not return DRAM for which others wait."""
        LOG.warning(
            "%s: session %d (pid %d) ended: it has not returned DRAM for %g s, since its process "
            "is stopped or its GPU hangs; the client reconnects at a later checkpoint",
            self.key, self.number, self.pid, BACK_LIMIT_S,
        )  # fmt: skip
        self.broken.set()


class Sessions:
    """Opens, ends and finds them."""

    def __init__(self, registry: Registry, control: ControlServer) -> None:
        self.engine, self.config = registry.engine, registry.config
        self.registry = registry
        self.control = control
        self.draining = False  #: the daemon stops: no session and no checkpoint begins
        self._sessions: dict[int, Session] = {}
        self._next = 1
        self._work = Tasks("sessions")
        self._places = list(places())  # that the daemon ends with
        #: Processes of which a snapshot is to be taken, by the session that asked: uid and pids.
        self._paused: dict[int, tuple[int, frozenset[int]]] = {}

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def trainers(self) -> int:
        return sum(session.role is Role.TRAINER for session in self._sessions.values())

    def room_bytes(self, session: Session) -> int:
        """The limit for a session's incomplete exposure: the sessions of a user share one limit."""
        others = (s for s in self._sessions.values() if s.uid == session.uid and s is not session)
        return UNFINISHED_BYTES_MAX - sum(other.exposing.held_bytes for other in others)

    def room_descriptors(self, session: Session) -> int:
        """The same for the descriptors that wait for a session's exposure."""
        others = (s for s in self._sessions.values() if s.uid == session.uid and s is not session)
        return held_max() - sum(len(other.descriptors) for other in others)

    def require_map(self, session: Session, pieces: int) -> None:
        """Raises RefusedError when the user's sessions map too much GPU memory to map more."""
        others = [s for s in self._sessions.values() if s.uid == session.uid and s is not session]
        used = [use for s in others if s.port is not None and (use := s.port.usage()) is not None]
        mapped = sum(use.pieces for use in used) + pieces
        nbytes = sum(use.exposed_bytes for use in used)
        if mapped > PIECES_PER_UID_MAX or nbytes > EXPOSED_BYTES_PER_UID_MAX:
            raise RefusedError(
                f"too much GPU memory of this user is mapped: {mapped} pieces, "
                f"{size_text(nbytes)}", hint=PUSHED, retryable=True,
            )  # fmt: skip

    def drain(self) -> None:
        """The daemon stops: what is copied becomes durable."""
        self.draining = True
        for tenant in self.registry.tenants():
            tenant.readiness.stop()
        for job in self.registry.jobs.values():
            job.write_parked()

    def pause(self, asking: Session, pids: list[int]) -> Paused:
        """Tells each connected client of these processes once to make way; how many there are."""
        if len(pids) > PAUSED_MAX:
            raise UsageError(f"$.body.pids has {len(pids)} items, the limit is {PAUSED_MAX}")
        self._paused[asking.number] = asking.uid, frozenset(pids)
        connected = [
            session for session in self._sessions.values()
            if session.kernel_pid in pids and session.role is not Role.OBSERVER
            and asking.uid in (0, session.uid)
        ]  # fmt: skip
        for session in connected:
            if not session.told:
                session.told = True
                session.tell(codec.encode(MakeWay()))
        return Paused(len(connected), sorted({session.job_name for session in connected}))

    def _is_paused(self, peer: Peer) -> bool:
        return any(peer.pid in pids and uid in (0, peer.uid) for uid, pids in self._paused.values())

    def by_token(self, uid: int, token: bytes) -> Session:
        """Raises RefusedError for a token that is not of a session of this uid."""
        for session in self._sessions.values():
            if session.uid == uid and hmac.compare_digest(session.token, token):
                return session
        raise RefusedError("no such session: it has ended, or the token is wrong")

    async def open(self, hello: Hello, peer: Peer) -> tuple[Session, Welcome, list[int]]:
        """A session and the answer, with the descriptors to send and close.

        Raises PccheckError when the peer may not have it.
        """
        if self.draining:
            raise RefusedError("the daemon is stopping", hint="try again later", retryable=True)
        if self._is_paused(peer):
            raise RefusedError(
                "a snapshot of this process is about to be taken", hint="try again", retryable=True
            )
        session = Session(
            number=self._next, token=secrets.token_bytes(16), role=hello.role, uid=peer.uid,
            pid=peer.pid or hello.pid, kernel_pid=peer.pid, connected_ns=time.monotonic_ns(),
            gone=peer.gone,
        )  # fmt: skip
        self._next += 1
        descriptors: list[int] = []
        try:
            if hello.role is not Role.OBSERVER:
                _check_names(hello)
                await self.engine.require_storage(peer.uid)
                session.job_name, session.rank = hello.job, hello.rank
                session.world_size = 1 if hello.solo else hello.world_size
                session.solo = hello.solo
                session.process = hello.process or session.token
                session.endpoint = await self.control.join(peer.uid, peer.gid)
                attach = self._attach_trainer if hello.role is Role.TRAINER else self._attach_reader
                self._sessions[session.number] = session
                descriptors = await attach(session, hello, peer)
            elif hello.storage and self.engine.directory is not None:
                await self.engine.lacks_storage(peer.uid)
                session.storage = self.engine.directory.number
            self._sessions[session.number] = session
        except BaseException:
            await self.end(session)
            raise
        return session, self._welcome(session), descriptors

    async def end(self, session: Session) -> None:
        """The peer has gone, or has to: drains what it handed over."""
        session.ending = True
        session.exposing.drop()
        session.descriptors.close()
        try:
            if session.role is Role.TRAINER and session.tenant is not None:
                await self._detach(session, session.tenant)
            elif session.port is not None:
                await session.port.detach()
                await session.port.close()
        finally:
            self.registry.memory.gone(session.number)
            if session.tenant is not None and session.role is Role.READER:
                session.tenant.uses.add_reader(-1)
                for tenant in session.job.tenants.values() if session.job is not None else ():
                    tenant.leases.give_back(session.number)
            for load in list(session.loads):
                session.end_load(load)
            self._sessions.pop(session.number, None)
            self._paused.pop(session.number, None)
            if session.endpoint:
                self.control.leave(session.uid)
        if session.role is not Role.OBSERVER and not self.draining:
            # Not awaited: it closes jobs of other users, on other disks.
            self._work.spawn(self.registry.trim())

    async def _detach(self, session: Session, tenant: Tenant) -> None:
        owner = tenant.seat.owner
        try:
            others = session.job.tenants.values() if session.job is not None else ()
            await tenant.detach(session.number, others, give_way=session.gives_way)
        finally:
            mine = owner is not None and owner.session == session.number
            if session.wide is not None:
                session.wide.gone(session.number)
            if session.job is not None and mine:
                session.job.left(tenant.key.rank, session.process)

    def _welcome(self, session: Session) -> Welcome:
        tenant = session.tenant
        newest = tenant.ledger.newest if tenant else None
        trains = session.role is Role.TRAINER
        offer = (
            offered(Case(self.engine.driver.state))
            if trains
            else Decision(session.transfer, session.transfer_reason)
        )
        return Welcome(
            protocol=PROTOCOL_VERSION, version=VERSION, session=session.number,
            token=session.token, endpoint=session.endpoint, pid=os.getpid(),
            incarnation=session.incarnation, start=session.start, storage=session.storage,
            chunk_bytes=session.port.chunk_bytes if session.port else 0,
            transfer=offer.transfer, transfer_reason=offer.reason, transfer_later=offer.may_pass,
            newest_step=newest[1] if newest else None,
            protected_step=_protected_step(tenant) if tenant else None,
            places=self._places if trains else [],
        )  # fmt: skip

    async def _attach_trainer(self, session: Session, hello: Hello, peer: Peer) -> list[int]:
        job, tenant = await self.registry.tenant(Key(session.uid, hello.job, hello.rank))
        place = self.config.storage
        with tenant.uses.come():
            await tenant.readiness.look()
            session.storage = await self.engine.call(session.uid, layout.identity, place)
            deadline = time.monotonic() + DETACH_LIMIT_S
            while session.tenant is None:
                tenant.volumes.require_only(images=hello.images)
                await self._wait_for_predecessor(tenant, peer)
                await tenant.prepare()
                async with job.joining:  # other ranks wait meanwhile
                    _require_there(peer)
                    late = time.monotonic() > deadline
                    # One that ends may have been noticed only while this one waited here.
                    if late or not self._predecessor_ends(tenant):
                        tenant.volumes.require_only(images=hello.images)  # it may have saved
                        descriptors = await self._join(session, hello, job, tenant)
            session.port = port = tenant.binding.port
            session.chose(PUSH, "CPU tensors")
            if port is not None and port.grant.nbytes:  # no longer a cache
                self.registry.memory.enter(session, port.grant.nbytes)
        LOG.info(
            "%s: pid %d connected (session %d, run %d)",
            tenant.key, session.pid, session.number, session.incarnation,
        )  # fmt: skip
        return descriptors

    async def _join(self, session: Session, hello: Hello, job: Job, tenant: Tenant) -> list[int]:
        """The descriptors for the answer."""
        session.job, session.tenant = job, tenant
        if hello.local_world_size < session.world_size:
            session.wide = await self.registry.nodes.take(job)
        elif not hello.solo:
            session.was_wide = self.registry.nodes.of(job)
        owner = Owner(
            session=session.number, pid=session.pid,
            world_size=session.world_size, local_world_size=hello.local_world_size,
            fresh=hello.fresh, process=session.process, solo=hello.solo,
            restored=hello.restored,
            on_event=lambda event: self._on_event(session, event),
            kernel_pid=session.kernel_pid,
        )  # fmt: skip
        joins = tenant.seat.owner is None  # else attach() refuses
        if joins:
            job.members.require_no_other(hello.rank, solo=hello.solo)
            session.incarnation = job.join(Arrival(
                hello.rank, session.process, hello.launch, session.world_size,
                was=hello.incarnation, start_id=hello.start,
                moved=hello.storage not in ("", session.storage),
                here=session.world_size if hello.solo else hello.local_world_size,
            ))  # fmt: skip
            if session.wide is not None:
                session.wide.came(hello)
        with _descriptors() as (ours, given):
            try:
                given.insert(0, await tenant.attach(owner, ours.fileno()))
            except BaseException:
                if joins:
                    job.left(hello.rank, session.process)
                raise
            job.decide_soon()
            await job.release()
        return given

    async def _wait_for_predecessor(self, tenant: Tenant, peer: Peer) -> None:
        """Waits until a trainer that has ended is drained; or for a moment, while its disconnect
        may not be noticed yet."""
        began = time.monotonic()
        while tenant.seat.owner is not None:
            known = tenant.seat.owner.session in self._sessions
            limit_s = GRACE_S if known and not self._predecessor_ends(tenant) else DETACH_LIMIT_S
            if time.monotonic() - began > limit_s:
                return
            _require_there(peer)
            await asyncio.sleep(STEP_S)

    def _predecessor_ends(self, tenant: Tenant) -> bool:
        """Also when it disconnected before its answer, which is noticed only then."""
        before = (
            self._sessions.get(tenant.seat.owner.session) if tenant.seat.owner is not None else None
        )
        return before is not None and (before.ending or before.gone())

    async def _attach_reader(self, session: Session, hello: Hello, _: Peer) -> list[int]:
        uid = session.uid if hello.uid < 0 else hello.uid
        require_access(session.uid, uid, "read checkpoints")
        key = Key(uid, hello.job, hello.rank)
        session.job, tenant = await self.registry.existing(key)
        session.tenant = tenant
        tenant.uses.add_reader()  # before any await: the job stays loaded
        await tenant.readiness.look()
        if not tenant.volumes.open:
            raise NoCheckpointError(f"{key} has no volume any more", hint="see: pccheckctl list")
        block = tenant.volumes.open[-1].info.block_bytes
        chunk = -(-self.config.chunk_bytes // block) * block
        shape = PortShape(chunk, block, READER_CHUNKS, lanes=1, writers=1)
        session.port = await Port.opened(
            self.engine, session.uid, lambda event: self._on_event(session, event), shape
        )
        session.chose(PUSH, "a reader")
        with _descriptors() as (ours, given):
            given.insert(0, await session.port.attach(ours.fileno(), session.number))
            await self.registry.memory.claim(session, READER_CHUNKS * chunk)
        return given

    def _on_event(self, session: Session, event: _core.Event) -> None:
        """Events of a session's page, on the loop."""
        if event.kind in ("bad_peer", "requested"):  # of a reader: it saves nothing
            LOG.warning(
                "%s: session %d (pid %d) ended: it violated the protocol",
                session.key, session.number, session.pid,
            )  # fmt: skip
            session.broken.set()
        if event.kind != "load_ended" or event.id not in session.loads:
            return
        tenant, sequence = session.loads.pop(event.id)
        self._work.spawn(self._after_load(session, tenant, sequence, problem=event.error_name))

    async def _after_load(
        self, session: Session, tenant: Tenant, sequence: int, *, problem: str
    ) -> None:
        item = tenant.volumes.find(sequence)
        try:
            foreign = tenant is not session.tenant or session.role is Role.READER
            if foreign and session.port is not None and item is not None:
                with contextlib.suppress(ValueError):  # it has ended
                    await session.port.unbind(item.volume, 0)  # otherwise it could not be reopened
        finally:
            tenant.uses.end_read()
        if problem == "DAMAGED":
            await tenant.retention.damaged(sequence)
        elif problem == "UNREADABLE":
            tenant.retention.not_read(sequence)


def _protected_step(tenant: Tenant) -> int | None:
    incarnation = tenant.readiness.incarnation
    copied = (one for one in tenant.ledger.copied() if one.id.incarnation < incarnation)
    return tenant.retention.protected_step(copied)


@contextlib.contextmanager
def _descriptors() -> Iterator[tuple[socket.socket, list[int]]]:
    """The daemon's end of the socket over which a session gets its memory, which the native port
    duplicates; and what the peer gets: the other end, with the page's descriptor to come before it.
    If the block fails, all are closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        given = [theirs.detach()]
        try:
            yield ours, given
        except BaseException:
            for descriptor in given:
                os.close(descriptor)
            raise


def _require_there(peer: Peer) -> None:
    """Raises RefusedError for a peer that has disconnected: it must not occupy a rank."""
    if peer.gone():
        raise RefusedError("the process disconnected during its handshake")


def _check_names(hello: Hello) -> None:
    """Raises UsageError: names and numbers become file names and sizes."""
    require_job_name(hello.job)
    if hello.rank >= hello.world_size:
        raise UsageError(
            f"rank must be less than world_size (got {hello.rank} and {hello.world_size})"
        )
    if hello.local_world_size > hello.world_size:
        raise UsageError("local_world_size must not exceed world_size")
    if hello.role is not Role.TRAINER or hello.solo:
        return
    if hello.local_world_size > CONNECTIONS_PER_UID_MAX:
        raise UsageError(
            f"local_world_size must be at most {CONNECTIONS_PER_UID_MAX} (got "
            f"{hello.local_world_size}): each rank on this node needs a connection, and a user may "
            f"have {CONNECTIONS_PER_UID_MAX}"
        )
