"""What a rank writes to: how it comes to each of its states, and what is refused there."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pccheck_native import NativeError, layout
from pccheck_wire import codec
from pccheck_wire.errors import DamagedError, NoStoreError, RefusedError, StoreLockedError
from pccheck_wire.messages import Reply, Report, Verify
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.binding import BindingState
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import PROTECTED
from tests.support.jobs import arrival
from tests.support.loaded import KEY, asked, closing, owner, trainer_of


@pytest.fixture
async def tenant(registry: Registry) -> AsyncIterator[Tenant]:
    _, made = await registry.tenant(KEY)
    yield made
    await made.close()


def bound(tenant: Tenant) -> BindingState:
    return tenant.binding.state


# -- every state -------------------------------------------------------------------------------


async def test_a_rank_is_bound_while_its_trainer_saves(tenant: Tenant) -> None:
    assert bound(tenant) is BindingState.UNBOUND
    async with trainer_of(tenant):
        assert bound(tenant) is BindingState.BOUND
        await tenant.readiness.register(1000)
    await tenant.rest()
    assert bound(tenant) is BindingState.UNBOUND
    async with trainer_of(tenant):
        assert bound(tenant) is BindingState.BOUND
    await tenant.close()
    assert bound(tenant) is BindingState.CLOSED


async def test_a_rank_without_a_volume_is_bound_when_one_is_made(registry: Registry) -> None:
    _, tenant = await registry.tenant(KEY._replace(rank=1))
    async with trainer_of(tenant):
        assert bound(tenant) is BindingState.UNBOUND
        tenant.binding.stop()  # there is nothing that could have stopped
        assert bound(tenant) is BindingState.UNBOUND
        await tenant.readiness.register(1000)
        assert bound(tenant) is BindingState.BOUND
    await tenant.close()


async def test_another_chunk_size_needs_another_channel(tenant: Tenant) -> None:
    await tenant.prepare()
    before = tenant.binding.port
    tenant.engine.config.chunk_bytes *= 2
    await tenant.prepare()
    assert (
        before is not None and tenant.binding.port is not None and tenant.binding.port is not before
    )
    assert tenant.binding.port.chunk_bytes == 2 * before.chunk_bytes
    assert bound(tenant) is BindingState.BOUND


@pytest.mark.parametrize("listing", [True, False])
async def test_a_file_that_goes_makes_the_next_save_register(tenant: Tenant, listing: bool) -> None:
    async with trainer_of(tenant):
        item = await tenant.readiness.register(1000)
        item.path.unlink()
        await tenant.readiness.look(listing=listing)
        assert bound(tenant) is BindingState.LOST and tenant.slots.has_room()
        await tenant.rest()  # it has a trainer
        await tenant.readiness.reopen()
        made = tenant.volumes.current
        assert made is not None and made is not item
        assert bound(tenant) is BindingState.BOUND
        assert made.info.next_sequence >= item.info.next_sequence


async def test_a_file_that_is_back_is_found_by_the_next_save(tenant: Tenant) -> None:
    async with trainer_of(tenant):
        item = await tenant.readiness.register(1000)
        away = item.path.rename(item.path.with_suffix(".away"))
        await tenant.readiness.look(listing=False)
        assert tenant.volumes.current is None
        away.rename(item.path)
        await tenant.readiness.look(listing=False)  # it does not wait for the file
        assert tenant.volumes.current is None
        await tenant.readiness.reopen()
        assert [one.id.step for one in tenant.volumes.checkpoints()] == [3, 2]
        assert bound(tenant) is BindingState.BOUND


async def test_a_storage_directory_that_is_away_is_a_refusal(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def require(uid: int) -> None:
        raise NoStoreError("the directory is missing")

    async with trainer_of(tenant):
        item = await tenant.readiness.register(1000)
        away = item.path.parents[2].rename(item.path.parents[2].with_suffix(".away"))
        await tenant.readiness.look(listing=False)
        assert bound(tenant) is BindingState.LOST
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(tenant.engine, "require_storage", require)
            with pytest.raises(NoStoreError):
                await tenant.readiness.reopen()
        assert bound(tenant) is BindingState.LOST
        away.rename(item.path.parents[2])
        await tenant.readiness.reopen()
        assert tenant.volumes.checkpoints() and bound(tenant) is BindingState.BOUND


async def test_a_rank_that_is_closed_opens_no_file(tenant: Tenant) -> None:
    await tenant.close()
    await tenant.readiness.look()
    tenant.binding.stop()
    tenant.binding.lose()
    assert bound(tenant) is BindingState.CLOSED and not tenant.volumes.open


# -- a stopped volume --------------------------------------------------------------------------


async def test_a_stopped_volume_is_not_reopened_under_a_reader(tenant: Tenant) -> None:
    async with trainer_of(tenant):
        await tenant.readiness.register(1000)
        tenant.binding.stop()
        async with tenant.uses.read():
            with pytest.raises(RefusedError, match="once no process reads from it") as why:
                await tenant.readiness.reopen()
            assert why.value.retryable and "pccheckctl verify" in why.value.hint
            assert bound(tenant) is BindingState.STOPPED
            assert not closing(tenant.volumes.open[0].volume)
        await tenant.readiness.reopen()
        assert bound(tenant) is BindingState.BOUND
        await tenant.volumes.refresh()
        assert tenant.volumes.checkpoints()[0].id.step == 3


async def test_a_read_waits_while_the_volume_is_reopened(
    registry: Registry, tenant: Tenant
) -> None:
    found = tenant.volumes.checkpoints()[0].id.sequence
    verified: list[asyncio.Task[bytes | None]] = []
    async with trainer_of(tenant):
        await tenant.readiness.register(1000)
        tenant.binding.stop()
        opens, port = tenant.volumes.reopen, tenant.binding.port
        assert port is not None

        async def reopen(*which: Any) -> bool:
            verified.append(await asked(registry, Verify(KEY.job, sequence=found)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not tenant.uses.reads and not verified[0].done()
            return await opens(*which)

        tenant.volumes.reopen = reopen  # type: ignore[method-assign]
        await tenant.readiness.reopen()
        answer = codec.decode(cast(bytes, await verified[0]), Reply)
        assert isinstance(answer.body, Report), answer


async def test_a_stopped_volume_is_reopened_once(tenant: Tenant) -> None:
    """A request and a save may find it stopped at the same time: the second one must not close the
    volume that the first has just bound."""
    async with trainer_of(tenant):
        await tenant.readiness.register(1000)
        tenant.binding.stop()
        tenant.binding.stop()
        calls: list[object] = []
        opens = tenant.volumes.reopen

        async def reopen(item: Any, failed: Any) -> bool:
            calls.append(item)
            return await opens(item, failed)

        tenant.volumes.reopen = reopen  # type: ignore[method-assign]
        await asyncio.gather(
            tenant.readiness.reopen(), tenant.readiness.reopen(), tenant.readiness.register(1000)
        )
        assert len(calls) == 1 and bound(tenant) is BindingState.BOUND
        assert tenant.volumes.checkpoints()[0].id.step == 3


@pytest.mark.parametrize("size", [None, 0, 1000])
async def test_a_stopped_volume_may_be_lost_when_it_is_reopened(
    tenant: Tenant, size: int | None
) -> None:
    """Between the look and the opening: the next checkpoint goes into a new volume."""
    async with trainer_of(tenant):
        item = await tenant.readiness.register(1000)
        tenant.binding.stop()
        looks = tenant.volumes.look

        async def look() -> bool:
            found = await looks()
            if size is None:
                item.path.unlink(missing_ok=True)
            elif bound(tenant) is BindingState.STOPPED:
                os.truncate(item.path, size)
            return found

        tenant.volumes.look = look  # type: ignore[method-assign]
        await tenant.readiness.reopen()
        made = tenant.volumes.current
        assert made is not None and made is not item and bound(tenant) is BindingState.BOUND
        assert made.info.next_sequence >= item.info.next_sequence
        assert str(item.path) in tenant.volumes.loss


async def test_a_volume_that_stays_broken_stays_stopped(tenant: Tenant) -> None:
    async with trainer_of(tenant):
        item = await tenant.readiness.register(1000)
        tenant.binding.stop()
        opens = tenant.volumes.reopen

        async def broken(*_: Any) -> bool:
            raise OSError(5, "EIO")

        tenant.volumes.reopen = broken  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(OSError, match="EIO"):
                await tenant.readiness.reopen()
            assert bound(tenant) is BindingState.STOPPED
        tenant.volumes.reopen = opens  # type: ignore[method-assign]
        await tenant.readiness.reopen()
        assert bound(tenant) is BindingState.BOUND and tenant.volumes.current is item


async def test_leases_and_flags_hold_in_a_reopened_volume(
    registry: Registry, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = await registry.tenant(KEY)
    job.join(arrival(KEY.rank, owner()))
    newest = tenant.volumes.checkpoints()[0].id.sequence
    renewed: list[bool] = []
    async with trainer_of(tenant):
        item = await tenant.readiness.register(1000)
        old = item.volume
        monkeypatch.setattr(tenant.leases, "renew", lambda: renewed.append(item.volume is not old))
        tenant.binding.stop()
        await tenant.readiness.reopen()
        assert tenant.retention.flagged == {newest} and renewed == [True]


# -- the files ---------------------------------------------------------------------------------


async def test_a_later_file_that_is_unreadable_keeps_its_numbers(
    registry: Registry, tmp_path: Path
) -> None:
    layout.volume_path(tmp_path, *KEY, 1).write_bytes(b"x" * (1 << 16))
    _, tenant = await registry.tenant(KEY)
    async with trainer_of(tenant):
        made = await tenant.readiness.register(1000)
        assert made.generation == 2 and made.info.next_sequence == 2 << 32
    await tenant.close()


async def test_a_file_that_was_mended_is_opened_at_the_next_look(
    registry: Registry, tmp_path: Path
) -> None:
    path = layout.volume_path(tmp_path, *KEY)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    _, tenant = await registry.tenant(KEY)
    assert [type(why) for why in tenant.volumes.unreadable.values()] == [DamagedError]
    path.write_bytes(whole)
    await tenant.readiness.look()
    assert not tenant.volumes.unreadable and tenant.volumes.checkpoints()
    await tenant.close()


async def test_a_locked_file_is_in_doubt_until_it_is_open(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rank that restores meanwhile finds nothing. The file does not change when another
    process unlocks it."""
    path = layout.volume_path(tmp_path, *KEY)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        _, tenant = await registry.tenant(KEY)
        assert [type(why) for why in tenant.volumes.unreadable.values()] == [StoreLockedError]
    call: Callable[..., Awaitable[Any]] = tenant.engine.call

    async def watched(*about: Any, **more: Any) -> Any:
        assert tenant.volumes.doubts or tenant.volumes.checkpoints()
        return await call(*about, **more)

    monkeypatch.setattr(tenant.engine, "call", watched)
    await tenant.readiness.look()
    assert not tenant.volumes.unreadable and tenant.volumes.checkpoints()
    monkeypatch.undo()
    await tenant.close()


