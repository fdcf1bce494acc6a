"""A job with fake tenants: tests set what a rank holds, and read the agreements it got."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pccheck_native import _core, catalog
from pccheck_native.group import Agreement
from pccheck_native.identity import CheckpointId
from pccheck_wire.errors import PccheckError
from pccheckd.config.sources import Config
from pccheckd.core.port import Owner
from pccheckd.group.idle import IdleDisk
from pccheckd.group.job import Job
from pccheckd.group.starts import Arrival
from pccheckd.tenancy.checkpoint import RankCheckpoint
from pccheckd.tenancy.volumes import Key

CONFIG = Config(Path("/none"), Path("/none/socket"), dram_bytes=1 << 24)


def owner(rank: int, *, world: int = 2, solo: bool = False, start: int = 1) -> Owner:
    """A process of a rank; `start` distinguishes the processes of one rank."""
    return Owner(
        session=10 * start + rank, pid=100 * start + rank, world_size=world,
        local_world_size=world, fresh=False, process=bytes([start, rank]), solo=solo,
        restored=None, on_event=lambda _: None,
    )  # fmt: skip


def arrival(rank: int, its: Owner, *, launch: str = "", was: int = 0) -> Arrival:
    """What the job gets of a process that connects."""
    return Arrival(rank, its.process, launch, its.world_size, was=was)


def save_request(**about: int) -> _core.SaveRequest:
    return _core.SaveRequest(*[0] * len(_core.SaveRequest._fields))._replace(**about)


def kept(
    sequence: int, *, world: int = 2, run: int = 1, rank: int = 0, damaged: bool = False
) -> catalog.StoredCheckpoint:
    """A durable checkpoint; the step is ten times the sequence."""
    stored = CheckpointId(7, "j", rank, sequence, 10 * sequence, run, world)
    return catalog.StoredCheckpoint(
        stored, flags=_core.SLOT_DAMAGED if damaged else 0, wall_ns=sequence, payload_bytes=100,
        tree_offset=90, tree_bytes=10, slot=0, volume_path=Path("v"),
    )  # fmt: skip


def saving(
    step: int = 1, sequence: int = 0, *, world: int = 1, run: int = 1, session: int = 1,
    snapshot: int = 1, payload_bytes: int = 1, requested_ns: int = 1, **about: Any,
) -> RankCheckpoint:  # fmt: skip
    """What a trainer has requested."""
    name = CheckpointId(7, "gpt", 3, sequence, step, run, world)
    return RankCheckpoint(
        name, session, snapshot, payload_bytes, skip_when_busy=False, requested_ns=requested_ns,
        **about,
    )  # fmt: skip


class Volumes:
    def __init__(self) -> None:
        self.held: list[Any] = []
        self.lost: list[Any] = []
        self.unreadable: dict[Path, PccheckError] = {}
        self.current: Any = None
        self.refreshed = 0
        self.open: list[Any] = []

    @property
    def doubts(self) -> list[PccheckError]:
        return list(self.unreadable.values())

    def checkpoints(self) -> list[Any]:
        return sorted(self.held, key=lambda one: -int(one.id.sequence))

    def checkpoint(self, sequence: int) -> Any:
        return next((one for one in self.held if one.id.sequence == sequence), None)

    def sequences(self) -> set[int]:
        return {one.id.sequence for one in self.held}

    def newest(self) -> tuple[int, int] | None:
        return next(((one.id.sequence, one.id.step) for one in self.checkpoints()), None)

    def last_sequence(self) -> int:
        return max((one.id.sequence for one in self.held), default=0)

    def newest_incarnation(self) -> int:
        return max((one.id.incarnation for one in self.held), default=0)

    def find(self, sequence: int) -> Any:
        has = any(one.id.sequence == sequence for one in self.held)
        return SimpleNamespace(volume="volume", checkpoints=self.held) if has else None

    async def refresh(self) -> None:
        self.refreshed += 1


class Ledger:
    def __init__(self) -> None:
        self.checkpoints: dict[int, Any] = {}
        self.last_sequence = 0
        self.ends = True
        self.on_its_way: dict[int, int] = {}
        self.newest: tuple[int, int] | None = None

    def of_sequence(self, sequence: int) -> Any:
        return self.checkpoints.get(sequence)

    @property
    def by_sequence(self) -> dict[int, Any]:
        return self.checkpoints

    def undecided(self) -> list[int]:
        return list(range(1, 100))

    def is_late(self, _newest: int) -> bool:
        return False

    def pending(self) -> dict[int, int]:
        return self.on_its_way

    def live(self) -> list[Any]:
        return [one for one in self.checkpoints.values() if one.live]

    def parked(self) -> list[Any]:
        return []

    async def settled(self, _limit_s: float, _last: int) -> bool:
        return self.ends


@dataclass(eq=False)
class Tenant:
    """The part of a tenant that a job uses."""

    rank: int
    volumes: Volumes = field(default_factory=Volumes)
    ledger: Ledger = field(default_factory=Ledger)
    room: bool = True
    idle: bool = True
    obeyed: list[Agreement] = field(default_factory=list)
    made_global: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    why_never: Any = None

    def __post_init__(self) -> None:
        self.key = Key(7, "gpt", self.rank)
        self.leases: Any = SimpleNamespace(take=self._lease)
        self.queue: Any = SimpleNamespace(look=lambda: None)
        self.seat: Any = SimpleNamespace(
            owner=None, is_leaving=False, close=lambda: self.calls.append("stop attaches")
        )
        self.binding: Any = SimpleNamespace(port=None)
        self.readiness: Any = SimpleNamespace(
            incarnation=1, instruct=self._instruct, look=self._look
        )
        self.slots: Any = SimpleNamespace(has_room=lambda: self.room)
        self.saves: Any = SimpleNamespace(
            became_global=lambda newest, _: self.made_global.append(newest),
            gave_up=lambda why_never: setattr(self, "why_never", why_never),
        )
        self.tasks: Any = SimpleNamespace(spawn=self._spawn)
        self.instructed = 0
        self.uses: Any = SimpleNamespace(begin_read=self._begin_read, end_read=self._end_read)
        self.retention: Any = SimpleNamespace(
            unreadable=set(), inherited=set(), flagged=set(), protected=set(), unrestored=False,
            release=self._release, restored_to=self._restored_to, damaged=self._damaged,
            is_usable=self._is_usable, protect_late=lambda: asyncio.sleep(0),
        )  # fmt: skip

    def _instruct(self) -> None:
        self.instructed += 1

    def _lease(self, sequence: int, session: int) -> None:
        self.calls.append(f"lease {sequence}")

    async def _release(self) -> None:
        self.calls.append("release")

    def _restored_to(self, sequence: int) -> None:
        self.retention.unrestored = False
        self.calls.append(f"restored {sequence}")

    async def _damaged(self, sequence: int) -> None:
        self.calls.append(f"damaged {sequence}")

    async def _begin_read(self) -> None:
        self.calls.append("read")

    def _end_read(self) -> None:
        self.calls.append("read ended")

    def _is_usable(self, one: Any) -> bool:
        return not one.is_damaged and one.id.sequence not in self.retention.unreadable

    def obey(self, agreement: Agreement) -> None:
        self.obeyed.append(agreement)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()
        self.calls.append("protect late")

    async def _look(self) -> None:
        self.calls.append("look")

    async def close(self) -> None:
        self.calls.append("close")


class Ranks:
    """A job with fake ranks; `connect` connects them."""

    def __init__(self, world: int = 2) -> None:
        self.world = world
        self.ended: Any = None  # how the last request ended; None: it was accepted
        # Decisions take no time.
        self.job = Job(7, "gpt", CONFIG, IdleDisk(tuple), clock=lambda: 0.0)
        self.tenants = [Tenant(rank) for rank in range(world)]
        for tenant in self.tenants:
            tenant.volumes.current = SimpleNamespace(
                info=SimpleNamespace(keep=1, slots=4), pinned=set()
            )
            self.job.loaded(tenant)  # type: ignore[arg-type]

    def connect(self, start: int = 1, *, ranks: range | None = None, launch: str = "") -> None:
        for rank in ranks or range(self.world):
            made = owner(rank, world=self.world, start=start)
            self.job.join(arrival(rank, made, launch=launch, was=0))
            self.tenants[rank].seat.owner = made

    def hold(self, *sequences: int, ranks: tuple[int, ...] | None = None, **about: Any) -> None:
        for rank in range(self.world) if ranks is None else ranks:
            self.tenants[rank].volumes.held += [
                kept(n, world=self.world, rank=rank, **about) for n in sequences
            ]

    def ask(
        self, rank: int, step: int, *, on_busy: str = "wait", row: int = 0, **name: int
    ) -> tuple[int, int]:
        """Requests a checkpoint; returns its incarnation and sequence, and sets `ended`."""
        asked = save_request(step=step, row=row, skip=on_busy == "skip", taken_ns=1, **name)
        incarnation, sequence, self.ended, *_ = self.job.number(rank, asked)
        if self.world == 1 and self.ended is None:  # the core takes the next one
            alone = self.tenants[rank].seat.owner
            free = self.job.alone(rank, alone) if alone is not None else None
            assert free is not None
            sequence = self.job.took(rank, free[1] + 1)
        return incarnation, sequence

    def request_slot(self, rank: int, *, needs_it: bool = True) -> list[int]:
        async def ask() -> list[int]:
            return await self.job.request_slot(rank, lambda: needs_it)

        return asyncio.run(ask())

    def left(self, rank: int, process: bytes) -> None:
        """Ends the process of a rank; the remaining ranks decide."""

        async def end() -> None:
            self.job.left(rank, process)

        asyncio.run(end())
        self.settle()

    def settle(self) -> Agreement:
        self.job.settle()
        return self.job.decisions.agreement
