"""Which session carries out which operations of a node."""

from __future__ import annotations

import asyncio

from pccheck_wire import packing
from pccheck_wire.messages import Carried, Carry
from pccheckd.nodes.carriers.voice import StoreVoice


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
