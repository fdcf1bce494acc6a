"""Continues, at the daemon's start, the checkpoints that the previous daemon had copied: they are
admitted first, so that no other checkpoint overtakes them, and written beside everything else."""

from __future__ import annotations

import errno
import os
import time

from pccheck_native import _core
from pccheck_native.identity import CheckpointId
from pccheck_wire.ends import continues_not
from pccheck_wire.errors import PccheckError, RefusedError
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.port import Port
from pccheckd.tenancy.checkpoint import RankCheckpoint
from pccheckd.tenancy.saves import INHERITED
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key

from . import inherited
from .inherited import Descriptor, Left, StoredState, Summary
from .registry import Registry


async def inherit(found: list[Descriptor], registry: Registry) -> Summary:
    """Takes over what is usable, and closes the rest. Never raises for what it finds."""
    summary = Summary()
    left, useless = inherited.sort(found)
    for key, one in left.items():
        try:
            job, tenant = await registry.existing(key)
            job.hold(held=True)
            await _take_over(tenant, one, summary)
        except (OSError, PccheckError, _core.NativeError) as error:
            why = translated(error, f"the memory of {key}")
            LOG.error("%s: copied checkpoints are lost: %s", key, why)
            summary.dropped.append((key, why.message))
        except Exception as error:  # the edge of this tenant: a daemon that cannot start loses all
            LOG.exception("%s: copied checkpoints are lost", key)
            summary.dropped.append((key, f"an internal error: {type(error).__name__}"))
        useless += [*one.segments.values(), *(state.descriptor for state in one.states)]
    for job in registry.jobs.values():
        job.hold(held=False)
    for item in useless:
        await registry.engine.call(os.getuid(), inherited.close, item, registry.engine.pool)
    if found:
        LOG.info(
            "%d stored descriptors found; %d segments (%d bytes) taken over, with %d checkpoints "
            "that were copied and not durable", len(found), summary.segments, summary.nbytes,
            summary.checkpoints,
        )  # fmt: skip
    return summary


async def _take_over(tenant: Tenant, left: Left, summary: Summary) -> None:
    """Removes from `left` what it takes over."""
    left.states.sort(key=lambda state: max((s for s, _ in state.says.copied), default=0))
    async with tenant.binding.lock:
        like = left.states[-1].says  # chunks as they are, with the lanes that they were in
        port = await tenant.binding.make_port(like.chunk_bytes, like.block_bytes, like.lanes)
        try:
            for number in left.segments_by_need():
                summary.segments += await _adopt(port, number, left, tenant)
            usage = port.native.usage()
            port.grant.adopted(usage.bytes)
            for state in list(left.states):
                await _bind(state, left, tenant, summary)
            summary.nbytes += usage.bytes
        finally:
            await _settle(tenant, port)


async def _adopt(port: Port, number: int, left: Left, tenant: Tenant) -> bool:
    fd = left.segments[number].fd
    try:
        await tenant.engine.call(tenant.key.uid, port.native.adopt, fd, number)
    except (OSError, _core.NativeError) as error:
        LOG.warning("%s: a segment cannot be taken over: %s", tenant.key, _refused(error))
        return False
    del left.segments[number]
    return True


async def _bind(state: StoredState, left: Left, tenant: Tenant, summary: Summary) -> None:
    try:
        outcomes = await _continue(state, tenant)
    except (OSError, PccheckError, _core.NativeError) as error:
        why = translated(error, "its record").message
        for sequence, _ in state.says.copied:
            summary.dropped.append((tenant.key, f"checkpoint {sequence}: {why}"))
        LOG.error("%s: copied checkpoints are lost: %s", tenant.key, why)
        return
    left.states.remove(state)
    os.close(state.descriptor.fd)  # it is mapped, and in the store
    for sequence, step, why in outcomes:
        _report(tenant.key, sequence, step, why, summary)


async def _continue(state: StoredState, tenant: Tenant) -> list[tuple[int, int, str]]:
    """Begins the copied checkpoints that a state memfd lists: (sequence, step, why not). Raises
    when their volume is gone or was replaced."""
    port, ledger = tenant.binding.port, tenant.ledger
    volumes = (item for item in tenant.volumes.open if item.info.uuid == state.says.uuid)
    item = next(volumes, None)
    if item is None or port is None:
        raise RefusedError("its volume no longer exists")
    outcomes = []
    for found in await tenant.engine.call(
        tenant.key.uid, port.native.bind, item.volume, state.descriptor.fd, state.id
    ):
        sequence, step, incarnation, payload, _, _, world_size, why = found
        outcomes.append((sequence, step, why))
        ledger.passed(sequence)
        tenant.group.passed(sequence)
        if why:
            continue
        ledger.inherit(RankCheckpoint(
            CheckpointId(*tenant.key, sequence, step, incarnation, world_size),
            session=INHERITED, snapshot=sequence, payload_bytes=payload, skip_when_busy=False,
            requested_ns=time.monotonic_ns(), parks=True, wanted=True,
        ))  # fmt: skip
    return outcomes


async def _settle(tenant: Tenant, port: Port) -> None:
    """Copied checkpoints are checked and written from now on; new ones go to the current volume."""
    if not tenant.ledger.live():
        await tenant.binding.abandon_port()
        return
    tenant.tasks.spawn(_checked(tenant, port))
    if tenant.volumes.current is not None:
        await tenant.binding.bind(tenant.volumes.current)


async def _checked(tenant: Tenant, port: Port) -> None:
    await tenant.engine.drive(tenant.key.uid, port.native.settle)
    tenant.group.decide_soon()  # for what was parked


def _report(key: Key, sequence: int, step: int, why: str, summary: Summary) -> None:
    if not why:
        summary.checkpoints += 1
        LOG.info("%s: continues to save step %d (checkpoint %d)", key, step, sequence)
    elif reason := continues_not(why):
        summary.dropped.append((key, f"step {step}: {reason}"))
        LOG.error("%s: copied checkpoint of step %d is lost: %s", key, step, reason)


def _refused(error: BaseException) -> str:
    if isinstance(error, _core.NativeError) and error.code_name == "NO_MEMORY":
        return "the DRAM budget is smaller than before"
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        return "pccheckd did not create it"
    return str(error)
