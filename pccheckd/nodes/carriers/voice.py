"""A carrier whose operations client processes of the job carry out: only they can open the store of
torch.distributed. Each connection of a trainer has two lanes: one for operations that end at once,
and one for those that wait. One client at a time, the voice, gets the operations of a lane; when
its session ends, another one does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pccheck_wire import packing
from pccheck_wire.errors import ProtocolError, UsageError
from pccheck_wire.messages import CARRY_LIMIT_S, Carried, Carry

from .carrier import CarrierError

#: The client's own limit comes first: it knows more of why the store does not answer.
LIMIT_S = 45.0
MARGIN_S = 0.5  # for the way of an answer
BATCH_MAX = 32
#: Sessions that wait for operations, beside the voice: for when that ends.
SPEAKERS = 2
#: A session that has not asked for so long, and has no operations, has lost its connection.
ABSENT_S = 2 * CARRY_LIMIT_S
NO_VOICE = "no process of this job on this node has reached the store of torch.distributed yet"

Operation = list[object]
Result = object


@dataclass(slots=True, eq=False)
class _Asked:
    operation: Operation
    result: asyncio.Future[Result]

    def fail(self, why: str) -> None:
        if not self.result.done():
            self.result.set_exception(CarrierError(why))


@dataclass(slots=True, eq=False)
class _Lane:
    queued: deque[_Asked] = field(default_factory=deque)
    given: list[_Asked] = field(default_factory=list)  # to the voice, and not answered
    voice: int = 0  # the session that carries out operations; 0: none ...
    heard_s: float = 0.0  # ... and when it asked last, or got the answer to that
    batch: int = 0  # the number of what is given
    pieces: list[bytes] = field(default_factory=list)  # of results that come in several messages
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def take(self, session: int, now_s: float) -> list[Operation]:
        """What this session is to carry out now; it becomes the voice if there is none, or if that
        does not ask any more."""
        self.queued = deque(asked for asked in self.queued if not asked.result.done())
        if self.given and all(asked.result.done() for asked in self.given):
            self.given, self.pieces, self.voice = [], [], 0  # nobody waits for the answer any more
        is_gone = now_s - self.heard_s > ABSENT_S
        if not self.queued or self.given or (self.voice not in (0, session) and not is_gone):
            return []
        self.voice, self.heard_s = session, now_s
        self.batch += 1
        self.given = [self.queued.popleft() for _ in range(min(BATCH_MAX, len(self.queued)))]
        return [asked.operation for asked in self.given]

    def answered(self, body: Carry) -> None:
        """Messages with results, of which some may arrive twice, or be lost."""
        if body.batch != self.batch:
            if not body.more:
                self.lose("the client did not get it")
            return
        held = sum(map(len, self.pieces))
        if body.at == held:
            self.pieces += body.results
        if body.more or not self.given:
            return
        try:
            results = packing.joined(self.pieces)
        except ProtocolError as error:
            self.lose(error.message)
            return
        given, self.given, self.pieces = self.given, [], []
        for asked, result in zip(given, results, strict=False):
            if not asked.result.done():
                asked.result.set_result(result)
        self.queued.extendleft(reversed(given[len(results) :]))  # they were not begun

    def lose(self, why: str) -> None:
        given, self.given, self.pieces = self.given, [], []
        for asked in given:
            asked.fail(why)


class StoreVoice:
    """Owned by the job's nodes. Implements `Carrier`."""

    def __init__(self) -> None:
        self._lanes = (_Lane(), _Lane())  # for operations that end at once, and for those that wait
        self._asked_s: dict[int, float] = {}  # by session: when a lane asked last

    # -- the clients' side ---------------------------------------------------------------------

    async def carry(self, session: int, body: Carry) -> Carried:
        """A client has carried out what it got before, and asks for more. Waits for CARRY_LIMIT_S
        at most."""
        if body.lane not in range(len(self._lanes)):
            raise UsageError(f"$.body.lane must be 0 or 1 (got {body.lane})")
        mine = self._lanes[body.lane]
        loop = asyncio.get_running_loop()
        self._asked_s[session] = loop.time()
        if mine.voice == session:  # it stays the voice when sessions with lower numbers come
            mine.answered(body)
            mine.heard_s = loop.time()
        elif session not in self._speakers(loop.time()):  # asks again when the limit is over
            return Carried()
        deadline = loop.time() + CARRY_LIMIT_S - MARGIN_S
        while not body.more and session in self._asked_s:
            if found := mine.take(session, loop.time()):
                return Carried(mine.batch, packing.pieces(found))
            try:
                async with asyncio.timeout_at(deadline):
                    await mine.changed.wait()
            except TimeoutError:
                break
        if mine.voice == session:
            mine.heard_s = loop.time()
        return Carried()

    def _speakers(self, now_s: float) -> list[int]:
        there = (one for one, at_s in self._asked_s.items() if now_s - at_s < ABSENT_S)
        return sorted(there)[:SPEAKERS]

    def gone(self, session: int) -> None:
        """A session has ended."""
        self._asked_s.pop(session, None)
        for lane in self._lanes:
            if lane.voice == session:
                lane.voice = 0
                lane.lose("the process that used the store for this node has ended")
            lane.wake()

    # -- Carrier -------------------------------------------------------------------------------

    async def set(self, key: str, value: bytes) -> None:
        await self._ask(0, ["set", key, value])

    async def add(self, key: str, amount: int) -> int:
        return _int(await self._ask(0, ["add", key, amount]))

    async def swap(self, key: str, value: bytes) -> bytes:
        return _bytes(await self._ask(0, ["swap", key, value]))

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        values: list[bytes | None] = []
        while len(values) < len(keys):  # what is long comes in several answers
            found = await self._ask(0, ["get", list(keys[len(values) :])])
            values += _values(found)
        return values[: len(keys)]

    async def ring(self, key: str, value: bytes, bell: str) -> int:
        return _int(await self._ask(0, ["ring", key, value, bell]))

    async def listen(
        self, bell: str, after: int, keys: Sequence[str], limit_s: float
    ) -> tuple[int, list[bytes | None]] | None:
        found = await self._ask(1, ["listen", bell, after, list(keys), limit_s], limit_s)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != 2:
            raise CarrierError("the client answered with something else")
        values = _values(found[1])
        return _int(found[0]), values + await self.get(keys[len(values) :])

    async def _ask(self, lane: int, operation: Operation, extra_s: float = 0.0) -> Result:
        asked = _Asked(operation, asyncio.get_running_loop().create_future())
        mine = self._lanes[lane]
        mine.queued.append(asked)
        mine.wake()
        try:
            async with asyncio.timeout(LIMIT_S + extra_s):
                found = await asked.result
        except TimeoutError:
            why = f"the store did not answer for {LIMIT_S:g} s" if mine.voice else NO_VOICE
            raise CarrierError(why) from None
        if isinstance(found, list) and found[:1] == ["error"]:
            raise CarrierError(" ".join(str(word) for word in found[1:])[:400])
        return found


def _int(found: Result) -> int:
    if type(found) is not int:
        raise CarrierError("the client answered with no number")
    return found


def _values(found: Result) -> list[bytes | None]:
    if not isinstance(found, list) or not found:
        raise CarrierError("the client answered with no values")
    return [None if one is None else _bytes(one) for one in found]


def _bytes(found: Result) -> bytes:
    if not isinstance(found, bytes):
        raise CarrierError("the client answered with no bytes")
    return found
