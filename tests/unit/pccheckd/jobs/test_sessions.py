"""Sessions: who gets one, what a token opens, how GPU tensors come, and what an end leaves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_native.transfer import DriverState
from pccheck_wire.errors import RefusedError, UsageError
from pccheck_wire.messages import Hello, Role
from pccheckd.core.exposing import UNFINISHED_BYTES_MAX
from pccheckd.jobs.sessions import Peer, Session, Sessions
from tests.support.jobs import CONFIG, Ranks

UID = os.geteuid()


class Memory:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def gone(self, session: int) -> None:
        self.calls.append(("gone", session))


class Control:
    def __init__(self) -> None:
        self.users: list[int] = []

    async def join(self, uid: int, _gid: int) -> str:
        self.users.append(uid)
        return "ipc:///endpoint"

    def leave(self, uid: int) -> None:
        self.users.remove(uid)


class Kit:
    """Sessions whose attaches do nothing, or raise `error`."""

    def __init__(self, driver: DriverState | None = None) -> None:
        self.error: Exception | None = None
        self.memory, self.control, self.trims = Memory(), Control(), 0
        state = driver or DriverState(missing="no driver")
        engine: Any = SimpleNamespace(
            driver=SimpleNamespace(state=state), require_storage=self._nothing
        )
        registry: Any = SimpleNamespace(
            memory=self.memory, trim=self._trim, engine=engine, config=CONFIG
        )
        control: Any = self.control
        self.sessions = Sessions(registry, control)
        attach: Any = self._attach
        self.sessions._attach_trainer = self.sessions._attach_reader = attach  # type: ignore[method-assign]

    async def _nothing(self, *_: object) -> None: ...

    async def _trim(self) -> None:
        self.trims += 1

    async def _attach(self, *_: object) -> list[int]:
        if self.error is not None:
            raise self.error
        return []

    def open(self, *, uid: int = UID, role: Role = Role.TRAINER, **hello: Any) -> Session:
        asked = Hello(
            **{"protocol": 1, "role": role, "version": "", "pid": 9, "job": "gpt"} | hello
        )

        async def opened() -> Session:
            made, welcome, _ = await self.sessions.open(asked, Peer(uid, 0, 9))
            assert (welcome.session, welcome.token) == (made.number, made.token)
            return made

        return asyncio.run(opened())

    def end(self, session: Session) -> None:
        async def ended() -> None:
            await self.sessions.end(session)
            await asyncio.sleep(0)

        asyncio.run(ended())


def test_a_token_opens_only_a_session_of_its_uid() -> None:
    kit = Kit()
    mine, other = kit.open(uid=7), kit.open(uid=8)
    assert kit.sessions.by_token(7, mine.token) is mine
    altered = mine.token[:-1] + bytes([mine.token[-1] ^ 1])
    for uid, token in ((8, mine.token), (7, other.token), (7, b""), (7, altered)):
        with pytest.raises(RefusedError, match="no such session"):
            kit.sessions.by_token(uid, token)
    kit.end(mine)
    with pytest.raises(RefusedError):
        kit.sessions.by_token(7, mine.token)


@pytest.mark.parametrize("role", Role)
def test_only_who_makes_requests_over_zeromq_gets_an_endpoint(role: Role) -> None:
    kit = Kit()
    session = kit.open(role=role)
    assert bool(session.endpoint) is (role is not Role.OBSERVER)
    kit.end(session)
    assert kit.control.users == []
    assert kit.sessions.all() == []


def test_a_session_that_cannot_be_made_leaves_nothing_behind() -> None:
    kit = Kit()
    kit.error = RefusedError("another process has this rank")
    with pytest.raises(RefusedError, match="another process"):
        kit.open()
    assert kit.sessions.all() == [] and kit.control.users == []
    assert kit.memory.calls == [("gone", 1)]


def test_a_daemon_that_stops_takes_no_session() -> None:
    kit = Kit()
    before = kit.open()
    kit.sessions.draining = True
    with pytest.raises(RefusedError, match="stopping") as refused:
        kit.open()
    assert refused.value.retryable
    kit.end(before)
    assert kit.trims == 0  # the volumes close with the daemon


def test_unused_jobs_are_closed_after_a_session() -> None:
    kit = Kit()
    kit.end(kit.open(role=Role.OBSERVER))
    assert kit.trims == 0
    kit.end(kit.open())
    assert kit.trims == 1


@pytest.mark.parametrize(
    ("hello", "error", "words"),
    [
        ({"job": "a/b"}, UsageError, "not a valid job name"),
        ({"job": ".."}, UsageError, "not a valid job name"),
        ({"rank": 2, "world_size": 2, "local_world_size": 2}, UsageError, "less than world_size"),
        ({"world_size": 2, "local_world_size": 3}, UsageError, "must not exceed"),
        ({"world_size": 193, "local_world_size": 193}, UsageError, "must be at most 192 .got 193"),
    ],
)
def test_names_and_numbers_are_checked_first(
    hello: dict[str, Any], error: type[Exception], words: str
) -> None:
    kit = Kit()
    with pytest.raises(error, match=words):
        kit.open(**hello)
    assert kit.control.users == []


def test_a_solo_rank_may_be_one_of_a_job_on_several_nodes() -> None:
    session = Kit().open(world_size=4096, local_world_size=256, solo=True)
    assert (session.world_size, session.solo) == (1, True)


def test_unfinished_exposures_of_a_user_share_one_limit() -> None:
    kit = Kit()
    first, second, other = kit.open(uid=7), kit.open(uid=7), kit.open(uid=8)
    held: Any = SimpleNamespace(held_bytes=100, drop=lambda: None)
    second.exposing = held
    assert kit.sessions.room_bytes(first) == UNFINISHED_BYTES_MAX - 100
    assert kit.sessions.room_bytes(second) == UNFINISHED_BYTES_MAX
    assert kit.sessions.room_bytes(other) == UNFINISHED_BYTES_MAX


def test_a_session_ends_its_loads_and_what_it_has_exposed() -> None:
    kit, ranks = Kit(), Ranks(1)
    session = kit.open(role=Role.READER)
    dropped: list[bool] = []
    held: Any = SimpleNamespace(held_bytes=1, drop=lambda: dropped.append(True))
    session.exposing = held
    tenant: Any = ranks.tenants[0]
    for load in (1, 2):
        asyncio.run(session.begin_load(load, tenant, 5))
    assert session.is_busy()
    session.end_load(1)
    session.end_load(1)  # again does nothing
    kit.end(session)
    assert dropped == [True]
    assert tenant.calls == ["read", "read", "read ended", "read ended"]
    assert not session.is_busy()


@pytest.mark.parametrize("ends", [Session.give_way, Session.keeps_memory])
def test_who_has_to_end_is_told_by_its_event(ends: Callable[[Session], None]) -> None:
    session = Kit().open()
    ends(session)
    assert session.broken.is_set()
    assert session.gives_way is (ends is Session.give_way)
