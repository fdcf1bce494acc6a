"""Which jobs stay loaded, and when they are unloaded."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import gc
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pccheck_native import layout
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.errors import RefusedError, StoreLockedError
from pccheck_wire.messages import Drop, Hello, Role, Verify
from pccheckd.control import verification
from pccheckd.core.engine import PortShape
from pccheckd.core.port import Port
from pccheckd.front.endpoints import ControlServer
from pccheckd.jobs import registry as registry_module
from pccheckd.jobs import sessions as sessions_module
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Peer, Session, Sessions
from pccheckd.tenancy.volumes import Key
from pccheckd.upkeep import expiry
from tests.support.coreloop import BLOCK_BYTES
from tests.support.loaded import KEY, asked, closing, owner


@pytest.fixture(autouse=True)
def no_idle_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "IDLE_MAX", 0)


async def test_a_job_stays_loaded_while_a_reader_is_connected(registry: Registry) -> None:
    _, tenant = await registry.existing(KEY)
    tenant.uses.add_reader()
    await registry.trim()
    assert not tenant.seat.is_closed and tenant.volumes.checkpoints()
    tenant.uses.add_reader(-1)
    await registry.trim()
    assert tenant.seat.is_closed


async def test_a_job_without_a_trainer_for_a_day_is_closed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "IDLE_MAX", 64)
    await registry.tenant(KEY)
    await registry.trim()
    assert len(registry.jobs) == 1
    monkeypatch.setattr(registry_module, "LOADED_S_MAX", 0.0)
    await registry.trim()
    assert not registry.jobs


async def test_no_trainer_attaches_to_a_job_that_is_dropped(registry: Registry) -> None:
    """All ranks refuse trainers before the first one is closed: while one rank closes, a trainer
    might attach to another."""
    _, first = await registry.tenant(KEY)
    _, second = await registry.tenant(Key(KEY.uid, KEY.job, 1))
    closing = first.close

    async def close() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, pytest.raises(RefusedError, match="unloaded"):
            await second.attach(owner(), ours.fileno())
        await closing()

    first.close = close  # type: ignore[method-assign]
    async with registry.unloaded(KEY.uid, KEY.job):
        assert second.seat.owner is None


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_drop_waits_for_a_hang_up_that_is_on_its_way(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    """A trainer that has just closed is still connected when the request to drop comes; and from
    when its hang-up is known on, until it is drained, however long that takes."""
    monkeypatch.setattr(registry_module, "STEP_S", 0.001)
    monkeypatch.setattr(registry_module, "GRACE_S", 0.005)
    _, tenant = await registry.existing(KEY)
    tenant.seat.take(owner())
    ask = functools.partial(expiry.drop, registry, KEY.uid)
    dropping = asyncio.create_task(ask(Drop(KEY.job, dry_run=dry_run)))
    tenant.seat.leave()
    for _ in range(20):  # more often than it looks for a hang-up
        await asyncio.sleep(0.001)
    assert not dropping.done()
    tenant.seat.free()
    assert (await dropping)["dropped"] is not dry_run


async def test_a_dry_run_closes_nothing(registry: Registry) -> None:
    """What a job has in DRAM is worth a fast recovery."""
    _, tenant = await registry.existing(KEY)
    ask = functools.partial(expiry.drop, registry, KEY.uid)
    document = await ask(Drop(KEY.job, dry_run=True))
    assert document["dropped"] is False
    assert registry.loaded(KEY) is tenant and not tenant.seat.is_closed
    tenant.uses.add_reader()
    with pytest.raises(RefusedError, match="in use"):
        await ask(Drop(KEY.job, dry_run=True))
    tenant.uses.add_reader(-1)
    assert (await ask(Drop(KEY.job)))["dropped"] is True
    assert tenant.seat.is_closed and not layout.list_volumes(registry.config.storage)


async def test_a_job_closed_during_a_lookup_is_loaded_again(
    registry: Registry,
) -> None:
    await registry.job(KEY.uid, KEY.job)
    async with registry._lock(KEY.uid):
        found = asyncio.create_task(registry.tenant(KEY))
        await asyncio.sleep(0)
        trimmed = asyncio.create_task(registry.trim())
        await asyncio.sleep(0)
    await asyncio.gather(found, trimmed)
    _, tenant = await registry.tenant(KEY)
    assert not tenant.seat.is_closed and tenant.volumes.open


async def test_a_reader_finds_a_volume_that_was_locked_before(
    registry: Registry, tmp_path: Path
) -> None:
    """No trainer need attach first."""
    path = layout.volume_path(tmp_path, *KEY)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError):
            await registry.existing(KEY)
    _, tenant = await registry.existing(KEY)
    assert tenant.volumes.checkpoints()


async def test_a_job_is_unloaded_after_its_last_file_user_has_left(
    registry: Registry,
) -> None:
    """A thread may be inside a method of a volume for a process that has ended."""
    _, tenant = await registry.tenant(KEY)
    shape = PortShape(1 << 16, BLOCK_BYTES, 2, lanes=1, writers=1)
    port = await Port.opened(registry.engine, KEY.uid, lambda event: None, shape)
    volume = tenant.volumes.open[0].volume
    port.native.bind(volume)
    dropping = asyncio.create_task(expiry.drop(registry, KEY.uid, Drop(KEY.job)))
    while not closing(volume):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not dropping.done()
    assert await port.unbind(volume, 0)
    assert (await dropping)["dropped"]
    await port.close()


async def test_a_drop_whose_asker_has_gone_is_completed(registry: Registry) -> None:
    """Otherwise the files of a job that is no longer known stay open, and locked."""
    _, tenant = await registry.tenant(KEY)
    await tenant.prepare()
    volume = tenant.volumes.open[0].volume
    drop = await asked(registry, Drop(KEY.job))
    while registry.loaded(KEY):
        await asyncio.sleep(0)
    drop.cancel()
    await asyncio.wait([drop])
    _, again = await registry.tenant(KEY)  # waits for the end
    assert (volume.closed, again.volumes.unreadable, again.volumes.open) == (True, {}, [])


async def test_a_job_that_cannot_be_loaded_leaves_no_file_locked(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.volume_path(tmp_path, KEY.uid, KEY.job, 1).touch()
    listed, failures = layout.list_volumes, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def list_volumes(storage: Path, **whose: Any) -> list[layout.VolumeFile]:
        if whose.get("rank") == 1 and failures:
            raise failures.pop()
        return listed(storage, **whose)

    monkeypatch.setattr(layout, "list_volumes", list_volumes)
    with pytest.raises(OSError, match="Too many open files") as kept:  # as a log keeps it
        await registry.tenant(KEY)
    _, tenant = await registry.tenant(KEY)
    assert tenant.volumes.unreadable == {}
    assert kept.value.errno == errno.EMFILE


async def test_a_refused_drop_without_an_asker_is_no_error(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client is left to receive it."""
    monkeypatch.setattr(registry_module, "GRACE_S", 0.005)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    _, tenant = await registry.tenant(KEY)
    tenant.uses.add_reader()
    drop = await asked(registry, Drop(KEY.job))
    while len(asyncio.all_tasks()) < 4:  # this one and its runner, the request, the drop
        await asyncio.sleep(0)
    drop.cancel()
    await asyncio.wait([drop])
    del drop
    while len(asyncio.all_tasks()) > 2:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)  # its end is noted
    gc.collect()
    assert not errors


