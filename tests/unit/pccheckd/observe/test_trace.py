"""The ring of what has ended, and the Chrome trace that the command line makes of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

from pccheck_native.identity import CheckpointId
from pccheckctl.commands import trace as viewer
from pccheckctl.output.documents import Document, rows, whole
from pccheckd.tenancy.checkpoint import Record
from pccheckd.tenancy.outcomes import Ring, document

MS = 1_000_000


def record(
    step: int, begin: int, end: int, *, uid: int = 7, job: str = "job", rank: int = 0,
    state: str = "durable",
) -> Record:  # fmt: skip
    """One that was asked for 2 ms before `begin` and written from 1 ms after it, all in ms."""
    return Record(
        CheckpointId(uid, job, rank, step, step, 1, 1), session=1, snapshot=step, slot=0,
        payload_bytes=1 << 20, copied_bytes=1 << 20, written_bytes=1 << 20, pulled=False,
        in_memory=False,
        state=state, reason="",
        hint="", stage="", error="", rehomed=0,
        held_at=begin * MS - 2 * MS, held=MS, requested=(begin - 2) * MS, ended=end * MS,
        begin=begin * MS, first_write=(begin + 1) * MS, sealed=(begin + 3) * MS,
        written=(end - 2) * MS, flushed=(end - 1) * MS,
        durable=end * MS if state == "durable" else 0,
    )  # fmt: skip


def made(ended: Iterable[Record], live: Iterable[Record] = ()) -> Document:
    return document([*ended, *live], [], since_ns=0, now_ns=1000 * MS, wall_ns=5000 * MS)


def slices(chrome: Document) -> list[Document]:
    return [event for event in rows(chrome, "traceEvents") if event["ph"] == "X"]


def test_nobody_pushes_another_s_out() -> None:
    ring = Ring(per_uid=3, uids=2)
    ring.add(record(1, 10, 20, uid=8))
    for step in range(10):
        ring.add(record(step, 10 + step, 20 + step))
    assert [one.id.step for one in ring.newest(7, 0)] == [9, 8, 7]
    assert [one.id.step for one in ring.newest(8, 0)] == [1]
    assert len(list(ring.newest(0, 0))) == 4
    assert not list(ring.newest(9, 0))
    assert [one.id.step for one in ring.newest(7, 29 * MS)] == [9]
    ring.add(record(1, 10, 20, uid=9))  # the user longest quiet goes
    assert not list(ring.newest(8, 0))


def test_the_document_is_bounded_and_plain() -> None:
    ring = Ring()
    for uid, step in itertools.product(range(3), range(4000)):
        ring.add(record(step, step + 10, step + 20, uid=uid))
    assert len(ring.newest(0, 0)) == 8192
    assert json.loads(json.dumps(made([record(1, 10, 20)]))) == made([record(1, 10, 20)])


def test_checkpoints_that_overlap_have_lanes_of_their_own() -> None:
    """Three that overlap pairwise, then one that follows: Figure 6 of the paper in small."""
    found = [record(1, 10, 40), record(2, 20, 50), record(3, 30, 60), record(4, 45, 70)]
    chrome = viewer.chrome(made(found))
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in slices(chrome):
        begin = event["ts"]
        assert isinstance(begin, float) and isinstance(event["dur"], float)
        tracks.setdefault(whole(event, "tid"), []).append((int(begin), int(begin + event["dur"])))
    for spans in tracks.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(spans)):
            assert end <= begin
    names = {e["args"]["name"] for e in rows(chrome, "traceEvents") if e["name"] == "thread_name"}  # type: ignore[index]
    assert {f"lane {lane}: copy" for lane in range(3)} <= names and "lane 3: copy" not in names
    (fourth,) = [event for event in slices(chrome) if event["name"] == "copy 4"]
    assert fourth["tid"] == viewer._LANES  # the first lane is free again
    counts = [e["args"]["checkpoints"] for e in rows(chrome, "traceEvents") if e["ph"] == "C"]  # type: ignore[index]
    assert max(counts) == 3 and counts[-1] == 0


def test_every_part_has_its_slice() -> None:
    chrome = viewer.chrome(made([record(5, 10, 40)]))
    found = {str(event["name"]): event for event in slices(chrome)}
    assert set(found) == {
        "held by the gate", "wait 5", "copy 5", "write 5", "flush 5", "publish 5",
    }  # fmt: skip
    assert (found["copy 5"]["ts"], found["copy 5"]["dur"]) == (10_000.0, 3_000.0)
    assert (found["write 5"]["ts"], found["write 5"]["dur"]) == (11_000.0, 27_000.0)
    assert "write_speed" in found["write 5"]["args"]  # type: ignore[operator]


def test_one_that_failed_ends_where_it_failed_and_one_in_flight_goes_on_until_now() -> None:
    failed = record(1, 10, 40, state="failed")._replace(written=0, flushed=0)
    moving = record(2, 990, 0, state="copying")._replace(
        ended=0, sealed=0, first_write=0, written=0, flushed=0, durable=0
    )
    waiting = moving._replace(id=moving.id._replace(step=3), begin=0)
    found = {str(e["name"]): e for e in slices(viewer.chrome(made([failed], [moving, waiting])))}
    assert found["write 1"]["dur"] == 29_000.0 and found["write 1"]["cname"] == "terrible"
    assert found["copy 2"]["dur"] == 10_000.0
    assert found["wait 3"]["dur"] == 12_000.0 and "copy 3" not in found


def test_nothing_is_a_trace_too() -> None:
    assert viewer.chrome(made([]))["traceEvents"] == []


def test_what_is_in_memory_only_takes_a_lane_when_it_is_written() -> None:
    replaced = record(1, 10, 40, state="superseded")._replace(
        in_memory=True, first_write=0, written=0, flushed=0
    )
    written = record(2, 20, 90)._replace(in_memory=True, first_write=60 * MS)
    chrome = viewer.chrome(made([replaced, written, record(3, 30, 55)]))
    names = [
        (event["name"], whole(event, "tid") // 100 * 100)
        for event in slices(chrome)
        if event["name"] != "held by the gate" and "wait" not in str(event["name"])
    ]
    memory, lanes = viewer._MEMORY, viewer._LANES
    assert names == [
        ("copy 1", memory), ("in memory 1", memory), ("copy 2", memory), ("in memory 2", memory),
        *((f"{part} 3", lanes) for part in ("copy", "write", "flush", "publish")),
        *((f"{part} 2", lanes) for part in ("write", "flush", "publish")),
    ]  # fmt: skip
    counts = [e["args"]["checkpoints"] for e in rows(chrome, "traceEvents") if e["ph"] == "C"]  # type: ignore[index]
    assert max(counts) == 1  # they take the lane one after another
