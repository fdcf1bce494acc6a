"""The page of `pccheckctl report`: its numbers, and that it is one whole file."""

from __future__ import annotations

import itertools
import random
from html.parser import HTMLParser

import pytest

from pccheckctl.report import saves as report
from pccheckctl.report.page import page
from pccheckctl.report.saves import TracedSaves, disk_rates, lags, lanes, losses, saves_of
from pccheckd.tenancy.checkpoint import Record
from tests.unit.pccheckd.observe.test_trace import MS, made, record

VOID = {"meta"}


class Checked(HTMLParser):
    """Raises for a tag that is not closed; collects texts and titles."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []
        self.bars: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attributes)
        assert not {"src", "href", "onclick"} & found.keys() and tag != "script"
        if "title" in found:
            self.bars.append(found["title"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def parsed(text: str) -> Checked:
    checked = Checked()
    checked.feed(text)
    checked.close()
    assert not checked.open
    return checked


def saves(*records: Record, live: tuple[Record, ...] = ()) -> TracedSaves:
    return saves_of(made(records, live), job=None, uid=None)


def test_every_checkpoint_is_there_with_its_numbers() -> None:
    found = parsed(page(saves(record(1, 10, 20), record(2, 14, 40))))
    bars = [bar for bar in found.bars if bar.startswith("step 2, durable")]
    assert bars and "wait 2.00 ms, copy 3.00 ms, write 23.0 ms" in bars[0]
    assert "request to durable" in found.said and "Training did not wait." not in found.said


def test_names_and_reasons_of_others_are_text() -> None:
    evil = record(1, 10, 20, job="<script>alert(1)</script>", state="failed")
    evil = evil._replace(reason='"><img src=x onerror=y>')
    found = parsed(page(saves(evil)))
    assert "<script>alert(1)</script> 0" in found.said
    assert any('"><img' in one for one in found.said)


@pytest.mark.parametrize("count", [0, 1])
def test_little_is_a_page_too(count: int) -> None:
    found = parsed(page(saves(*(record(1, 10, 20) for _ in range(count)))))
    assert ("No checkpoint in this time." in found.said) == (count == 0)


def test_what_is_in_flight_lasts_until_now() -> None:
    live = record(3, 10, 0, state="writing")._replace(ended=0, written=0, flushed=0)
    found = saves(live=(live,))
    assert found.span_ns == (8 * MS, 1000 * MS)
    parsed(page(found))


def test_no_two_overlap_on_a_lane_and_none_is_missing() -> None:
    rng = random.Random(5)
    begins = [rng.randrange(900) for _ in range(200)]
    items = saves(*(record(n, at, at + rng.randrange(6, 90)) for n, at in enumerate(begins))).items
    found = lanes(items, 1000 * MS)
    assert sorted(one.step for lane in found for one in lane) == list(range(200))
    for lane in found:
        assert all(a.ended <= b.begin for a, b in itertools.pairwise(lane))


def test_the_disk_s_rate_adds_up_to_what_was_written() -> None:
    rng = random.Random(6)
    records = [record(n, at, at + 50) for n, at in enumerate(rng.sample(range(800), 30))]
    found = saves(*records)
    since, until = found.span_ns
    rates = disk_rates(found.items, (since, until), 60)
    total = sum(rates) * (until - since) / 60 / 1e9
    assert total == pytest.approx(sum(one.written_bytes for one in found.items))


def test_ranks_are_compared_checkpoint_by_checkpoint() -> None:
    late = [record(n, 10 * n, 10 * n + 8 + n, rank=1) for n in (1, 2, 3)]
    alone = record(9, 90, 99, job="alone")
    found = lags(saves(*(record(n, 10 * n, 10 * n + 8) for n in (1, 2, 3)), *late, alone).items)
    ((key, three),) = found.items()
    assert key == (7, "job")
    assert [(lag.step, lag.seconds, lag.slowest) for lag in three] == [
        (n, pytest.approx(n / 1000), 1) for n in (1, 2, 3)
    ]


def test_losses_are_counted_by_reason() -> None:
    full = [record(n, n, n + 5, state="failed")._replace(reason="disk full") for n in (1, 2)]
    busy = record(3, 3, 9, state="skipped")._replace(reason="all slots are busy")
    fine = [record(4, 4, 9, state="superseded"), record(5, 5, 9)]
    found = [(one.state, one.reason, one.steps) for one in losses(saves(*full, busy, *fine).items)]
    assert found == [
        ("failed", "disk full", [1, 2]),
        ("skipped", "all slots are busy", [3]),
    ]


def parked(step: int, begin: int, end: int, **more: object) -> Record:
    """Copied in 3 ms, and replaced in memory at `end`."""
    made = record(step, begin, end, state="superseded")._replace(
        in_memory=True, reason="a newer checkpoint is in memory", first_write=0, written=0,
        flushed=0, durable=0,
    )  # fmt: skip
    return made._replace(**more)  # type: ignore[arg-type]


def test_what_is_in_memory_only_has_a_row_until_it_is_written() -> None:
    written = record(2, 20, 90)._replace(in_memory=True, first_write=60 * MS)
    newest = parked(4, 40, 0, state="copied", ended=0, reason="")
    found = saves(record(1, 10, 30), written, parked(3, 30, 45), live=(newest,))
    assert [[one.step for one in lane] for lane in lanes(found.items, 1000 * MS)] == [[1, 2]]
    assert [[one.step for one in row] for row in report.parked(found.items, 1000 * MS)] == [
        [2], [3], [4],
    ]  # fmt: skip
    text = page(found)
    shown = parsed(text)
    assert text.count('<i class="memory"') == 4  # with the legend's
    assert any("step 3, superseded (a newer" in bar for bar in shown.bars)
    assert any("step 4, in memory" in bar for bar in shown.bars)
    assert "memory lost" not in text and "copy lost" not in text
    assert shown.said[shown.said.index("job 0") :][:7] == ["job 0", "2", "1", "0", "0", "1", "0"]


def test_a_job_on_several_nodes_has_a_row_for_each() -> None:
    node = {"host": "a<b", "node": "3f0a91c2", "ranks": [0, 1], "here": True, "heard_s": 0.0,
            "offered_step": 7, "global_step": 6, "waited_step": None, "waited_s": 0.0}  # fmt: skip
    other = node | {"host": "n2", "here": False, "ranks": [2], "waited_step": 7, "waited_s": 3.0}
    wide = {"uid": 7, "job": "job", "nodes": [node, other]}
    document = made([record(1, 10, 20)], ()) | {"nodes": [wide, wide | {"job": "another"}]}
    found = parsed(page(saves_of(document, job="job", uid=None)))
    assert "Nodes of job" in found.said and "Nodes of another" not in found.said
    at = found.said.index("a<b, this node")
    row = [text for text in found.said[at:] if text.strip()]
    assert row[:7] == ["a<b, this node", "3f0a91c2", "0-1", "-", "7", "6", "-"]
    assert row[7:14] == ["n2", "3f0a91c2", "2", "0.0 s ago", "7", "6", "step 7, 3.0 s"]
