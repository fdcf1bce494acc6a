"""Which session carries out which operations of a node."""

from __future__ import annotations

import asyncio

import pytest

from pccheck_wire import packing
from pccheck_wire.messages import Carried, Carry
from pccheckd.nodes.carriers import voice as module
from pccheckd.nodes.carriers.voice import StoreVoice

pytestmark = pytest.mark.anyio


def bells(given: Carried) -> list[object]:
    return [operation[1] for operation in packing.joined(given.operations)]


def test_what_nobody_waits_for_delays_no_other_session() -> None:
    """The process that carries it out is silent until it has ended."""

    async def run() -> None:
        voice = StoreVoice()
        ask = Carry(lane=1, batch=0, results=[], at=0, more=False)
        first = asyncio.create_task(voice.listen("ended", 0, ["key"], 20))
        assert bells(await voice.carry(1, ask)) == ["ended"]
        first.cancel()
        second = asyncio.create_task(voice.listen("next", 0, ["key"], 20))
        await asyncio.sleep(0)
        assert bells(await voice.carry(2, ask)) == ["next"]
        late = Carry(lane=1, batch=1, results=packing.pieces([None]), at=0, more=False)
        asking = asyncio.create_task(voice.carry(1, late))  # the answer to the first one
        answer = Carry(lane=1, batch=2, results=packing.pieces([[1, [b"value"]]]), at=0, more=False)
        telling = asyncio.create_task(voice.carry(2, answer))
        assert await second == (1, [b"value"])
        for each in (asking, telling):
            each.cancel()

    asyncio.run(run())


class Session:
    """A lane 0 that adds and answers, as a trainer's does."""

    def __init__(self, voice: StoreVoice, number: int) -> None:
        self.voice, self.number, self.added = voice, number, 0
        self._batch, self._results = 0, list[bytes]()

    async def ask(self) -> None:
        given = await self.voice.carry(self.number, Carry(0, self._batch, self._results))
        operations = packing.joined(given.operations)
        self.added += len(operations)
        self._batch = given.batch
        self._results = packing.pieces([1] * len(operations)) if operations else []

    async def serve(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(0)


async def test_a_voice_that_earlier_sessions_displace_stays_the_voice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sessions of a node come in any order, and only the first two of many wait."""
    monkeypatch.setattr(module, "LIMIT_S", 0.5)
    voice = StoreVoice()
    third = Session(voice, 3)
    adding = asyncio.create_task(voice.add("n", 1))
    await asyncio.sleep(0)
    await third.ask()  # it has a batch when the others come
    others = [asyncio.create_task(Session(voice, number).serve()) for number in (1, 2)]
    await asyncio.sleep(0)
    serving = asyncio.create_task(third.serve())
    assert await adding == 1
    assert [await voice.add("n", 1) for _ in range(3)] == [1, 1, 1]  # also when it has none
    assert third.added == 4
    for task in (*others, serving):
        task.cancel()


async def test_sessions_that_ask_no_more_keep_no_other_from_speaking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their lanes could not connect again: too many files are open."""
    monkeypatch.setattr(module, "ABSENT_S", 0.05)
    voice = StoreVoice()
    adding = asyncio.create_task(voice.add("n", 1))
    await asyncio.sleep(0)
    for number in (1, 2):
        asking = asyncio.create_task(Session(voice, number).ask())
        await asyncio.sleep(0)
        asking.cancel()
    adding.cancel()
    await asyncio.sleep(0.06)
    serving = asyncio.create_task(Session(voice, 3).serve())
    assert await voice.add("n", 1) == 1
    serving.cancel()
