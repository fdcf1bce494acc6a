"""A registry over a storage directory in which one rank has three checkpoints."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

from pccheck_native import Volume, layout
from pccheck_wire import codec
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.messages import Drop, Hello, Request, Role, Verify
from pccheckd.config.options import Config
from pccheckd.control.handlers import Handlers
from pccheckd.core.engine import Engine
from pccheckd.core.port import Owner
from pccheckd.front.endpoints import ControlServer
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Peer, Sessions
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key
from tests.support.coreloop import BLOCK_BYTES, Loop

KEY = Key(7, "job", 0)


@contextmanager
def registry_of(storage: Path) -> Iterator[Registry]:
    """The rank KEY has the steps 1, 2 and 3."""
    path = layout.volume_path(storage, *KEY)
    path.parent.mkdir(parents=True)
    with Loop(path) as loop:
        for step in (1, 2, 3):
            loop.save(step, [bytearray(100)], step=step)
    config = Config(
        storage=storage, socket=storage / "s", dram_bytes=1 << 24, chunk_bytes=1 << 16,
        block_bytes=BLOCK_BYTES, allow_any_filesystem=True,
    )  # fmt: skip
    engine = Engine(config)
    engine.start()
    yield Registry(engine)
    engine.stop()


def owner(*, world_size: int = 1, fresh: bool = False, **changed: Any) -> Owner:
    values = {
        "session": 1, "pid": 1, "world_size": world_size, "local_world_size": world_size,
        "fresh": fresh, "process": bytes([world_size]) * 16, "solo": False, "restored": None,
        "on_event": lambda event: None,
    } | changed  # fmt: skip
    return Owner(**values)


@asynccontextmanager
async def trainer_of(tenant: Tenant, trainer: Owner | None = None) -> AsyncIterator[None]:
    """Meanwhile a trainer is attached."""
    trainer = trainer or owner()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        os.close(await tenant.attach(trainer, far.fileno()))
        yield
        await tenant.detach(trainer.session)


async def asked(registry: Registry, body: Drop | Verify) -> asyncio.Task[bytes | None]:
    """A request of an observer; cancelled when it hangs up."""
    sessions = Sessions(registry, cast(ControlServer, None))
    hello = Hello(PROTOCOL_VERSION, Role.OBSERVER, "test", os.getpid())
    session, _, _ = await sessions.open(hello, Peer(KEY.uid, 0, os.getpid()))
    request = codec.encode(Request(1, session.token, body))
    return asyncio.create_task(Handlers(sessions).answer(KEY.uid, request))


def closing(volume: Volume) -> bool:
    """Whether its close has begun: another thread may still be inside a method of it."""
    try:
        volume.info()
    except ValueError:
        return True
    return False
