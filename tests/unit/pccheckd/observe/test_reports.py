"""Long documents: made off the loop or with turns for everybody else, a user's one by one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import msgpack
import pytest

from pccheck_native import Volume
from pccheck_native.catalog import StoredCheckpoint
from pccheck_wire import codec, packing
from pccheck_wire.basics import PROTOCOL_VERSION
from pccheck_wire.ends import in_words
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Hello, Reply, Report, Request, RequestBody, Role, Status, Trace
from pccheckctl.output.documents import rows
from pccheckd.config.options import Config
from pccheckd.control import verification
from pccheckd.control.handlers import Handlers
from pccheckd.core.engine import Engine
from pccheckd.front.endpoints import ControlServer
from pccheckd.jobs.registry import Registry
from pccheckd.jobs.sessions import Peer, Sessions
from pccheckd.observe import report
from pccheckd.tenancy import outcomes
from pccheckd.tenancy.checkpoint import End, RankCheckpoint, Record
from pccheckd.tenancy.ledger import HISTORY, Ledger
from pccheckd.tenancy.outcomes import Document
from pccheckd.tenancy.volumes import Key
from tests.support.jobs import kept, saving
from tests.unit.pccheckd.observe.test_trace import record

LIMIT_S = 90.0
JOBS = 20


class Place:
    def __init__(self, config: Config) -> None:
        self.engine = Engine(config)
        self.registry = Registry(self.engine)

        self.sessions = Sessions(self.registry, ControlServer(config.socket))
        self.handlers = Handlers(self.sessions)

    async def ask(self, body: RequestBody, *, uid: int = 7) -> Document:
        hello = Hello(PROTOCOL_VERSION, Role.OBSERVER, "test", os.getpid())
        asker, _, _ = await self.sessions.open(hello, Peer(uid, 0, os.getpid()))
        data = await self.handlers.answer(uid, codec.encode(Request(1, asker.token, body)))
        assert data is not None
        answer = codec.decode(data, Reply, bytes_max=packing.REPLY_BYTES_MAX)
        assert isinstance(answer, Reply) and isinstance(answer.body, Report)
        return answer.body.document


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    config = Config(tmp_path, tmp_path / "s", dram_bytes=1 << 24, allow_any_filesystem=True)
    place = Place(config)
    place.engine.start()
    yield place
    place.engine.stop()


def full(place: Place, *uids: int) -> None:
    for uid in uids:
        for step in range(outcomes.RECORDS_PER_UID):
            place.registry.chronicle.ring.add(record(step, step + 10, step + 20, uid=uid))


async def test_a_trace_is_made_and_encoded_off_the_loop(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, threading.Thread] = {}

    def noted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            if not isinstance(arguments[0], Request):
                threads[name] = threading.current_thread()
            return function(*arguments, **more)

        return call

    monkeypatch.setattr(outcomes, "document", noted("made", outcomes.document))
    monkeypatch.setattr(codec, "encode", noted("encoded", codec.encode))
    full(place, 7)
    document = await place.ask(Trace(1e8))
    assert len(rows(document, "checkpoints")) == outcomes.RECORDS_PER_UID
    assert set(threads) == {"made", "encoded"}
    assert threading.current_thread() not in threads.values()


async def test_a_users_traces_are_made_one_after_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is in the second is what was there when its turn came."""
    made, begun, let_go = outcomes.document, threading.Semaphore(0), threading.Event()

    def held(records: list[Record], nodes: list[Document], **times: int) -> Document:
        begun.release()
        if records[0].id.uid == 7:
            let_go.wait(LIMIT_S)
        return made(records, nodes, **times)

    monkeypatch.setattr(outcomes, "document", held)
    ring = place.registry.chronicle.ring
    ring.add(record(1, 10, 20))
    ring.add(record(1, 10, 20, uid=8))
    first = asyncio.create_task(place.ask(Trace(1e8)))
    assert await asyncio.to_thread(begun.acquire, timeout=LIMIT_S)
    others = [asyncio.create_task(place.ask(Trace(1e8))) for _ in range(10)]
    await place.ask(Trace(1e8), uid=8)  # no user waits for another one
    assert begun.acquire(blocking=False) and not begun.acquire(blocking=False)
    ring.add(record(2, 30, 40))
    let_go.set()
    assert len(rows(await first, "checkpoints")) == 1
    for other in others:
        assert len(rows(await other, "checkpoints")) == 2


