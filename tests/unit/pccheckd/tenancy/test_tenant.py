"""What a rank keeps, counts and refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pccheck_native import Volume, layout
from pccheck_wire.errors import RefusedError
from pccheckd.core.port import Port
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import DAMAGED, PROTECTED
from tests.support.jobs import arrival, saving
from tests.support.loaded import KEY, owner, trainer_of


def flags(tmp_path: Path) -> dict[int, int]:
    path = layout.volume_path(tmp_path, KEY.uid, KEY.job, KEY.rank)
    volume = Volume(path, writable=False, allow_buffered=True)
    try:
        return {entry.sequence: entry.flags for entry in volume.table() if entry.sequence}
    finally:
        volume.close()


def durable(
    tenant: Tenant, patch: pytest.MonkeyPatch, sequence: int, *, requested_ns: int = 1
) -> None:
    """A checkpoint of a session that has ended is durable, and not yet read from the volume."""
    saved = saving(1, sequence, session=9, requested_ns=requested_ns)
    patch.setattr(tenant.ledger, "apply", lambda *_: saved)
    tenant.saves.on_event(SimpleNamespace(kind="durable", session=9))  # type: ignore[arg-type]


async def test_an_old_protection_ends_with_the_next_one(registry: Registry, tmp_path: Path) -> None:
    job, tenant = await registry.tenant(KEY)
    job.join(arrival(KEY.rank, owner()))
    newest, before = [found.id.sequence for found in tenant.volumes.checkpoints()][:2]
    keeper = tenant.retention
    for sequence in (newest, before):
        assert await keeper.flag(sequence, set_=PROTECTED, now=True)
    assert keeper.flagged == {newest, before}
    await keeper.protect(owner(restored=before))
    assert await keeper.flag(newest, set_=DAMAGED, now=True)
    assert flags(tmp_path) == {newest: PROTECTED | DAMAGED, before: 0}
    assert (keeper.protected, keeper.flagged, keeper.unrestored) == ({newest}, {newest}, True)
    assert keeper.protected_step([]) == 3
    keeper.restored_to(before)
    assert keeper.unrestored  # that was not what is kept for it
    keeper.restored_to(newest)
    assert not keeper.unrestored and keeper.protected_step([]) is None
    await keeper.release()
    assert await keeper.flag(newest, clear=DAMAGED, now=True)
    assert flags(tmp_path) == {newest: 0, before: 0} and not keeper.protected
    await tenant.close()


async def test_an_unrestored_trainer_keeps_what_was_there(
    registry: Registry,
) -> None:
    job, tenant = await registry.tenant(KEY)
    newest, before = [found.id.sequence for found in tenant.volumes.checkpoints()][:2]
    same = dataclasses.replace(owner(), process=bytes(16))
    job.join(arrival(KEY.rank, owner(), launch="", was=0))
    job.join(arrival(KEY.rank, same, launch="", was=1))
    for trainer, wanted in (
        (owner(), {newest}),
        (owner(fresh=True), set()),
        (dataclasses.replace(owner(), restored=before), {newest}),
        (dataclasses.replace(owner(), restored=newest), set()),
        (same, set()),  # its own run made them
    ):
        await tenant.retention.protect(trainer)
        assert tenant.retention.protected == tenant.retention.flagged == wanted
        unread = trainer.restored is None and not trainer.fresh
        assert tenant.retention.unrestored is (unread or bool(wanted))
        assert tenant.saves.needs(tenant.volumes.open[0]) is bool(wanted)
    await tenant.close()


async def test_what_becomes_durable_during_an_attach_is_kept(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer before was killed, and its last checkpoint ended in that moment."""
    job, tenant = await registry.tenant(KEY)
    volume = tenant.volumes.open[0]
    newest, *before = volume.checkpoints
    volume.checkpoints = before  # the newest is durable, and not read yet
    attach = Port.attach

    async def ends_meanwhile(port: Port, *about: int) -> int:
        durable(tenant, monkeypatch, newest.id.sequence)
        while tenant.ledger.pending():
            await asyncio.sleep(0)
        return await attach(port, *about)

    monkeypatch.setattr(Port, "attach", ends_meanwhile)
    trainer = dataclasses.replace(owner(), kernel_pid=os.getpid())
    job.join(arrival(KEY.rank, trainer, launch="", was=0))
    async with trainer_of(tenant, trainer):
        assert tenant.retention.flagged == {newest.id.sequence}
    await tenant.close()


async def test_trainer_that_attaches_as_the_rank_closes_is_refused(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tenant = await registry.tenant(KEY)
    attach, pages = Port.attach, []

    async def closes_meanwhile(port: Port, *about: int) -> int:
        pages.append(await attach(port, *about))
        tenant.seat.close()
        return pages[0]

    monkeypatch.setattr(Port, "attach", closes_meanwhile)
    with pytest.raises(RefusedError, match="just unloaded"):
        async with trainer_of(tenant, dataclasses.replace(owner(), kernel_pid=os.getpid())):
            pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pages[0])
    await tenant.close()


async def test_a_rank_alone_needs_no_common_step(registry: Registry) -> None:
    """What the ranks of a group still need must not go with a volume that was outgrown."""
    job, tenant = await registry.tenant(KEY)
    sequences = [found.id.sequence for found in tenant.volumes.checkpoints()]
    newest = sequences[0]
    job.join(arrival(KEY.rank, owner(world_size=2), launch="a", was=0))
    job.settle()
    assert (job.members.world_size, job.newest_common) == (2, newest)
    assert [job.needs(one) for one in (newest + 1, *sequences)] == [True, True, True]
    assert not job.needs(sequences[-1] - 1)
    assert tenant.saves.needs(tenant.volumes.open[0])
    job.left(KEY.rank, owner(world_size=2).process)
    job.join(arrival(KEY.rank, owner(), launch="b", was=0))
    assert job.members.world_size == 1 and not any(map(job.needs, sequences))
    assert not tenant.saves.needs(tenant.volumes.open[0])
    await tenant.close()


async def test_a_checkpoint_not_yet_listed_takes_a_slot(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tenant = await registry.tenant(KEY)
    item = tenant.volumes.open[0]
    full = SimpleNamespace(has_expendable=lambda: False)
    free = item.info.slots - len(item.checkpoints)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(item, "volume", full)
        assert free > 0 and tenant.slots.has_room()
        listed = [one.id.sequence for one in item.checkpoints]
        for sequence in (*listed, *range(100, 100 + free)):
            assert tenant.slots.has_room()
            durable(tenant, meanwhile, sequence)
        assert not tenant.slots.has_room()
    await tenant.close()


async def test_a_refusal_ends_with_a_later_request(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tenant = await registry.existing(KEY)
    before = time.monotonic_ns()
    tenant.seat.refuse_room(RefusedError("no room"), session=1)
    for asked_ns, ends in ((before, False), (time.monotonic_ns() + 1, True)):
        durable(tenant, monkeypatch, 1, requested_ns=asked_ns)
        assert (tenant.seat.refused is None) == ends
    await tenant.close()
