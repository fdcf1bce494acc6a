"""The jobs of this node that have ranks on other nodes."""

from __future__ import annotations

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
from .travel.sharing import Sharing
from .wide import WideJob


class Nodes:
    """Owned by the registry."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._node = b""  # the random id of the storage directory
        self._jobs: dict[tuple[int, str], WideJob] = {}
        self._etcd: Etcd | None = None
        self.peers = Peers(engine.config.listen, self._allow, self._damaged)
        if engine.config.coordinator:
            credentials = engine.config.coordinator_credentials
            place = coordinator.parse(engine.config.coordinator)
            gateway = Gateway(place, Path(credentials) if credentials else None)
            self._etcd = Etcd(gateway, "pccheck/")

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

    async def _allow(self, uid: int, ask: peer.Ask) -> ReadGrant:
        return await self._shared(uid, ask).allow(ask)

    async def _damaged(self, uid: int, ask: peer.Ask, sequence: int) -> None:
        await self._shared(uid, ask).damaged(ask, sequence)

    def _shared(self, uid: int, ask: peer.Ask) -> Sharing:
        wide = self._jobs.get((uid, ask.job))
        if wide is None:
            raise NoCheckpointError("this node has no such job")
        return wide.sharing

    async def close(self, job: Job) -> None:
        wide = self._jobs.pop((job.uid, job.name), None)
        if wide is not None:
            await wide.close()
