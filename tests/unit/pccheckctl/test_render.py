"""Text for people: sizes, durations, tables, and the documents as tables."""

from __future__ import annotations

from argparse import Namespace

import pytest

from pccheck_wire.basics import some
from pccheckctl.commands import listing, status
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer

GIB = 1 << 30


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10 * 1024, "10.0 KiB"),
     (1024**2 - 1, "1.00 MiB"), (123 * GIB, "123 GiB"), (5 << 50, "5.00 PiB"),
     (5 << 60, "5120 PiB")],
)  # fmt: skip
def test_sizes(count: int, text: str) -> None:
    assert render.size(count) == text


def test_eight_names_and_dots_for_the_others() -> None:
    assert (some([]), some(range(3)), some("abcdefgh")) == ("", "0, 1, 2", "a, b, c, d, e, f, g, h")
    assert some(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7, ..."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"),
     (7620, "2 h 7 min"), (90000, "1 d 1 h"), (-5, "-5.0 s")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


def test_ages_of_a_clock_that_was_set_back_are_zero() -> None:
    assert render.age(-3600) == "0.0 s ago"
    assert render.age(None) == "-"


def test_tables_align_numbers_to_the_right_and_end_without_blanks() -> None:
    made = render.table(("job", "step", "flags"), [("a", 5, ""), ("long", 120, "global")])
    assert made.splitlines() == [
        "job   step  flags",
        "a        5  -",
        "long   120  global",
    ]


def test_a_table_without_rows_is_its_headings() -> None:
    assert render.table(("a", "b"), []) == "a  b"


CHECKPOINT = {
    "uid": 1, "job": "gpt", "rank": 0, "sequence": 3, "step": 30, "incarnation": 2,
    "payload_bytes": 2 * GIB, "wall_ns": 1_000_000_000, "global": True, "pinned": False,
    "damaged": True,
}  # fmt: skip


def test_list_is_newest_first_within_a_rank() -> None:
    older = CHECKPOINT | {"sequence": 2, "step": 40, "global": False, "damaged": False}
    text = listing.as_text({"checkpoints": [older, CHECKPOINT]}, now_s=61)
    heading, first, second = text.splitlines()
    assert heading.split() == ["job", "rank", "sequence", "step", "age", "size", "run", "flags"]
    assert first.split()[:4] == ["gpt", "0", "3", "30"]
    assert first.endswith("global, damaged")
    assert "1 min 0 s ago" in first
    assert "2.00 GiB" in first
    assert second.split()[:4] == ["gpt", "0", "2", "40"]


def test_list_names_uids_when_there_are_several() -> None:
    text = listing.as_text({"checkpoints": [CHECKPOINT, CHECKPOINT | {"uid": 2}]}, now_s=1)
    assert "1/gpt" in text
    assert "2/gpt" in text


def test_list_marks_what_is_left_of_a_finished_job() -> None:
    volumes = [{"path": "/x/1", "done": True}, {"path": "/x/2", "done": False}]
    both = [CHECKPOINT | {"volume": "/x/1"}, CHECKPOINT | {"volume": "/x/2", "job": "other"}]
    _, first, second = listing.as_text(
        {"volumes": volumes, "checkpoints": both}, now_s=1
    ).splitlines()
    assert first.endswith("damaged, finished") and second.endswith("damaged")


def test_list_of_nothing() -> None:
    assert listing.as_text({"checkpoints": []}) == "no checkpoints"


def test_list_keeps_one_rank() -> None:
    other = CHECKPOINT | {"rank": 1}
    document = {"volumes": [], "checkpoints": [CHECKPOINT, other]}
    assert listing.filtered(document, 1)["checkpoints"] == [other]
    assert listing.filtered(document, None)["checkpoints"] == [CHECKPOINT, other]


STATUS: dict[str, object] = {
    "schema": 1,
    "daemon": {"state": "ok", "version": "0.1.0", "pid": 42, "uptime_s": 3700.0, "slots": 4,
               "in_flight": 2, "keep": 2, "writers": 2, "chunk_bytes": 16 << 20},
    "pool": {"budget_bytes": 4 * GIB, "used_bytes": GIB},
    "storage": {"path": "/mnt/ssd", "total_bytes": 100 * GIB, "free_bytes": 50 * GIB},
    "sessions": [],
    "ranks": [
        {"uid": 1, "job": "gpt", "rank": 0, "pid": 77, "incarnation": 1, "in_flight": 1,
         "newest": {"step": 30, "sequence": 3, "wall_ns": 0},
         "counters": {"durable": 3, "superseded": 0, "skipped": 1, "failed": 0},
         "checkpoints": [
             {"state": "durable", "step": 30, "payload_bytes": GIB, "requested_s": 9.0},
             {"state": "writing", "step": 40, "payload_bytes": GIB, "requested_s": 0.5},
         ]},
    ],
    "warnings": [],
}  # fmt: skip


