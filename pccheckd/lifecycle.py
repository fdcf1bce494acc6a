"""Start and stop of the daemon, in order: locks, sockets, engine, the records of every volume read
once, READY; then no new sessions, copied checkpoints made durable, close, unlock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator

import uvloop

from pccheck_wire.errors import RefusedError

from .base import logs
from .base.errors import SHORTAGE_HINT, shortage
from .base.logs import LOG
from .base.notify import Notifier
from .config.options import Config
from .config.reload import Reloader, on_hangup
from .config.sources import Sources, describe
from .control import attach
from .control.handlers import Handlers
from .core.engine import Engine
from .front.endpoints import ControlServer
from .jobs import inherited, survey, takeover
from .jobs.registry import Registry
from .jobs.sessions import Sessions
from .observe.service import Observing
from .service import activation
from .service.supervise import EXTENSION_S, Supervisor
from .storage import lock as storage
from .storage.directory import StorageDirectory
from .tenancy.outcomes import Chronicle
from .upkeep.expiry import Expiry
from .upkeep.file_watch import FileWatch
from .upkeep.rest import GpuRelease, Rest

FILES_WANTED = 65536
#: How long a thread that makes a document may keep the interpreter's lock; Python's is 5 ms.
SWITCH_S = 0.0005
LOOK_S = 0.05  # how often a private daemon that was asked to end looks for trainers


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
        lock = config.socket.with_name(config.socket.name + ".lock")
        held.callback(os.close, storage.lock(lock, f"has {config.socket}"))
        swept = storage.sweep(config.storage)
        if swept:
            LOG.info("removed %d files that an interrupted start left behind", swept)
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
    """True when all that was copied is durable."""
    notifier = Notifier()
    engine = Engine(config, directory, store=inherited.store_of(os.environ, left), stored=len(left))
    registry = Registry(engine, Chronicle(enabled=lambda: config.chronicle))
    control = ControlServer(config.socket)
    sessions = Sessions(registry, control)
    observing = Observing(sessions)
    handlers = Handlers(sessions, observing.scrubber)
    expiry = Expiry(registry)
    reloader = Reloader(config, sources, notifier)
    reloader.then(registry.limit, observing.scrubber.wake, expiry.wake)
    leave, stop, hurry = _signals(reloader, private=directory.is_private)
    # Parts stop in the reverse of this order; those in `work` within --drain-limit.
    async with contextlib.AsyncExitStack() as parts:
        engine.start()
        parts.callback(engine.stop)
        notifier.extend(survey.LIMIT_S + EXTENSION_S)
        registry.survey = await survey.take(engine)
        registry.inherited = await takeover.inherit(left, registry)
        await parts.enter_async_context(observing)
        work = contextlib.AsyncExitStack()
        work.push_async_callback(engine.close_gpus)
        work.push_async_callback(registry.close)
        control.serve(handlers.answer)
        work.push_async_callback(control.close)
        for part in (
            registry.memory,
            attach.AttachServer(listener, sessions, handlers),
            observing.scrubber,
            GpuRelease(registry),
            Rest(registry),
            expiry,
            FileWatch(registry),
        ):
            await work.enter_async_context(part)
        supervisor = Supervisor(notifier, sessions, faults=lambda: observing.health.faults)
        async with reloader:
            LOG.info("ready: %s", describe(config))
            # What the start has logged is written before READY.
            await engine.call(os.getuid(), logs.flush)
            notifier.send("READY=1")
            serving = asyncio.create_task(registry.nodes.serve(), name="peer servers")
            async with supervisor:
                leaving = asyncio.create_task(_leave(leave, stop, sessions))
                await stop.wait()
                leaving.cancel()
                serving.cancel()
                notifier.send("STOPPING=1")
        LOG.info("stopping: copied checkpoints become durable, for %g s", config.drain_limit_s)
        sessions.drain()
        drained = await _drained(work, hurry, supervisor.while_draining(config.drain_limit_s))
        if unfinished := sum(len(tenant.ledger.live()) for tenant in registry.tenants()):
            LOG.error("stopped with %d checkpoints that are not durable", unfinished)
        if not drained:
            for one in (work, parts):  # the caller ends the process: nothing more is waited for
                one.pop_all()
            return False
    LOG.info("stopped")
    return not unfinished


async def _drained(
    work: contextlib.AsyncExitStack, hurry: asyncio.Event, limit: Coroutine[None, None, None]
) -> bool:
    """Stops the parts in `work`. False when `hurry` or `limit` came first, or a part failed."""
    drain = asyncio.create_task(work.aclose())
    others: set[asyncio.Task[object]] = {asyncio.create_task(one) for one in (hurry.wait(), limit)}
    await asyncio.wait({drain, *others}, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    if drain.done() and drain.exception() is not None:
        LOG.error("the drain failed", exc_info=drain.exception())
    return drain.done() and drain.exception() is None


async def _leave(leave: asyncio.Event, stop: asyncio.Event, sessions: Sessions) -> None:
    """A job step is ended by SIGTERM to all its processes. The private daemon among them is still
    needed for the trainers' last checkpoints."""
    await leave.wait()
    if sessions.trainers():
        LOG.info("SIGTERM: pccheckd ends after its last trainer (at once: SIGINT)")
    while sessions.trainers():
        await asyncio.sleep(LOOK_S)
    stop.set()


def _signals(
    reloader: Reloader, *, private: bool
) -> tuple[asyncio.Event, asyncio.Event, asyncio.Event]:
    """Leave, stop, hurry: the last two are set by the first and by the second SIGTERM or SIGINT,
    but SIGTERM to a private daemon sets only the first. SIGHUP goes to the reloader."""
    leave, stop, hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def arrived() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, leave.set if private else arrived)
    loop.add_signal_handler(signal.SIGINT, arrived)
    on_hangup(reloader.request, arrived)
    # A private daemon inherits what its trainer has blocked, perhaps to wait for signals (sigwait).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    return leave, stop, hurry


@contextlib.contextmanager
def _shortages() -> Iterator[None]:
    """When the system is out of a resource that the daemon needs, it ends with a clear error."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        words = shortage(error)
        if not words:
            raise
        LOG.debug("the daemon ends", exc_info=True)
        raise RefusedError(words, hint=SHORTAGE_HINT) from error


def _raise_file_limit() -> None:
    """Sessions, segments and volumes take several descriptors each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
