"""The checkpoints of one rank, from the request to the end: their numbers, what the core reports of
them, and what follows for the volumes, the other ranks and the trainer's page."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pccheck_native import OUTCOME_GIVEN_UP, _core
from pccheck_native.identity import CheckpointId
from pccheck_wire.ends import Cause, Why
from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import Tasks
from pccheckd.base.logs import LOG
from pccheckd.core.port import Port
from pccheckd.core.uses import Seat

from .binding import Binding, BindingState
from .checkpoint import BROKEN, End, RankCheckpoint, failed
from .group import Group, Numbered
from .ledger import Ledger
from .outcomes import Chronicle
from .pulling import Pulling
from .readiness import Readiness
from .retention import Retention
from .volumes import Key, OpenVolume

FILE_LOST = ("REMOVED", "REPLACED", "TRUNCATED")  # a volume's file is not at its path, or truncated
INHERITED = 0  # the session of checkpoints that the previous daemon had copied


@dataclass(slots=True)
class Saves:
    """Owned by its tenant; only the loop touches it."""

    _group: Group
    _seat: Seat
    _ledger: Ledger
    _binding: Binding
    _retention: Retention
    _readiness: Readiness
    _pulling: Pulling
    _chronicle: Chronicle
    _tasks: Tasks
    interval_steps: int = 0  #: between checkpoints, if the client chooses the interval
    #: Requests that get their number when the nodes of the job have agreed.
    _waiting: list[tuple[RankCheckpoint, _core.SaveRequest, Port]] = field(default_factory=list)

    @property
    def _key(self) -> Key:
        return self._binding.volumes.key

    # -- requests ------------------------------------------------------------------------------

    def requested(self, event: _core.Event) -> None:
        """The trainer requests a checkpoint: one of several ranks gets its number now."""
        owner, port = self._seat.owner, self._binding.port_of(event.session)
        if owner is None or port is None or event.request is None:
            return
        port.native.noted()
        asked = event.request
        in_memory = asked.level != _core.LEVEL_DISK  # one on the device gets there
        on_device = asked.level == _core.LEVEL_DEVICE
        self.interval_steps = asked.interval
        checkpoint = RankCheckpoint(
            CheckpointId(*self._key, 0, asked.step, self._readiness.incarnation, owner.world_size),
            session=event.session, snapshot=event.id,
            payload_bytes=asked.payload_bytes, skip_when_busy=asked.skip,
            requested_ns=asked.taken_ns, on_device=on_device, in_memory=in_memory, parks=in_memory,
            map=asked.map, held_at_ns=asked.held_at_ns, held_ns=asked.held_ns,
        )  # fmt: skip
        self._ledger.add(checkpoint)
        self._chronicle.requested(checkpoint)
        if asked.cause:  # the core has refused it
            self.ended(checkpoint, failed(Cause(asked.cause), asked.argument))
            return
        end = self._number(checkpoint, asked, port)
        if end is not None:
            self.refuse(checkpoint, end)
        self._group.decide_soon()

    def _number(
        self, checkpoint: RankCheckpoint, asked: _core.SaveRequest, port: Port
    ) -> End | None:
        """Gives one of several ranks its number; how it ends if it gets none."""
        if self._readiness.stops:
            return failed(Cause.STOPPING)
        if self._binding.volumes.current is None and not self._readiness.room_bytes:
            return failed(Cause.NO_ROOM)
        given = self._group.number(self._key.rank, asked)
        run, sequence = given.incarnation, given.sequence
        checkpoint.id = checkpoint.id._replace(incarnation=run, sequence=sequence)
        if given.waits:
            self._waiting.append((checkpoint, asked, port))
            return None
        self._ledger.numbered(checkpoint)
        if given.end is None and sequence:
            return self._given_up(checkpoint) or self._tell_number(checkpoint, port, given)
        return given.end

    def number_waiting(self, end: End | None = None) -> None:
        """The nodes of the job have agreed: what waited for that gets its number, or this `end`."""
        waiting, self._waiting = self._waiting, []
        for checkpoint, asked, port in waiting:
            if not checkpoint.live:
                continue
            if why := end or self._number(checkpoint, asked, port):
                self.refuse(checkpoint, why)

    def _tell_number(
        self, checkpoint: RankCheckpoint, port: Port, given: Numbered | None = None
    ) -> End | None:
        """`given`: None for a rank alone."""
        found = checkpoint.id
        marks, name = (given.marks, given.name) if given is not None else (0, (0, 0, 0))
        try:
            port.native.number(
                checkpoint.snapshot, found.sequence, found.incarnation, found.world_size,
                marks, name,
            )  # fmt: skip
        except (OSError, _core.NativeError):  # a sequence that is in use: no two are given out
            LOG.exception("%s: step %d got no number", self._key, found.step)
            return BROKEN
        return None

    def begun(self, checkpoint: RankCheckpoint, given: int) -> None:
        """The core has found lane and slot for it, and has `given` it a sequence; 0: it has not."""
        # One that waits is copied, and gets its number when the nodes of the job have agreed.
        waits = any(checkpoint is one for one, _, _ in self._waiting)
        if not waits and not checkpoint.id.sequence:  # of a rank alone
            sequence = self._group.took(self._key.rank, given)
            checkpoint.id = checkpoint.id._replace(sequence=sequence)
            self._ledger.numbered(checkpoint)
            port = self._binding.port_of(checkpoint.session)
            if not given and port is not None and self._tell_number(checkpoint, port):
                self.refuse(checkpoint, BROKEN)
                return
        self._ledger.passed(checkpoint.id.sequence)
        checkpoint.advance(State.COPYING, time.monotonic_ns())

    def _given_up(self, checkpoint: RankCheckpoint) -> End | None:
        if not self._group.gives_up(checkpoint.id.sequence):
            return None
        return End(State.SKIPPED, self._group.why_given_up(checkpoint.id.sequence))

    def refuse_given_up(self) -> None:
        """The ranks have decided: what has not begun and was given up ends."""
        for checkpoint in self._ledger.live():
            if checkpoint.state is State.REQUESTED and checkpoint.id.sequence:
                end = self._given_up(checkpoint)
                if end is not None:
                    self.refuse(checkpoint, end)

    # -- ends ----------------------------------------------------------------------------------

    def refuse(self, checkpoint: RankCheckpoint, end: End) -> None:
        """Ends a checkpoint that is not copied yet. If the core has copied or ended it meanwhile,
        an event says how it went on."""
        port, why = self._binding.port_of(checkpoint.session), end.why
        if port is not None and port.native.refuse(
            checkpoint.snapshot, int(end.to), checkpoint.id.sequence, cause=int(why.cause),
            error=why.number, argument=int(why.argument),
        ):  # fmt: skip
            self.ended(checkpoint, end)

    def ended(self, checkpoint: RankCheckpoint, end: End) -> None:
        """A checkpoint has ended that nothing writes, and of which no event comes."""
        if checkpoint.live:
            self._ledger.refuse(checkpoint, end)
            self._group.decide_soon()
            self._chronicle.ended(checkpoint)

    def on_event(self, event: _core.Event) -> None:
        """What became of a checkpoint that has begun."""
        if event.kind == "wanted":
            self._wanted(event)
            return
        checkpoint = self._ledger.apply(event, self._group.why_given_up)
        if checkpoint is None:
            return
        self._pulling.note(checkpoint, event)
        if event.kind == "durable":
            self._seat.saved(checkpoint.requested_ns)
            self._ledger.appearing[checkpoint.id.sequence] = checkpoint.id.world_size
            self._group.appeared()
            self._tasks.spawn(self._after_durable(checkpoint))
        elif event.kind == "failed" and event.error_name in FILE_LOST:
            self._binding.lose()
            self._readiness.instruct()
            self._tasks.spawn(self._readiness.look(listing=False))
        elif event.kind == "failed" and event.stage == "publish":
            self._binding.stop(checkpoint.id.sequence)
            self._tasks.spawn(self._open_again())
        if not checkpoint.live:
            self._chronicle.ended(checkpoint)
        if event.kind in ("failed", "superseded", "given_up"):
            self._group.decide_soon()
            self._tasks.spawn(self._retire())
        elif checkpoint.is_parked:  # the core reports its times only if it is written
            at_ns = checkpoint.at_ns
            checkpoint.times_ns |= {"begin": at_ns[State.COPYING], "sealed": at_ns[State.COPIED]}
            checkpoint.copied_bytes = checkpoint.payload_bytes  # nothing of it is offered
            self._group.decide_soon()

    async def _open_again(self) -> None:
        """Other ranks wait for what is on the disk. If that fails, the next save tries again."""
        if self._group.is_shared:
            with contextlib.suppress(OSError, _core.NativeError, PccheckError):
                await self._readiness.reopen()

    def failed_before_request(self, count: int) -> None:
        """Checkpoints of its trainer failed because it was refused room, or without a daemon."""
        self._ledger.failed(count)
        refused = self._seat.refused
        self._chronicle.unrequested(self._key, count, refused.code if refused else "OTHER")

    # -- what is in memory only ----------------------------------------------------------------

    def _wanted(self, event: _core.Event) -> None:
        """Its trainer wants one on the disk, perhaps before it is copied."""
        found = self._ledger.find(event.session, event.id)
        if found is not None and found.live:
            found.wanted = True
            self._group.decide_soon()

    def write(self, parked: RankCheckpoint) -> str:
        """Gives a parked one a lane and a slot; "" or the code why it stays parked."""
        port = self._binding.port
        if port is None:
            return "ENODEV"
        try:
            port.native.write(parked.id.sequence)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "EIO")
        except _core.NativeError as error:
            return error.code_name
        except ValueError:  # closed
            return "ENODEV"
        parked.parks = False
        return ""

    def drop(self, parked: RankCheckpoint, end: End, newer: tuple[int, int] | None = None) -> None:
        """Ends a parked one, which frees its memory. `newer`: sequence and step of what replaced
        it."""
        port, why = self._binding.port, end.why
        if port is None:
            return
        with contextlib.suppress(ValueError):  # closed
            if port.native.drop(
                parked.id.sequence, int(end.to), newer[0] if newer else 0, cause=int(why.cause),
                argument=int(why.argument),
            ):  # fmt: skip
                parked.newer = newer
                self.ended(parked, end)

    # -- what the ranks have decided -----------------------------------------------------------

    def became_global(self, newest: int, common: Collection[int]) -> None:
        """Every rank has the sequences `common`, up to `newest`: writes that to the page."""
        for found in self._ledger.became_global(newest, common):
            superseded = found.state is State.SUPERSEDED
            self._tell(found, found.state, newest if superseded else 0)
        self._tasks.spawn(self._retire())

    def gave_up(self, why_never: Callable[[int], Why | None]) -> None:
        """Writes to the page which of the checkpoints that are durable here never become global."""
        for found in self._ledger.gave_up(why_never):
            self._tell(found, OUTCOME_GIVEN_UP)

    def _tell(self, found: RankCheckpoint, outcome: int, newer: int = 0) -> None:
        """Writes to the page of its trainer, if that one is still here. `newer`: the sequence that
        superseded it."""
        if (port := self._binding.port_of(found.session)) is not None:
            port.native.set_outcome(found.snapshot, int(outcome), found.id.sequence, newer)

    # -- the volumes ---------------------------------------------------------------------------

    async def _after_durable(self, checkpoint: RankCheckpoint) -> None:
        await self._binding.volumes.refresh()
        if self._binding.state is not BindingState.LOST:
            self._binding.volumes.settled()
        self._ledger.appearing.pop(checkpoint.id.sequence, None)
        self._group.decide_soon()
        await self._retire()
        owner = self._seat.owner
        if checkpoint.session == INHERITED:
            inherited = self._ledger.sequences(INHERITED) & self._binding.volumes.sequences()
            await self._retention.became_durable(inherited)
        elif owner is not None and owner.session != checkpoint.session:
            await self._retention.protect_late()

    async def _retire(self) -> None:
        await self._binding.retire(self.needs)

    def needs(self, item: OpenVolume) -> bool:
        """Whether a volume holds a checkpoint that must stay."""
        held = {found.id.sequence for found in item.checkpoints}
        return bool(item.pinned or held & self._retention.protected) or any(
            map(self._group.needs, held)
        )
