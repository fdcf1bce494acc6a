"""What trainers may say of their GPU memory, up to the native tenant, which is a fake one here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from pccheck_native import (
    GpuInfo,
    Gpus,
    Tenant,
    TenantUsage,
)
from pccheck_native.transfer import PUSHED, DriverState
from pccheck_wire import codec
from pccheck_wire.ends import Why, sentence
from pccheck_wire.messages import (
    Chose,
    Done,
    Expose,
    Failure,
    Reply,
    Report,
    Request,
    Role,
    Status,
)
from pccheckctl.output.documents import part, rows
from pccheckd.config.options import Config
from pccheckd.control.handlers import Handlers
from pccheckd.core.engine import Engine
from pccheckd.core.port import Owner
from pccheckd.front.endpoints import ControlServer
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Session, Sessions
from pccheckd.tenancy.volumes import Key
from tests.support.jobs import arrival

KEY = Key(os.geteuid(), "job", 0)


@dataclass
class FakeChannel:
    """Remembers what it is asked."""

    answer: str = ""
    exposed: list[tuple[int, bytes]] = field(default_factory=list)

    def expose(self, number: int, exposure: bytes, descriptors: bytes = b"") -> str:
        self.exposed.append((number, exposure))
        return self.answer

    def policy(self, **_: object) -> None:
        pass

    def usage(self) -> TenantUsage:
        return TenantUsage(1 << 20, 1, 0, 0, 0, 0, 0, 0, 4096, 8192, 2, 0, 0)

    def close(self) -> None:
        pass


class FakeGpus:
    def info(self) -> list[GpuInfo]:
        return [GpuInfo(bytes(range(16)), "NVIDIA H200", True, 5, 2, 1)]


class Place:
    """A trainer's session with its tenant, and the handlers that it talks to."""

    def __init__(self, config: Config) -> None:
        self.engine = Engine(config)
        self.registry = Registry(self.engine)

        self.sessions = Sessions(self.registry, ControlServer(config.socket))
        self.handlers = Handlers(self.sessions)
        self.native = FakeChannel()

    async def open(self) -> None:
        self.job, self.tenant = await self.registry.tenant(KEY)
        await self.tenant.prepare()
        assert self.tenant.binding.port is not None
        self.tenant.binding.port.native = cast(Tenant, self.native)
        self.engine.driver.state = DriverState("driver 12.8")
        self.session = self.join(1)

    def join(self, number: int, role: Role = Role.TRAINER) -> Session:
        made = Session(
            number=number, token=bytes([number]) * 16, role=role, uid=KEY.uid, pid=1,
            kernel_pid=1, connected_ns=0, job=self.job, tenant=self.tenant,
            port=self.tenant.binding.port, transfer="push", transfer_reason="CPU tensors",
        )  # fmt: skip
        if role is Role.TRAINER:
            process = bytes([number]) * 16
            if self.tenant.seat.owner is not None:
                self.leave()
            owner = Owner(
                session=number, pid=1, world_size=1, local_world_size=1, fresh=False,
                process=process, solo=False, restored=None, on_event=lambda event: None,
            )  # fmt: skip
            self.tenant.seat.take(owner)
            self.job.join(arrival(KEY.rank, owner, launch="", was=0))
        self.sessions._sessions[number] = made
        return made

    def leave(self) -> None:
        """The trainer ends."""
        self.tenant.seat.leave()
        self.tenant.seat.free()

    async def ask(self, body: Expose | Chose | Status, session: Session | None = None) -> object:
        chosen = session or self.session
        data = await self.handlers.answer(chosen.uid, codec.encode(Request(1, chosen.token, body)))
        return codec.decode(data, Reply).body if data is not None else None


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    config = Config(
        storage=tmp_path, socket=tmp_path / "s", dram_bytes=1 << 24, chunk_bytes=1 << 20,
        allow_any_filesystem=True,
    )  # fmt: skip
    place = Place(config)
    place.engine.start()
    await place.open()
    yield place
    place.engine.stop()


def refused(answer: object, text: str) -> None:
    assert isinstance(answer, Failure), answer
    assert text in answer.message
    assert answer.code in ("REFUSED", "USAGE")


# -- Expose ------------------------------------------------------------------------------------