async def test_status_of_many_ranks_gives_everybody_his_turn(place: Place) -> None:
    uid = os.geteuid()
    for number in range(JOBS):
        _, tenant = await place.registry.tenant(Key(uid, f"job{number}", 0))
        tenant.ledger.add(checkpoint(1))
    turns, asking = 0, asyncio.create_task(place.ask(Status(), uid=uid))
    while not asking.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(rows(await asking, "ranks")) == JOBS
    assert turns >= JOBS


def test_verify_begins_nothing_for_one_who_has_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [kept(sequence) for sequence in (1, 2, 3)]
    gone = threading.Event()
    monkeypatch.setattr(report.catalog, "checkpoints_of", lambda *_: iter(found))

    def verified(_volume: object, item: StoredCheckpoint, _part: object) -> Document:
        if item.id.sequence == 2:
            gone.set()
        return {"sequence": item.id.sequence}

    monkeypatch.setattr(verification, "_verified", verified)
    volumes = [(Path(), cast(Volume, None))]
    document = verification.verify(volumes, 0, None, ends=gone.is_set)
    assert [row["sequence"] for row in rows(document, "checkpoints")] == [1, 2]


def test_verify_leaves_out_what_newer_ones_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced checkpoint is neither good nor damaged."""
    found = [kept(number) for number in (1, 2)]
    monkeypatch.setattr(report.catalog, "checkpoints_of", lambda *_: iter(found))

    class Replacing:
        def verify(self, sequence: int) -> None:
            if sequence == 1:
                raise FileNotFoundError(2, "there is no such checkpoint")

    volumes = [(Path(), cast(Volume, Replacing()))]
    document = verification.verify(volumes, 0, None, ends=lambda: False)
    assert [(row["sequence"], row["valid"]) for row in rows(document, "checkpoints")] == [(2, True)]


# -- what they are made of ---------------------------------------------------------------------


def checkpoint(snapshot: int, sequence: int = 0, *, session: int = 1) -> RankCheckpoint:
    return saving(snapshot, sequence, snapshot=snapshot, session=session, run=session)


def test_the_ledger_knows_what_moves_without_looking_at_what_has_ended() -> None:
    ledger = Ledger()
    items = [checkpoint(number, session=1 + number % 2) for number in range(HISTORY + 20)]
    for item in items:
        ledger.add(item)
    assert ledger.live() == items
    for item in items[10:]:
        item.advance(State.DURABLE, 5)
    assert ledger.live() == items[:10]
    last = checkpoint(1000)
    ledger.add(last)
    assert ledger.live() == [*items[:10], last]
    assert len(ledger.checkpoints) == HISTORY + 11  # what moves is never forgotten
    assert ledger.recent(2) == [items[-1], last]
    assert ledger.recent(2, session=2) == [items[-3], items[-1]]
    assert ledger.recent(1000, session=3) == []


async def test_a_restore_waits_for_what_was_asked_for_before_it() -> None:
    ledger = Ledger()
    items = [checkpoint(number, number) for number in (1, 2)]
    for item in items:
        ledger.add(item)
    assert await ledger.settled(0, 0)
    assert not await ledger.settled(0, 1)
    waiting = asyncio.create_task(ledger.settled(LIMIT_S, 1))
    await asyncio.sleep(0)
    ledger.refuse(items[0], End(State.FAILED, in_words("why")))
    assert await asyncio.wait_for(waiting, LIMIT_S)
    assert ledger.of_sequence(2) is items[1] and ledger.of_sequence(3) is None
    assert not await ledger.settled(0, 2)


def test_a_long_document_is_packed_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of it would hold the interpreter's lock for as long as it takes."""
    packed: list[object] = []

    class Packer(msgpack.Packer):  # type: ignore[misc]
        def pack(self, value: object) -> bytes:
            packed.append(value)
            return cast(bytes, super().pack(value))

    records = [record(step, 1, 2).document() for step in range(9)]
    document: Document = {
        "schema": 1, "none": [], "checkpoints": records, "pool": {"used": 1},
    }  # fmt: skip
    whole = msgpack.packb(
        {"t": "reply", "number": 1, "body": {"t": "report", "document": document}}
    )
    monkeypatch.setattr(msgpack, "Packer", Packer)
    assert codec.encode(Reply(1, Report(document))) == whole
    longest = max(len(value) for value in packed if isinstance(value, dict))
    assert longest == len(records[0]) and not [v for v in packed if isinstance(v, list)]
