"""A tenant: what the daemon keeps for one (uid, job, rank), with or without a live trainer: its
volumes, its channel with the cached chunks, and the states of its checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from pccheck_native import _core
from pccheck_wire.errors import RefusedError
from pccheck_wire.messages import Begin
from pccheck_wire.messages import CheckpointState as State

from .checkpoint import Checkpoint
from .config import Config
from .engine import Engine, translated
from .ledger import Ledger
from .logs import LOG
from .port import Owner, Port
from .scheduler import Scheduler
from .volumes import DAMAGED, GLOBAL, PINNED, Key, OpenVolume, VolumeSet, pins

CHUNK_CAPACITY_MAX = 65536
UNBIND_LIMIT_S = 30.0


class Tenant:
    def __init__(
        self, key: Key, config: Config, engine: Engine, on_durable: Callable[[Tenant], None]
    ) -> None:
        self.key = key
        self.config = config
        self.engine = engine
        self.volumes = VolumeSet(key, config, engine)
        self.port: Port | None = None
        self.owner: Owner | None = None
        self.lock = asyncio.Lock()  # held while volumes and owners come and go
        self.ledger = Ledger()
        self.protected: set[int] = set()  # sequences pinned until Restored or fresh (P7)
        self.reading = 0  # loads in progress: their volumes stay open
        self.global_sequence = 0  # flagged GLOBAL: every rank of the group has its step
        self.closed = False
        self.stopped = False  # a commit record failed; reopened before the next save
        self.registered_in = -1  # incarnation whose beginning is on the disk
        self.last_used_ns = time.monotonic_ns()
        self.queue = Scheduler(self._attempt, self.refuse, self._hopeless)
        self._on_durable = on_durable
        self._admission = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- coming and going ----------------------------------------------------------------------

    async def open(self) -> None:
        """Opens what is on the disk; the channel comes with the first trainer."""
        await self.volumes.load()
        found = self.volumes.checkpoints()
        if found:
            self.ledger.newest = found[0].sequence, found[0].step
        self.global_sequence = max((f.sequence for f in found if f.is_global), default=0)

    async def attach(self, owner: Owner, socket_fd: int) -> int:
        """Makes `owner` the tenant's trainer; the page's descriptor. Raises PccheckError."""
        async with self.lock:
            if self.owner is not None:
                raise RefusedError(
                    f"{self.key} is already served for pid {self.owner.pid}; this is pid "
                    f"{owner.pid}",
                    hint="end that process, or use another job name",
                )
            if self.closed:
                raise RefusedError("it was just unloaded", hint="try again", retryable=True)
            self.volumes.require_readable(fresh=owner.fresh)
            if self.port is None:
                await self._open_port()
            assert self.port is not None
            await self._protect(owner)
            page_fd = await self.port.attach(socket_fd, owner.session)
            self.owner = owner
            return page_fd

    async def detach(self, session: int) -> None:
        """The trainer is gone: what was copied goes on, the rest fails."""
        if self.owner is None or self.owner.session != session:
            return
        self.queue.drop(session, "the trainer ended before it was admitted")
        async with self.lock:
            if self.port is not None:
                await self.port.detach()
            self.owner = None
            self.last_used_ns = time.monotonic_ns()

    async def close(self) -> None:
        """Drains sealed saves, then closes channel and volumes."""
        self.closed = True
        await self.queue.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self.lock:
            if self.port is not None:
                await self.port.close()
                self.port = None
            await self.volumes.close()

    @property
    def idle(self) -> bool:
        """No trainer, nothing in flight, nobody reading: it may be closed."""
        return (
            self.owner is None
            and not self.reading
            and not self.ledger.live()
            and not self.lock.locked()
        )

    # -- room ----------------------------------------------------------------------------------

    async def register(self, payload_bytes: int) -> OpenVolume:
        """A volume whose slots hold `payload_bytes`, bound to the channel. Raises PccheckError."""
        async with self.lock:
            owner, port = self._present()
            current = self.volumes.current
            if current is None or payload_bytes > current.info.payload_capacity:
                async with self._admission:  # no sequence is taken from the old one meanwhile
                    current = await self.volumes.make(
                        payload_bytes, incarnation=owner.incarnation,
                        world_size=owner.world_size, next_sequence=self.ledger.last_sequence + 1,
                    )  # fmt: skip
                    await self._bind(port, current)
            elif self.registered_in != owner.incarnation:
                await self._begin_incarnation(current, owner)
            self.registered_in = owner.incarnation
            return current

    def wanted_bytes(self, payload_bytes: int) -> int:
        """DRAM for two checkpoints, within this rank's share of the budget."""
        owner, port = self._present()
        chunk = port.chunk_bytes
        share = self.config.dram_bytes // owner.local_world_size
        wanted = -(-payload_bytes // chunk) * chunk * 2
        return max(2 * chunk, min(wanted, share // chunk * chunk))

    async def finish(self) -> None:
        """The job is done: only its newest checkpoint is kept."""
        async with self.lock:
            current = self.volumes.current
            if current is None:
                return
            try:
                await self.engine.call(self.key.uid, current.volume.finish, 1)
            except (OSError, _core.NativeError) as error:
                raise translated(error, f"the volume {current.path}") from error
            await self.volumes.refresh()

    # -- saving --------------------------------------------------------------------------------

    def begin(self, session: int, body: Begin, *, refused: str = "") -> None:
        """Queues a snapshot whose word is REQUESTED, or refuses it. The answer is the word."""
        owner = self.owner
        if owner is None or owner.session != session:
            return
        checkpoint = Checkpoint(
            session=session, snapshot=body.snapshot, step=body.step,
            payload_bytes=body.payload_bytes, tree_offset=body.tree_offset,
            tree_bytes=body.tree_bytes, skip_when_busy=body.on_busy == "skip",
            incarnation=owner.incarnation, world_size=owner.world_size,
            requested_ns=time.monotonic_ns(),
        )  # fmt: skip
        if not self.ledger.add(checkpoint):
            return  # said twice: the first one counts
        if refused or self.volumes.current is None:
            self.refuse(checkpoint, State.FAILED, refused or "it was not registered", "")
        else:
            self.queue.submit(checkpoint)

    def refuse(self, checkpoint: Checkpoint, to: State, reason: str, hint: str) -> None:
        """Ends a checkpoint that was never admitted, on the page and in the table."""
        if checkpoint.state is not State.REQUESTED:
            return
        self.ledger.refuse(checkpoint, to, reason, hint)
        owner, port = self.owner, self.port
        if port is not None and owner is not None and owner.session == checkpoint.session:
            port.channel.refuse(checkpoint.snapshot, int(to))
        if to is State.FAILED:
            LOG.warning("%s: step %d failed: %s", self.key, checkpoint.step, reason)

    async def _attempt(self, checkpoint: Checkpoint) -> str:
        """Tries to begin one; "" when it was begun or has ended, else why it has to wait."""
        port = self.port
        if port is None or checkpoint.state is not State.REQUESTED:
            return ""
        try:
            if self.stopped:
                await self._reopen()
            async with self._admission:
                sequence = await self.engine.call(
                    self.key.uid, port.channel.begin, checkpoint.snapshot, step=checkpoint.step,
                    incarnation=checkpoint.incarnation, world_size=checkpoint.world_size,
                    payload_bytes=checkpoint.payload_bytes, tree_offset=checkpoint.tree_offset,
                    tree_bytes=checkpoint.tree_bytes,
                )  # fmt: skip
                self.ledger.last_sequence = max(self.ledger.last_sequence, sequence)
        except _core.NativeError as error:
            if error.code_name in ("NO_LANE", "NO_SLOT"):
                return error.code_name
            if error.code_name == "STOPPED" and not self.stopped:
                self.stopped = True
                return "NO_LANE"
            if error.code_name == "ABORTED":
                self.refuse(checkpoint, State.FAILED, "the trainer let it go before it began", "")
            else:
                told = translated(error, f"the volume of {self.key}")
                self.refuse(checkpoint, State.FAILED, told.message, told.hint)
            return ""
        except Exception as error:  # the edge of this checkpoint: it fails, the others go on
            told = translated(error, f"the volume of {self.key}")
            self.refuse(checkpoint, State.FAILED, told.message, told.hint)
            if not isinstance(error, OSError):
                LOG.warning("%s: cannot begin", self.key, exc_info=error)
            return ""
        checkpoint.sequence = sequence
        if checkpoint.state is State.REQUESTED:  # its events may have come first
            checkpoint.advance(State.COPYING, time.monotonic_ns())
        return ""

    async def _hopeless(self) -> tuple[str, str]:
        """Why no slot can come free by waiting; ("", "") when one can."""
        if any(checkpoint.sequence for checkpoint in self.ledger.live()):
            return "", ""
        await self.volumes.refresh()
        current = self.volumes.current
        if current is None or current.info.free_slots:
            return "", ""
        if self.protected:
            return (
                f"the slots left hold checkpoints of the run before: {sorted(self.protected)}",
                "call restore() first, or start with fresh=True",
            )
        return (
            f"no slot of {current.path} is usable: {current.quarantined} quarantined",
            "check the disk",
        )

    # -- events --------------------------------------------------------------------------------

    def on_event(self, event: _core.Event) -> None:
        """From the native core, on the loop."""
        if event.kind in ("load_ended", "bad_peer"):
            if self.owner is not None and self.owner.session == event.session:
                self.owner.on_event(event)
            return
        checkpoint = self.ledger.apply(event)
        if checkpoint is None:
            return
        if event.kind == "durable":
            self._spawn(self._after_durable())
        elif event.kind == "failed":
            self.stopped = self.stopped or event.stage == "publish"
            LOG.warning("%s: step %d failed: %s", self.key, checkpoint.step, checkpoint.reason)

    async def became_global(self, sequence: int) -> None:
        """Every rank has it durable and flagged: says so on the page; the older flag goes."""
        before, self.global_sequence = self.global_sequence, sequence
        if before not in (0, sequence):
            await self.flag(before, clear=GLOBAL)
        for checkpoint in self.ledger.became_global(sequence):
            owner, port = self.owner, self.port
            if port is not None and owner is not None and owner.session == checkpoint.session:
                port.channel.set_outcome(checkpoint.snapshot, int(State.GLOBAL), sequence)
        await self._retire()

    async def _after_durable(self) -> None:
        await self.volumes.refresh()
        await self._retire()
        self._on_durable(self)

    async def _retire(self) -> None:
        """Drops outgrown volumes once the current one has what recovery needs."""
        if len(self.volumes.open) < 2:
            return
        async with self.lock:
            await self._retire_locked()

    async def _retire_locked(self) -> None:
        current = self.volumes.current
        if current is None or all(found.is_damaged for found in current.checkpoints):
            return
        for item in self.volumes.open[:-1]:
            # What the media say of flags may be older than what was staged, so it is not asked.
            needed = {*self.protected, self.global_sequence}
            if self.reading or needed & {found.sequence for found in item.checkpoints}:
                continue
            if self.port is None or await self.port.unbind(item.volume, UNBIND_LIMIT_S):
                await self.volumes.drop(item)

    # -- volumes under the lock ----------------------------------------------------------------

    def _present(self) -> tuple[Owner, Port]:
        if self.owner is None or self.port is None:
            raise RefusedError("the session has ended")
        return self.owner, self.port

    async def _open_port(self) -> None:
        """The channel; its block size is that of the volume that is already there."""
        config, current = self.config, self.volumes.current
        block = current.info.block_bytes if current else config.block_bytes
        chunk = -(-config.chunk_bytes // block) * block
        self.port = Port(
            self.engine, self.key.uid, self.on_event, chunk_bytes=chunk, block_bytes=block,
            chunk_capacity=max(2, min(config.dram_bytes // chunk, CHUNK_CAPACITY_MAX)),
            lanes=config.in_flight, writers=config.writers,
        )  # fmt: skip
        if current is not None:
            await self._bind(self.port, current)

    async def _bind(self, port: Port, item: OpenVolume) -> None:
        try:
            await self.engine.call(self.key.uid, port.channel.bind, item.volume)
        except (OSError, _core.NativeError) as error:
            raise translated(error, f"the volume {item.path}") from error

    async def _begin_incarnation(self, item: OpenVolume, owner: Owner) -> None:
        try:
            await self.engine.call(
                self.key.uid, item.volume.begin_incarnation, owner.incarnation, owner.world_size
            )
        except (OSError, _core.NativeError) as error:
            self.stopped = True
            raise translated(error, f"the volume {item.path}") from error

    async def _reopen(self) -> None:
        """A stopped volume is closed and read from the media again. Raises when that fails."""
        async with self.lock:
            port, current = self.port, self.volumes.current
            if port is None or current is None:
                return
            if not await port.unbind(current.volume, UNBIND_LIMIT_S):
                raise RefusedError("the stopped volume still has writes in progress")
            await self.volumes.reopen(current)
            await self._bind(port, current)
            self.stopped = False
        for sequence in self.protected:  # what was staged only is gone
            await self.flag(sequence, set_=PINNED)
        if self.global_sequence:
            await self.flag(self.global_sequence, set_=GLOBAL)

    # -- policy flags --------------------------------------------------------------------------

    async def flag(
        self, sequence: int, *, set_: int = 0, clear: int = 0, now: bool = False
    ) -> bool:
        """Flags a durable checkpoint; False when it is not there (any more) or cannot be."""
        item = self.volumes.find(sequence)
        if item is None:
            return False
        try:
            await self.engine.call(
                self.key.uid, item.volume.flag, sequence, set=set_, clear=clear, now=now
            )
        except (OSError, _core.NativeError) as error:
            LOG.warning("%s: checkpoint %d cannot be flagged: %s", self.key, sequence, error)
            return False
        await self.engine.call(self.key.uid, item.read)
        return True

    async def found_damaged(self, sequence: int) -> None:
        """A reader found it damaged: recovery passes it over from now on, after a restart too."""
        LOG.error("%s: checkpoint %d is damaged", self.key, sequence)
        await self.flag(sequence, set_=DAMAGED, now=True)

    async def _protect(self, owner: Owner) -> None:
        """P7: the newest checkpoint of the run before is kept until restored or `fresh`."""
        found = self.volumes.checkpoints()
        pinned = {item.sequence for item in found if item.is_pinned} | self.protected
        wanted = set() if owner.fresh else pins(found, pinned, owner.incarnation, self.config.slots)
        for sequence in pinned - wanted:
            await self.flag(sequence, clear=PINNED)
        for sequence in wanted - pinned:
            await self.flag(sequence, set_=PINNED)
        self.protected = wanted

    async def unprotect(self) -> None:
        """The trainer restored: its checkpoints may recycle what it restored from."""
        for sequence in self.protected:
            await self.flag(sequence, clear=PINNED)
        self.protected = set()

    # -- small ---------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("%s: background work failed", self.key, exc_info=task.exception())