async def test_an_exposure_reaches_the_channel_whole(place: Place) -> None:
    answers = await asyncio.gather(  # nobody waits for the answers in between
        place.ask(Expose(1, [b"ab", b"c"], more=True)),
        place.ask(Expose(1, [b"de"], more=True)),
        place.ask(Expose(1, [b"f"])),
        place.ask(Expose(2, [b"next"])),
    )
    assert list(answers) == [Done()] * 4
    assert place.native.exposed == [(1, b"abcdef"), (2, b"next")]


async def test_the_channels_reason_is_told(place: Place) -> None:
    place.native.answer = "allocation 3: the handle does not open"
    answer = await place.ask(Expose(1, [b"x"]))
    refused(answer, "allocation 3")
    assert isinstance(answer, Failure)
    assert (answer.hint, answer.retryable) == (PUSHED, True)


async def test_without_a_driver_nothing_is_collected(place: Place) -> None:
    place.engine.driver.state = DriverState(missing="no CUDA driver here")
    refused(await place.ask(Expose(1, [b"x"], more=True)), "no CUDA driver")
    assert place.session.exposing.held_bytes == 0


async def test_an_old_session_cannot_expose_for_the_next(place: Place) -> None:
    old = place.session
    async with place.tenant.binding.lock:  # its last piece waits while the next one comes
        late = asyncio.create_task(place.ask(Expose(1, [b"old"]), old))
        await asyncio.sleep(0)
        place.join(2)
    refused(await late, "has ended")
    assert not place.native.exposed


async def test_what_a_session_had_sent_goes_with_it(place: Place) -> None:
    assert await place.ask(Expose(1, [b"half"], more=True)) == Done()
    other = place.join(2)
    assert place.sessions.room_bytes(other) < place.sessions.room_bytes(place.session)
    await place.sessions.end(place.session)
    assert place.session.exposing.held_bytes == 0
    refused(await place.ask(Expose(1, [b"x"]), place.session), "has ended")


@pytest.mark.parametrize("role", [Role.READER, Role.OBSERVER])
async def test_only_trainers_share_memory(place: Place, role: Role) -> None:
    session = place.join(2, role)
    for body in (Expose(1, [b"x"]), Chose("pull", "")):
        refused(await place.ask(body, session), "requires a trainer")
    assert not place.native.exposed


# -- Chose, Status -----------------------------------------------------------------------------


async def test_what_was_chosen_is_shown(place: Place) -> None:
    assert await place.ask(Chose("pull", "CUDA IPC")) == Done()
    assert (place.session.transfer, place.session.transfer_reason) == ("pull", "CUDA IPC")
    refused(await place.ask(Chose("pull", "two\nlines")), "reason")


async def test_status_tells_of_gpus_and_transfers(place: Place) -> None:
    place.engine.driver.gpus = cast(Gpus, FakeGpus())
    await place.ask(Chose("pull", "CUDA IPC"))
    answer = await place.ask(Status())
    assert isinstance(answer, Report)
    document = answer.document
    assert document["schema"] == 1
    (gpu,), (session,) = rows(document, "gpus"), rows(document, "sessions")
    assert gpu == {
        "uuid": "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "name": "NVIDIA H200",
        "lost": True, "copied_bytes": 5, "copies": 2, "failures": 1,
    }  # fmt: skip
    shown = {key: session[key] for key in ("transfer", "transfer_reason", "exposed_bytes",
                                           "mappings")}  # fmt: skip
    assert shown == {"transfer": "pull", "transfer_reason": "CUDA IPC", "exposed_bytes": 8192,
                     "mappings": 2}  # fmt: skip
    assert part(document, "pool")["pinned_bytes"] == 4096
    daemon = part(document, "daemon")
    assert (daemon["state"], daemon["transfer"]) == ("degraded", "pull")
    assert "lost" in str(document["warnings"])


@pytest.mark.parametrize(
    ("error_name", "reason"),
    [("DEVICE", "driver failed"), ("DEVICE_LOST", "lost the GPU"),
     ("BAD_HANDLE", "no longer shares"), ("ABORTED", "before its copy was complete")],
)  # fmt: skip
def test_failed_copies_say_why(error_name: str, reason: str) -> None:
    made = sentence(Why(stage="copy", code=error_name))
    assert reason in made.reason
    assert bool(made.hint) is (error_name != "ABORTED")
