"""Start and stop of the daemon, in order: locks, sockets, engine, READY; then no new sessions,
drain what is copied, close, unlock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import uvloop

from pccheck_native import layout

from . import attach, heir, kept, storage
from .config import Config, describe
from .engine import Engine
from .handlers import Handlers
from .logs import LOG
from .registry import Registry
from .server import ControlServer
from .sessions import Sessions

FILES_WANTED = 65536


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT; 0 when all that was copied is durable, else 1.

    Raises PccheckError when it cannot start.
    """
    _raise_file_limit()
    left = kept.take(os.environ)
    with contextlib.ExitStack() as held:
        _lock(held, layout.lock_path(config.storage), f"serves {config.storage}")
        attach.make_runtime(config.socket.parent, config.group)
        _lock(held, config.socket.with_name(config.socket.name + ".lock"), f"has {config.socket}")
        swept = storage.sweep(config.storage)
        if swept:
            LOG.info("removed %d files that an interrupted start had left", swept)
        listener = attach.listen(config.socket, config.group)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                drained = runner.run(_serve(config, listener, left))
        finally:
            config.socket.unlink(missing_ok=True)
    if not drained:
        # Threads may hang in a wedged disk; nothing in memory can be saved by waiting for them.
        sys.stderr.flush()
        os._exit(1)
    return 0


async def _serve(config: Config, listener: socket.socket, left: list[kept.Descriptor]) -> bool:
    engine = Engine(config, store=kept.store_of(os.environ, left), stored=len(left))
    engine.start()
    registry = Registry(config, engine)
    handlers: Handlers

    async def handle(uid: int, data: bytes) -> bytes | None:
        return await handlers.by_token(uid, data)

    control = ControlServer(config.socket, handle)
    sessions = Sessions(config, engine, registry, control)
    handlers = Handlers(config, engine, registry, sessions)
    server = attach.AttachServer(listener, sessions, handlers)
    stop, hurry = _signals()
    registry.inherited = await heir.inherit(left, engine, registry)
    server.start()
    LOG.info("ready: %s", describe(config))
    notify("READY=1")
    await stop.wait()
    notify("STOPPING=1")
    LOG.info("stopping: draining what is copied, at most %g s", config.drain_limit_s)
    sessions.draining = True
    work = asyncio.create_task(_drain(server, control, registry, engine))
    waiting = asyncio.create_task(_is_set(hurry))
    await asyncio.wait(
        {work, waiting}, timeout=config.drain_limit_s, return_when=asyncio.FIRST_COMPLETED
    )
    waiting.cancel()
    if work.done() and work.exception() is None:
        engine.stop()
        LOG.info("stopped")
        return True
    unfinished = sum(len(tenant.ledger.live()) for tenant in registry.tenants())
    LOG.error("stopped with %d checkpoints that are not durable", unfinished)
    return False


async def _drain(
    server: attach.AttachServer, control: ControlServer, registry: Registry, engine: Engine
) -> None:
    await server.close()
    await control.close()
    results = await asyncio.gather(
        *(tenant.close() for tenant in registry.tenants()), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    await engine.close_gpus()


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or SIGINT."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def arrived() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrived)
    return stop, hurry


def notify(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """sd_notify(3): tells the service manager, if there is one."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
    ):
        channel.connect(address)
        channel.send(state.encode())


def _lock(held: contextlib.ExitStack, path: Path, purpose: str) -> None:
    held.callback(os.close, storage.lock(path, purpose))


def _raise_file_limit() -> None:
    """libzmq aborts when it runs out of descriptors, so there have to be plenty."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
