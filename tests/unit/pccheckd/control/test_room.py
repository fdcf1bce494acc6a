"""Room on the disk is shared by users who do not wait for each other."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pccheck_native import _core
from pccheck_wire.errors import StorageFullError
from pccheck_wire.messages import Role
from pccheckd.config.options import Config
from pccheckd.core.engine import Engine
from pccheckd.storage import space as room_module
from pccheckd.storage.quota import Need
from pccheckd.tenancy.volumes import Key, VolumeSet
from tests.unit.pccheckd.control.test_handlers import Place
from tests.unit.pccheckd.control.test_handlers import place as place  # a fixture

LIMIT_S = 90.0
PAYLOAD = 1 << 20


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    config = Config(
        tmp_path, tmp_path / "s", dram_bytes=1 << 24, allow_any_filesystem=True,
        block_bytes=1 << 16, slots=2, keep=1,
    )  # fmt: skip
    engine = Engine(config)
    engine.start()
    yield engine
    engine.stop()


async def make(engine: Engine, uid: int) -> None:
    volumes = VolumeSet(Key(uid, "job", 0), engine)
    await volumes.make(PAYLOAD, incarnation=1, start=bytes(16), world_size=1, next_sequence=1)
    await volumes.close()


class Slow:
    """Making a volume of uid 1 takes until `go`, and then fails if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.begun, self.go, self.fails = threading.Event(), threading.Event(), False
        stack.callback(self.go.set)
        self._make = _core.create_volume
        monkeypatch.setattr(_core, "create_volume", self)

    def __call__(self, path: str, **options: object) -> None:
        if options["uid"] == 1:
            self.begun.set()
            assert self.go.wait(LIMIT_S)
            if self.fails:
                raise OSError(5, "the disk of uid 1")
        self._make(path, **options)  # type: ignore[arg-type]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    with ExitStack() as stack:
        yield Slow(monkeypatch, stack)


def volume_bytes(config: Config) -> int:
    return _core.volume_bytes_for(2 << 20, config.slots, config.block_bytes)


async def test_a_volume_is_made_while_the_disk_of_another_user_hangs(
    engine: Engine, slow: Slow
) -> None:
    first = asyncio.create_task(make(engine, 1))
    assert await asyncio.to_thread(slow.begun.wait, LIMIT_S)
    await make(engine, 2)
    assert not first.done()
    slow.go.set()
    await first


async def test_two_volumes_do_not_both_count_on_the_last_room(engine: Engine) -> None:
    engine.config.max_storage_bytes = volume_bytes(engine.config)
    made = await asyncio.gather(*(make(engine, uid) for uid in (1, 2, 3)), return_exceptions=True)
    refused = [one for one in made if one is not None]
    assert [type(one) for one in refused] == [StorageFullError] * 2


async def test_room_that_a_failed_volume_had_reserved_is_anothers(
    engine: Engine, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.config.max_storage_bytes = volume_bytes(engine.config)
    checked = asyncio.Event()
    loop = asyncio.get_running_loop()
    refused = Need.droppable

    def droppable(need: Need, lacking: int) -> str:
        loop.call_soon_threadsafe(checked.set)
        return refused(need, lacking)

    monkeypatch.setattr(Need, "droppable", droppable)
    slow.fails = True
    first = asyncio.create_task(make(engine, 1))
    assert await asyncio.to_thread(slow.begun.wait, LIMIT_S)
    second = asyncio.create_task(make(engine, 2))
    await checked.wait()
    slow.go.set()
    await second
    with pytest.raises(Exception, match="uid 1"):
        await first


async def test_a_file_system_that_hangs_is_described_as_last_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = await engine.room.fresh()
    assert seen.total_bytes > seen.free_bytes > 0
    monkeypatch.setattr(room_module, "FRESH_LIMIT_S", 0.0)
    with ExitStack() as stack:
        go = threading.Event()
        stack.callback(go.set)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: go.wait(LIMIT_S))
        assert await engine.room.fresh() == seen
        assert engine.room.look() is engine.room.look()  # only one thread hangs
        monkeypatch.undo()


async def test_the_end_of_a_session_waits_for_no_other_users_job(place: Place) -> None:
    trimming, go = asyncio.Event(), asyncio.Event()

    async def trim() -> None:
        trimming.set()
        await go.wait()

    place.registry.trim = trim  # type: ignore[method-assign]
    await place.sessions.end(place.join(2, Role.READER))
    await trimming.wait()
    go.set()