async def test_a_job_is_in_use_while_a_thread_still_reads_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, end = threading.Event(), threading.Event()

    def verify(*_: object, ends: Callable[[], bool]) -> dict[str, object]:
        reading.set()
        assert end.wait(20) and ends()
        return {"checkpoints": []}

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(registry_module, "GRACE_S", 0.005)
    verifying = await asked(registry, Verify(KEY.job))
    while not reading.is_set():
        await asyncio.sleep(0)
    verifying.cancel()
    await asyncio.wait([verifying])
    with pytest.raises(RefusedError, match="rank 0 is being read"):
        await expiry.drop(registry, KEY.uid, Drop(KEY.job))
    end.set()
    while registry.used(KEY.uid, KEY.job):
        await asyncio.sleep(0)
    assert (await expiry.drop(registry, KEY.uid, Drop(KEY.job)))["dropped"]


@pytest.mark.parametrize("role", [Role.READER, Role.TRAINER])
async def test_a_job_stays_loaded_while_a_process_attaches(registry: Registry, role: Role) -> None:
    _, tenant = await registry.tenant(KEY)
    look = tenant.readiness.look

    async def slow_look() -> None:
        await registry.trim()
        await look()

    tenant.readiness.look = slow_look  # type: ignore[method-assign, assignment]
    front = SimpleNamespace(join=lambda *_: asyncio.sleep(0, ""), leave=print)
    sessions = Sessions(registry, cast(ControlServer, front))
    hello = Hello(PROTOCOL_VERSION, role, "test", os.getpid(), job=KEY.job)
    session, _, descriptors = await sessions.open(hello, Peer(KEY.uid, 0, os.getpid()))
    for descriptor in descriptors:
        os.close(descriptor)
    assert session.tenant is tenant and not tenant.seat.is_closed
    await sessions.end(session)
    await registry.trim()
    assert tenant.seat.is_closed


async def test_a_trainer_waits_for_one_that_ended_unanswered(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is noticed when it is answered, which may take long. The next one has been waiting
    then until other ranks have joined."""
    monkeypatch.setattr(sessions_module, "GRACE_S", 0.0)
    job, tenant = await registry.tenant(KEY)
    answers, ended, comes = asyncio.Event(), asyncio.Event(), asyncio.Event()
    release, prepare = job.release, tenant.prepare

    async def slow_release() -> None:
        answers.set()
        await ended.wait()
        await release()

    async def prepared() -> None:
        await prepare()
        if answers.is_set():
            comes.set()

    job.release, tenant.prepare = slow_release, prepared  # type: ignore[method-assign]
    front = SimpleNamespace(join=lambda *_: asyncio.sleep(0, ""), leave=print)
    sessions = Sessions(registry, cast(ControlServer, front))

    async def opened(process: bytes, gone: Callable[[], bool]) -> Session:
        hello = Hello(
            PROTOCOL_VERSION, Role.TRAINER, "test", os.getpid(), job=KEY.job, process=process
        )
        peer = Peer(KEY.uid, 0, os.getpid(), gone)
        session, _, descriptors = await sessions.open(hello, peer)
        for descriptor in descriptors:
            os.close(descriptor)
        return session

    first = asyncio.create_task(opened(b"1" * 16, ended.is_set))
    await answers.wait()
    second = asyncio.create_task(opened(b"2" * 16, lambda: False))
    await comes.wait()
    ended.set()
    await sessions.end(await first)
    session = await second
    assert tenant.seat.owner is not None and tenant.seat.owner.session == session.number
    assert job.members.starts.of(KEY.rank, session.process) is not None
    await sessions.end(session)
