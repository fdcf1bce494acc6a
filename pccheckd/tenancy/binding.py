"""What a rank writes to: its port, and the volumes on the disk that the port is bound to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum

from pccheck_native import _core
from pccheck_wire.errors import RefusedError
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.base.moves import moved
from pccheckd.core.engine import Engine, PortShape
from pccheckd.core.port import Port
from pccheckd.core.uses import Seat, Uses

from .volumes import OpenVolume, VolumeSet

CHUNK_CAPACITY_MAX = 65536
UNBIND_LIMIT_S = 30.0
BINDINGS_MAX = 4  # PCC_TENANT_VOLUMES


class BindingState(Enum):
    UNBOUND = "unbound"  # no writers: no volume yet, no port yet, or the rank rests
    BOUND = "bound"  # saves may begin
    STOPPED = "stopped"  # a commit record failed: the next save opens the volume again
    LOST = "lost"  # the volume's file is gone: the next save opens or makes another volume
    CLOSED = "closed"


_B = BindingState
BINDING_MOVES: dict[BindingState, frozenset[BindingState]] = {
    _B.UNBOUND: frozenset({_B.BOUND, _B.STOPPED, _B.LOST, _B.CLOSED}),
    _B.BOUND: frozenset({_B.UNBOUND, _B.STOPPED, _B.LOST, _B.CLOSED}),
    _B.STOPPED: frozenset({_B.BOUND, _B.LOST, _B.CLOSED}),
    _B.LOST: frozenset({_B.BOUND, _B.STOPPED, _B.CLOSED}),
    _B.CLOSED: frozenset(),
}


class Binding:
    """Owned by its tenant. Its own methods take `lock`, except those that say otherwise."""

    def __init__(
        self, engine: Engine, volumes: VolumeSet, seat: Seat, uses: Uses,
        listener: Callable[[_core.Event], None],
    ) -> None:  # fmt: skip
        # Locks, taken in this order.
        self._looking = asyncio.Lock()  # while the files are compared with their paths
        self.lock = asyncio.Lock()  # while volumes, port and trainers come and go
        self._key = volumes.key
        self._engine = engine
        self._seat = seat
        self._uses = uses
        self._listener = listener  # of the port's events
        self.volumes = volumes
        self.port: Port | None = None
        self.state = BindingState.UNBOUND
        self.stalled = ""  # why the disk seems to hang
        #: Sequences whose record failed: it may be on the disk, until the volume is opened again.
        self.unsure: set[int] = set()

    def note_stall(self, why: str) -> None:
        """Why the disk seems to hang, or "": logged when that changes."""
        if bool(why) != bool(self.stalled):
            LOG.warning("%s: %s", self._key, why or "the disk makes progress again")
        self.stalled = why

    def port_of(self, session: int) -> Port | None:
        """The port while the trainer of that session is attached to it; else None."""
        owner = self._seat.owner
        return self.port if owner is not None and owner.session == session else None

    def usage(self) -> _core.TenantUsage | None:
        """What its memory is used for; None without a port. Waits for no disk."""
        return self.port.usage() if self.port is not None else None

    @property
    def is_usable(self) -> bool:
        """Whether saves may begin without `register`."""
        return self.state not in (BindingState.STOPPED, BindingState.LOST)

    def stop(self, sequence: int = 0) -> None:
        """A commit record failed: that of this checkpoint, if it was one's. Takes no lock."""
        self.unsure |= {sequence} - {0}
        ended = self.state in (BindingState.STOPPED, BindingState.CLOSED)
        if not ended and self.volumes.current is not None:
            self._move(BindingState.STOPPED)

    def lose(self) -> None:
        """The file of a volume is gone. Takes no lock."""
        if self.state not in (BindingState.LOST, BindingState.CLOSED):
            self._move(BindingState.LOST)

    def _move(self, to: BindingState) -> None:
        self.state = moved(BINDING_MOVES, self.state, to, self._key)

    async def close(self) -> None:
        """Drains sealed saves, then closes port and volumes."""
        async with self.lock:
            await self.abandon_port()
            await self.volumes.close()
            if self.state is not BindingState.CLOSED:
                self._move(BindingState.CLOSED)

    # -- the port; the caller holds the lock ------------------------------------------------

    async def open_port(self, *, in_use: bool) -> Port:
        """The port, bound to the current volume, whose block size it has. A port with chunks
        of another size, of before --chunk was changed, is replaced unless it is `in_use`."""
        config, current = self._engine.config, self.volumes.current
        block = current.info.block_bytes if current else config.block_bytes
        chunk = -(-config.chunk_bytes // block) * block
        if self.port is not None and self.port.chunk_bytes != chunk and not in_use:
            await self.abandon_port()
        port = self.port or await self.make_port(chunk, block, config.in_flight)
        if current is not None and self.state is not BindingState.BOUND:
            await self.bind(current)
        return port

    async def make_port(self, chunk_bytes: int, block_bytes: int, lanes: int) -> Port:
        """Opens a port; also for chunks that the previous daemon has left."""
        config = self._engine.config
        capacity = max(2, min(config.dram_bytes // chunk_bytes, CHUNK_CAPACITY_MAX))
        gpus = await self._engine.driver.ready()
        shape = PortShape(
            chunk_bytes, block_bytes, capacity, lanes, config.writers, gpus, self._key.label
        )
        self.port = await Port.opened(self._engine, self._key.uid, self._listener, shape)
        return self.port

    async def abandon_port(self) -> None:
        """Closes the port, after sealed saves are written."""
        port, self.port = self.port, None
        if self.state is BindingState.BOUND:
            self._move(BindingState.UNBOUND)
        if port is not None:
            await port.close()

    async def bind(self, item: OpenVolume) -> None:
        """New saves go to this volume. Does nothing for the one that is bound."""
        assert self.port is not None
        try:
            await self._engine.call(self._key.uid, self.port.native.bind, item.volume)
        except (OSError, _core.NativeError) as error:
            raise translated(error, f"the volume {item.path}") from error
        if self.state is BindingState.UNBOUND:
            self._move(BindingState.BOUND)

    async def rest(self) -> None:
        """Ends the writers; what is cached stays. A volume that is busy with a load keeps them
        until the next time."""
        if self.port is None:
            return
        if self.state is BindingState.BOUND:
            self._move(BindingState.UNBOUND)
        for item in self.volumes.open:
            await self.port.unbind(item.volume, 0)

    # -- the volumes ---------------------------------------------------------------------------

    async def look(self, *, listing: bool) -> bool:
        """Checks that the volumes' files are still at their paths. Closes those that are not, and
        opens what is there instead; with `listing` also files that have appeared beside them.
        Whether other volumes are open now."""
        async with self._looking:
            lost = await self.volumes.look()
            if lost:
                self.lose()
            if not (lost or listing or self.volumes.gone):
                return False
            async with self.lock:
                return self.state is not BindingState.CLOSED and (await self._take_stock() or lost)

    async def _take_stock(self) -> bool:
        """Opens what is on the disk now; whether there was more than before."""
        for item in list(self.volumes.gone):
            unused = self.port is None or await self.port.unbind(item.volume, 0)
            if unused and not self._uses.reads:
                await self.volumes.close_lost(item)
        before = list(self.volumes.open)
        with contextlib.suppress(FileNotFoundError):  # the storage directory
            await self.volumes.load()
        current = self.volumes.current
        if self.port is not None and current is not None and current not in before:
            await self.bind(current)
        return self.volumes.open != before

    async def register(
        self, payload_bytes: int, *, incarnation: int, start: bytes, world_size: int,
        last_sequence: int, spare: int,
    ) -> OpenVolume:  # fmt: skip
        """A volume whose slots hold `payload_bytes`, bound to the port: the current one, or a
        new one with `spare` slots more than configured. The caller holds the lock. Raises
        PccheckError."""
        current = self.volumes.current
        too_small = current is None or payload_bytes > current.info.payload_capacity
        if current is None or too_small or self.volumes.is_followed:
            # The port numbers no save lower than one in the old volume.
            current = await self.volumes.make(
                payload_bytes, incarnation=incarnation, start=start, world_size=world_size,
                next_sequence=last_sequence + 1, spare=spare,
            )  # fmt: skip
            await self._move_to(current)
            current.begun = incarnation
        elif current.begun != incarnation:
            await self.begin(current, incarnation, world_size, start)
        if self.state is BindingState.LOST:
            await self.bind(current)
            self._move(BindingState.BOUND)
        return current

    async def begin(
        self, item: OpenVolume, incarnation: int, world_size: int, start: bytes
    ) -> None:
        """Checkpoints in the volume belong to this start from now on. The caller holds the lock."""
        try:
            await self._engine.call(
                self._key.uid, item.volume.begin_incarnation, incarnation, world_size, start
            )
        except (OSError, _core.NativeError) as error:
            self.stop()
            raise translated(error, f"the volume {item.path}") from error
        item.begun = incarnation

    async def _move_to(self, made: OpenVolume) -> None:
        """New saves go to a volume that was just made. Outgrown volumes need no binding to be read;
        those that hold nothing are dropped."""
        port, busy = self.port, []
        assert port is not None
        try:
            for item in self.volumes.open[:-1]:
                if not await port.unbind(item.volume, 0):
                    busy.append(item)
                    continue
                await self._engine.call(self._key.uid, item.read)
                if not item.checkpoints:
                    await self.volumes.drop(item)
            if len(busy) >= BINDINGS_MAX:
                await port.unbind(busy[0].volume, UNBIND_LIMIT_S)
            await self.bind(made)
        except BaseException:
            await self.volumes.drop(made)
            if self.volumes.current is not None:
                await self.bind(self.volumes.current)
            raise

    async def reopen(self) -> bool:
        """Reads a stopped volume from the media again; whether it was stopped. A checkpoint of
        several ranks whose record failed is destroyed, if it is there: the other ranks give it up.
        Raises RefusedError while the volume is read or written."""
        async with self._uses.reopening:  # a request and a save may both find it stopped
            port, current = self.port, self.volumes.current
            if self.state is not BindingState.STOPPED or port is None or current is None:
                return False
            if self._uses.reads:
                raise RefusedError(
                    f"{current.path} has stopped after an I/O error, and is opened again once no "
                    "process reads from it",
                    hint="end the restore, the reader or the pccheckctl verify that reads from it; "
                    "the next checkpoint opens it", retryable=True,
                )  # fmt: skip
            # Without the lock: a write in progress may be one that only a detach can end.
            if not await port.unbind(current.volume, UNBIND_LIMIT_S):
                raise RefusedError("the stopped volume still has writes in progress")
            async with self.lock:
                if self.port is not port or self.volumes.current is not current:
                    return False
                if not await self.volumes.reopen(current, self.unsure):
                    self.lose()
                    return False
                self.unsure.clear()
                await self.bind(current)
                self._move(BindingState.BOUND)
            return True

    async def retire(self, is_needed: Callable[[OpenVolume], bool]) -> None:
        """Drops outgrown volumes once the current one has what recovery needs."""
        if len(self.volumes.open) < 2:
            return
        async with self.lock:
            volumes = self.volumes.open
            good = [any(not found.is_damaged for found in item.checkpoints) for item in volumes]
            follower = max((index for index, has in enumerate(good) if has), default=0)
            for item in volumes[:follower]:
                if self._uses.reads or is_needed(item):
                    continue
                if self.port is not None and not await self.port.unbind(item.volume, 0):
                    continue  # tried again when its last save has ended
                if not self._uses.reads:  # no read began meanwhile
                    await self.volumes.drop(item)

    async def finish(self) -> None:
        """The job is done: keeps only the newest checkpoint."""
        async with self.lock:
            current = self.volumes.current
            if current is None:
                return
            try:
                await self._engine.call(self._key.uid, current.volume.finish, 1)
            except (OSError, _core.NativeError) as error:
                raise translated(error, f"the volume {current.path}") from error
            await self.volumes.refresh()
