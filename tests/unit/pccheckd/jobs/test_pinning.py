"""What a pin says that comes too late, or that cannot be written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_wire.errors import CheckpointFailedError, NoCheckpointError, PccheckError
from pccheck_wire.messages import Pin
from pccheckd.jobs.pinning import pin
from tests.support.jobs import kept


class Volumes:
    """One checkpoint."""

    def __init__(self) -> None:
        self.item = SimpleNamespace(
            info=SimpleNamespace(slots=4, keep=1), quarantined=0, pinned=set(), checkpoints=[]
        )
        self.open: list[Any] = [self.item]

    async def refresh(self) -> None:
        pass

    def find(self, sequence: int) -> Any:
        return self.item

    def checkpoint(self, sequence: int) -> Any:
        return self.checkpoints()[0]

    def checkpoints(self) -> list[Any]:
        return [kept(7, world=1)]


class Tenant:
    """Its flags are not written: the next record replaced the checkpoint, or for this reason."""

    key = "key"

    def __init__(self, why: PccheckError | None) -> None:
        self.volumes = Volumes()
        self.why = why
        self.ledger = SimpleNamespace(live=list)
        self.retention = SimpleNamespace(
            flag=self.flag, flag_or_raise=self.flag_or_raise, is_usable=lambda _: True
        )
        self.cleared: list[int] = []

    async def flag(self, sequence: int, *, clear: int, now: bool) -> bool:
        self.cleared.append(sequence)
        return True

    async def flag_or_raise(self, *_: object, **__: object) -> bool:
        if self.why is not None:
            raise self.why
        return False


@pytest.mark.parametrize(
    ("why", "kind", "words"),
    [(None, NoCheckpointError, "newer ones replaced it"),
     (CheckpointFailedError("read-only"), CheckpointFailedError, "read-only")],
)  # fmt: skip
def test_a_checkpoint_that_is_replaced_or_cannot_be_written_while_it_is_pinned(
    why: PccheckError | None, kind: type[PccheckError], words: str
) -> None:
    """With keep=1 the next checkpoint may take its slot at any moment, which is no failure of the
    disk. No rank keeps its half of the pin."""
    tenant = Tenant(why)
    members = SimpleNamespace(common=list)
    job = SimpleNamespace(name="job", joining=asyncio.Lock(), tenants={0: tenant}, members=members)
    session: Any = SimpleNamespace(job=job, tenant=tenant, solo=False, world_size=1)
    with pytest.raises(kind, match=words):
        asyncio.run(pin(session, Pin(70)))
    assert tenant.cleared == [7]