def test_status_shows_daemon_ranks_and_what_is_in_flight() -> None:
    text = status.as_text(STATUS, now_s=5)
    assert "pid 42, up 1 h 1 min" in text
    assert "1.00 GiB used of 4.00 GiB" in text
    assert "writing" in text
    assert text.count("5.0 s ago") == 1  # the durable one is only in the table of ranks
    assert "warning" not in text
    assert not status.degraded(STATUS)


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("", "engine   pwrite\n"),
        ("pmem: not possible here", "engine   pwrite (pmem: not possible here)\n"),
    ],
)
def test_status_shows_the_engine_and_why(reason: str, line: str) -> None:
    daemon = {**STATUS["daemon"], "engine": "pwrite", "engine_reason": reason}
    assert line in status.as_text(STATUS | {"daemon": daemon}, now_s=5)


def test_status_shows_gpus_and_how_tensors_come() -> None:
    assert "gpu " not in status.as_text(STATUS, now_s=5)
    pulled = {"role": "trainer", "job": "gpt", "rank": 0, "transfer": "pull",
              "transfer_reason": "CUDA IPC, driver 12.8", "exposed_bytes": 80 * GIB}  # fmt: skip
    document = STATUS | {
        "pool": {"budget_bytes": 4 * GIB, "used_bytes": GIB, "pinned_bytes": GIB},
        "gpus": [
            {"name": "NVIDIA H200", "lost": False, "copied_bytes": 3 * GIB,
             "failures": 0},
            {"name": "NVIDIA H200", "lost": True, "copied_bytes": 0,
             "failures": 1},
        ],
        "sessions": [
            pulled,
            pulled | {"rank": 1, "transfer": "push", "transfer_reason": "MIG", "exposed_bytes": 0},
            pulled | {"rank": 2, "transfer": "push", "transfer_reason": "CPU tensors"},
            pulled | {"rank": 3, "role": "reader", "transfer": "push"},
        ],
    }  # fmt: skip
    text = status.as_text(document, now_s=5)
    assert "1.00 GiB used of 4.00 GiB, 1.00 GiB pinned for GPUs" in text
    assert "NVIDIA H200: 3.00 GiB pulled\n" in text
    assert "NVIDIA H200: 0 B pulled, 1 failure, LOST" in text
    (table,) = [block for block in text.split("\n\n") if "GPU tensors" in block]
    heading, first, second = table.splitlines()
    assert heading.split() == ["job", "rank", "GPU", "tensors", "shared", "why"]
    assert first.split(maxsplit=5) == ["gpt", "0", "pull", "80.0", "GiB", "CUDA IPC, driver 12.8"]
    assert second.split()[-1] == "MIG"


def test_status_with_a_warning_is_degraded() -> None:
    daemon = {"state": "degraded", "version": "0.1.0", "pid": 42, "uptime_s": 1.0}
    document = STATUS | {"daemon": daemon, "warnings": ["the disk is wedged"]}
    assert status.degraded(document)
    assert "warning: the disk is wedged" in status.as_text(document, now_s=5)


def test_status_without_a_daemon_says_so() -> None:
    document = STATUS | {"daemon": None, "pool": {}, "ranks": []}
    assert "read from its volumes" in status.as_text(document)
    assert "no jobs" in status.as_text(document)


def test_a_document_of_another_shape_does_not_break_the_text() -> None:
    assert status.as_text({"ranks": [{"newest": None, "counters": 7}], "warnings": 3}, now_s=0)


def rank_of(job: str, wall_s: float, *, connected: bool = False) -> Document:
    newest = {"step": 1, "wall_ns": wall_s * 1e9}
    return {"job": job, "rank": 0, "uid": 7, "connected": connected, "newest": newest}


def test_commands_in_a_text_ask_the_same_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Namespace(json=False, socket="/x", storage=None)
    answer(asked, {}, lambda: "12 more ranks: pccheckctl status --all")
    assert capsys.readouterr().out == "12 more ranks: pccheckctl --socket /x status --all\n"


def test_live_jobs_come_first_and_of_the_others_the_newest_few() -> None:
    ranks = [*(rank_of(f"ended-{at}", at) for at in range(20)), rank_of("live", 0, connected=True)]
    document: Document = {"daemon": {"state": "ok"}, "ranks": ranks}
    lines = status.as_text(document, now_s=30).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("job "))
    assert lines[first + 1].startswith("live")
    assert lines[first + 2].startswith("ended-19")
    assert "12 more ranks" in lines[-1] and "--all" in lines[-1]
    assert "ended-0" in status.as_text(document, now_s=30, every=True)
    assert "ended-0" in status.as_text({"ranks": ranks}, now_s=30)  # without a daemon all are


def test_neighbours_are_one_span() -> None:
    assert render.spans([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
    assert render.spans([]) == ""
