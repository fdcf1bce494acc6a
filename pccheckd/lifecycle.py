"""Start and stop of the daemon, in order: locks, sockets, engine, a look at every volume's records,
READY; then no new sessions, drain what is copied, close, unlock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import uvloop

from pccheck_wire.errors import RefusedError

from .base import logs, shortage
from .base.logs import LOG
from .base.notify import Notifier
from .config.options import Config
from .config.reload import Reloader, on_hangup
from .config.sources import Sources, describe
from .control import attach
from .control.handlers import Handlers
from .core.engine import Engine
from .front.endpoints import ControlServer
from .jobs import survey, takeover
from .jobs.registry import Registry
from .jobs.sessions import Sessions
from .observe.service import Observing
from .service import activation
from .service.supervise import EXTENSION_S, Supervisor
from .storage import lock as storage
from .storage.directory import StorageDirectory
from .tenancy import inherited
from .tenancy.outcomes import Chronicle
from .upkeep.expiry import Expiry
from .upkeep.file_watch import FileWatch
from .upkeep.gpu_release import GpuRelease

FILES_WANTED = 65536
#: How long a thread that makes a document may keep the loop from the interpreter; Python's is 5 ms.
SWITCH_S = 0.0005


def run(config: Config, sources: Sources) -> int:
    """Serves until SIGTERM or SIGINT; 0 when all that was copied is durable, else 1.

    Raises PccheckError when it cannot start.
    """
    _raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    given = activation.take()
    with contextlib.ExitStack() as held:
        private = logs.BYTES_VARIABLE in os.environ  # as autostart=True says
        directory = StorageDirectory(
            config.storage, private_socket=config.socket if private else None
        )
        held.callback(directory.close)
        attach.make_runtime(config.socket.parent, config.group)
        _lock(held, config.socket.with_name(config.socket.name + ".lock"), f"has {config.socket}")
        swept = storage.sweep(config.storage)
        if swept:
            LOG.info("removed %d files that an interrupted start had left", swept)
        listener = activation.attach_socket(given, config.socket)
        left = inherited.take(given)
        if listener is None:
            listener = attach.listen(config.socket, config.group)
            held.callback(config.socket.unlink, missing_ok=True)
        with _shortages(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            drained = runner.run(_serve(config, sources, listener, left, directory))
    if not drained:
        # Threads may hang in a wedged disk; nothing in memory can be saved by waiting for them.
        logs.flush()
        os._exit(1)
    return 0


async def _serve(
    config: Config,
    sources: Sources,
    listener: socket.socket,
    left: list[inherited.Descriptor],
    directory: StorageDirectory,
) -> bool:
    notifier = Notifier()
    engine = Engine(config, directory, store=inherited.store_of(os.environ, left), stored=len(left))
    engine.start()
    registry = Registry(config, engine, Chronicle(enabled=lambda: config.chronicle))
    handlers: Handlers

    async def handle(uid: int, data: bytes) -> bytes | None:
        return await handlers.by_token(uid, data)

    control = ControlServer(config.socket, handle)
    sessions = Sessions(config, engine, registry, control)
    observing = Observing(config, engine, registry, sessions)
    handlers = Handlers(config, engine, registry, sessions, observing.scrubber)
    server = attach.AttachServer(listener, sessions, handlers)
    supervisor = Supervisor(
        notifier, config, engine, registry, sessions, faults=lambda: observing.health.faults
    )
    reloader = Reloader(config, sources, notifier)
    reloader.after.append(registry.limit)
    reloader.after.append(observing.scrubber.wake)
    expiry = Expiry(config, engine, registry)
    gpu_release = GpuRelease(config, engine, registry)
    reloader.after.append(expiry.wake)
    stop, hurry = _signals(reloader)
    notifier.extend(survey.LIMIT_S + EXTENSION_S)
    supervisor.survey = await survey.take(config, engine)
    registry.inherited = await takeover.inherit(left, engine, registry)
    file_watch = FileWatch(engine, registry)
    observing.start()
    expiry.start()
    file_watch.start()
    gpu_release.start()
    registry.memory.start()
    server.start()
    reloader.start()
    LOG.info("ready: %s", describe(config))
    # What the start has logged is there when READY is.
    await engine.call(os.getuid(), logs.flush)
    notifier.send("READY=1")
    # Before any connection is accepted, and so before any other volume is opened.
    supervisor.start()
    await stop.wait()
    notifier.send("STOPPING=1")
    await reloader.close()
    await supervisor.close()
    LOG.info("stopping: draining what is copied, at most %g s", config.drain_limit_s)
    sessions.draining = True
    work = asyncio.create_task(
        _drain(
            (
                file_watch.close,
                expiry.close,
                gpu_release.close,
                observing.settle,
                server.close,
                registry.memory.close,
                control.close,
            ),
            registry,
            engine,
        )
    )
    others = [
        asyncio.create_task(_is_set(hurry)),
        asyncio.create_task(supervisor.while_draining(config.drain_limit_s)),
    ]
    await asyncio.wait({work, *others}, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    if work.done() and work.exception() is None:
        await observing.close()
        engine.stop()
        LOG.info("stopped")
        return True
    if work.done() and work.exception() is not None:
        LOG.error("the drain failed", exc_info=work.exception())
    unfinished = sum(len(tenant.ledger.live()) for tenant in registry.tenants())
    LOG.error("stopped with %d checkpoints that are not durable", unfinished)
    return False


async def _drain(
    first: Iterable[Callable[[], Awaitable[None]]], registry: Registry, engine: Engine
) -> None:
    """Ends what brings work, in this order, then whatever there is."""
    for close in first:
        await close()
    results = await asyncio.gather(
        *(tenant.close() for tenant in registry.tenants()), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    await engine.close_gpus()


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()


def _signals(reloader: Reloader) -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or SIGINT. SIGHUP goes to the reloader."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def arrived() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrived)
    on_hangup(reloader.request, arrived)
    return stop, hurry


@contextlib.contextmanager
def _shortages() -> Iterator[None]:
    """A machine that refuses what the daemon cannot do without ends it with words."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        words = shortage.told(error)
        if not words:
            raise
        LOG.debug("the daemon ends", exc_info=True)
        raise RefusedError(words, hint=shortage.HINT) from error


def _lock(held: contextlib.ExitStack, path: Path, purpose: str) -> None:
    held.callback(os.close, storage.lock(path, purpose))


def _raise_file_limit() -> None:
    """Sessions, segments and volumes take some each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