async def test_a_volume_that_closes_while_it_is_read_disturbs_nothing(tenant: Tenant) -> None:
    newest = tenant.volumes.checkpoints()[0].id.sequence
    tenant.volumes.open[0].volume.close()
    await tenant.volumes.refresh()
    assert not await tenant.retention.flag(newest, set_=PROTECTED)


async def test_a_volume_that_cannot_be_written_can_be_read(tenant: Tenant) -> None:
    item = tenant.volumes.open[0]
    item.volume.close()
    with item.path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(NativeError, match="LOCKED"):
            await tenant.volumes.reopen(item)
        item.volume.verify(tenant.volumes.checkpoints()[0].id.sequence)
    await tenant.volumes.reopen(item)
    assert await tenant.retention.flag(tenant.volumes.checkpoints()[0].id.sequence, set_=PROTECTED)


async def test_a_volume_is_reopened_after_its_last_user_has_left(tenant: Tenant) -> None:
    """Another thread may be inside a method of the volume when the volume is closed. Its lock would
    refuse the opening."""
    await tenant.prepare()  # its port uses the volume
    port, item = tenant.binding.port, tenant.volumes.open[0]
    assert port is not None
    old = item.volume
    reopening = asyncio.create_task(tenant.volumes.reopen(item))
    while not closing(old):
        await asyncio.sleep(0)
    assert not old.closed
    assert await port.unbind(old, 0)
    assert await reopening and old.closed
    item.volume.verify(tenant.volumes.checkpoints()[0].id.sequence)
