"""The jobs of this node that have ranks on other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from pccheck_native import layout
from pccheck_native.nodes import peer
from pccheck_wire.errors import NoCheckpointError
from pccheckd.config import coordinator
from pccheckd.core.engine import Engine
from pccheckd.group.job import Job
from pccheckd.peer.grant import ReadGrant
from pccheckd.peer.server import Peers
from pccheckd.storage.node import node_of

from .carriers.etcd import Etcd
from .carriers.gateway import Gateway
from .carriers.voice import StoreVoice
from .wide import WideJob


class Nodes:
    """Owned by the registry."""

    def __init__(self, engine: Engine, load: Callable[[int, str], Awaitable[Job]]) -> None:
        """`load`: a job that is on the disk."""
        self._engine, self._load = engine, load
        self._node = b""  # the random id of the storage directory
        self._jobs: dict[tuple[int, str], WideJob] = {}
        self._etcd: Etcd | None = None
        self.peers = Peers(engine.config.listen, engine.config.storage, self)
        if engine.config.coordinator:
            credentials = engine.config.coordinator_credentials
            place = coordinator.parse(engine.config.coordinator)
            gateway = Gateway(place, Path(credentials) if credentials else None)
            self._etcd = Etcd(gateway, "pccheck/")

    def running(self) -> set[tuple[int, str]]:
        """The jobs of which processes live here, by uid and name."""
        return {key for key, wide in self._jobs.items() if wide.is_live}

    def of(self, job: Job) -> WideJob | None:
        """What the job is beside the other nodes; None: it never had ranks there."""
        return self._jobs.get((job.uid, job.name))

    async def take(self, job: Job) -> WideJob:
        """Makes a job wide: it has ranks on other nodes now. Raises PccheckError."""
        wide = self.of(job)
        if wide is None:
            if not self._node:
                storage = self._engine.config.storage
                self._node = (await self._engine.call(job.uid, node_of, storage)).id
            voice = StoreVoice()  # the trainers carry out what the daemon asks the store
            carrier = self._etcd or voice
            wide = WideJob(job, self._engine, self._node, carrier, voice, self.peers)
            self._jobs[job.uid, job.name] = wide
        await wide.load()
        return wide

    async def loaded(self, job: Job) -> None:
        """A job was loaded: its starts had ranks on other nodes if there are records of them."""
        directory = Path(self._engine.config.storage) / str(job.uid) / job.name
        if await self._engine.call(job.uid, layout.start_records, directory):
            await self.take(job)

    async def serve(self) -> None:
        """Starts the peer servers of users whose jobs have had one: other nodes may ask for what
        this node holds before the jobs begin again."""
        if self._engine.config.listen:
            storage = self._engine.config.storage
            found = await asyncio.to_thread(layout.jobs_with_servers, storage)
            for uid in sorted({uid for uid, _ in found}):
                await self.peers.start(uid)

    # -- Shares ---------------------------------------------------------------------------------

    async def allow(self, uid: int, ask: peer.Ask) -> ReadGrant:
        return await (await self._wide(uid, ask.job)).sharing.allow(ask)

    async def held(self, uid: int, job: str) -> bytes:
        return (await (await self._wide(uid, job)).holding()).packed()

    async def reached(self, uid: int, job: str) -> bytes:
        return peer.packed_reach(await (await self._wide(uid, job)).reach())

    async def damaged(self, uid: int, ask: peer.Ask, sequence: int) -> None:
        await (await self._wide(uid, ask.job)).sharing.damaged(ask, sequence)

    async def _wide(self, uid: int, job: str) -> WideJob:
        """The job, loaded from the disk first if needed. Raises NoCheckpointError."""
        if (uid, job) not in self._jobs:
            place = layout.servers_path(self._engine.config.storage, uid, job)
            if await self._engine.call(uid, place.exists):
                await self._load(uid, job)
        if (uid, job) not in self._jobs:
            raise NoCheckpointError("this node has no such job")
        return self._jobs[uid, job]

    async def close(self, job: Job) -> None:
        wide = self._jobs.pop((job.uid, job.name), None)
        if wide is not None:
            await wide.close()
