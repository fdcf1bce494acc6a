"""What a pin says that comes too late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_wire.errors import NoCheckpointError
from pccheck_wire.messages import Pin
from pccheckd.jobs.pinning import pin


class Volumes:
    """One checkpoint, which the next record replaces: a flag comes too late."""

    def __init__(self, *, is_replaced: bool) -> None:
        self.is_replaced = is_replaced
        self.item = SimpleNamespace(
            info=SimpleNamespace(slots=4, keep=1), quarantined=0, pinned=set(), checkpoints=[]
        )
        self.reads = 0

    @property
    def open(self) -> list[Any]:
        return [self.item] if self.find(7) else []

    async def refresh(self) -> None:
        self.reads += 1

    def find(self, sequence: int) -> Any:
        return None if self.is_replaced and self.reads > 1 else self.item

    def checkpoint(self, sequence: int) -> Any:
        return next((one for one in self.checkpoints() if one.sequence == sequence), None)

    def checkpoints(self) -> list[Any]:
        found = SimpleNamespace(sequence=7, step=3, incarnation=1, world_size=1, is_pinned=False)
        return [found] if self.find(7) else []


class Tenant:
    key = "key"

    def __init__(self, volumes: Volumes) -> None:
        self.volumes = volumes
        self.retention = SimpleNamespace(flag=self.too_late)

    async def too_late(self, *_: object, **__: object) -> bool:
        return False

    def is_usable(self, _: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("is_replaced", "words"), [(True, "newer ones replaced it"), (False, "see pccheckd's log")]
)
def test_a_checkpoint_that_is_replaced_while_it_is_pinned(is_replaced: bool, words: str) -> None:
    """With keep=1 the next checkpoint may take its slot at any moment, which is no failure that
    the log has."""

    tenant = Tenant(Volumes(is_replaced=is_replaced))
    job = SimpleNamespace(
        name="job", joining=asyncio.Lock(), tenants={0: tenant}, common_checkpoints=list
    )
    session: Any = SimpleNamespace(job=job, tenant=tenant, solo=False, world_size=1)
    with pytest.raises(NoCheckpointError, match=words):
        asyncio.run(pin(session, Pin(3)))
