"""What Prometheus reads: series that stay bounded, and names that dashboard and alerts rely on."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pccheck_wire.ends import Why
from pccheck_wire.messages import CheckpointState as State
from pccheckd.observe import metrics as module
from pccheckd.observe.gauges import Family
from pccheckd.observe.metrics import Metrics
from pccheckd.tenancy.checkpoint import RankCheckpoint
from pccheckd.tenancy.volumes import Key
from tests.support.jobs import saving

KEY = Key(7, "gpt", 3)
RANK = {"uid": "7", "job_name": "gpt", "rank": "3"}
DEPLOY = Path(__file__).parents[4] / "deploy"


def checkpoint(state: State = State.DURABLE, **changes: object) -> RankCheckpoint:
    made = saving(100, snapshot=4, payload_bytes=4096, run=2, requested_ns=1_000_000_000)
    made.state = state
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def read(metrics: Metrics, *families: Family) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> values of its labels, sorted by label -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.render(families).decode()):
        for sample in family.samples:
            key = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def test_an_end_is_counted_by_its_result() -> None:
    metrics = Metrics()
    for state in (State.DURABLE, State.DURABLE, State.SKIPPED, State.SUPERSEDED):
        item = checkpoint(state, held_ns=500_000_000)
        metrics.requested(item.record())
        metrics.ended(item.record())
    failed = checkpoint(State.FAILED, why=Why(stage="write", code="EIO"), rehomed=2)
    metrics.ended(failed.record())
    found = read(metrics)
    rank = ("gpt", "3")
    assert found["pccheck_requests_total"][(*rank, "7")] == 4
    assert found["pccheck_stall_seconds_total"][(*rank, "7")] == 2.0
    assert {key[2]: n for key, n in found["pccheck_checkpoints_total"].items()} == {
        "durable": 2, "skipped": 1, "superseded": 1, "failed": 1,
    }  # fmt: skip
    assert found["pccheck_failures_total"] == {("EIO", "gpt", "3", "write", "7"): 1}
    assert found["pccheck_rehomed_total"][(*rank, "7")] == 2
    assert found["pccheck_durable_bytes_total"][(*rank, "7")] == 8192


def test_checkpoints_that_were_never_requested_are_counted() -> None:
    metrics = Metrics()
    metrics.unrequested(KEY, 4, "STORAGE_FULL")
    found = read(metrics)
    assert found["pccheck_requests_total"] == {("gpt", "3", "7"): 4}
    assert found["pccheck_checkpoints_total"] == {("gpt", "3", "failed", "7"): 4}
    assert found["pccheck_failures_total"] == {("STORAGE_FULL", "gpt", "3", "admission", "7"): 4}


def test_parts_of_durable_ones_are_observed() -> None:
    metrics = Metrics()
    times_ns = {  # requested at 1 s; the commit record's beginning is not known
        "begin": 1_125_000_000, "sealed": 1_375_000_000, "first_write": 1_250_000_000,
        "written": 1_750_000_000, "flushed": 0, "durable": 2_000_000_000,
    }  # fmt: skip
    metrics.ended(checkpoint(times_ns=times_ns).record())
    metrics.ended(checkpoint(State.FAILED, times_ns=times_ns).record())
    found = read(metrics)
    for name, sum_s in (
        ("admission_wait", 0.125),
        ("copy", 0.25),
        ("write", 0.5),
        ("persist", 1.0),
    ):
        assert found[f"pccheck_{name}_seconds_sum"][("gpt", "7")] == sum_s
        assert found[f"pccheck_{name}_seconds_count"][("gpt", "7")] == 1
    assert not {"pccheck_flush_seconds_count", "pccheck_publish_seconds_count"} & found.keys()


def test_a_user_with_many_jobs_pushes_out_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERIES_MAX", 10)
    metrics = Metrics()
    item = checkpoint(times_ns={"durable": 2_000_000_000}, copied_bytes=4096, written_bytes=4096)
    metrics.ended(item.record())
    for number in range(100):
        item.id = item.id._replace(uid=8, job=f"job-{number}", rank=0)
        metrics.requested(item.record())
        metrics.ended(item.record())
    found = read(metrics)
    jobs = {key[0] for key in found["pccheck_checkpoints_total"]}
    assert jobs == {"gpt"} | {f"job-{number}" for number in range(91, 100)}
    for name in ("persist_seconds_count", "copied_bytes_total", "written_bytes_total"):
        assert {key[0] for key in found[f"pccheck_{name}"]} == jobs
    assert len(found["pccheck_requests_total"]) == 9


def test_what_was_read_on_the_loop_is_rendered() -> None:
    gauge = Family("in_flight", "On their way", [(("7", "gpt", "3"), 2)], module.RANK)
    counter = Family("gpu_copies", "Copies", [(("GPU-1",), 5)], ("gpu",), True)
    empty = Family("slots", "Slots", [], (*module.RANK, "state"))
    found = read(Metrics(), gauge, counter, empty)
    assert found["pccheck_in_flight"] == {("gpt", "3", "7"): 2}
    assert found["pccheck_gpu_copies_total"] == {("GPU-1",): 5}
    assert "# TYPE pccheck_slots gauge" in Metrics().render([empty]).decode()


def test_it_may_be_told_while_it_renders() -> None:
    metrics, stop = Metrics(), threading.Event()
    texts: list[bytes] = []

    def scrape() -> None:
        while not stop.is_set():
            texts.append(metrics.render([]))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for number in range(60):
            item = checkpoint()
            item.id = item.id._replace(job=f"job-{number}", rank=0)
            metrics.requested(item.record())
            metrics.ended(item.record())
    finally:
        stop.set()
        thread.join()
    assert texts and all(list(text_string_to_metric_families(t.decode())) for t in texts[-3:])


# -- what is deployed --------------------------------------------------------------------------

_WORD = re.compile(r"\b(?:pccheck|process)_[a-z_]+\b")


def _expressions() -> list[str]:
    rules = (DEPLOY / "prometheus" / "pccheck.rules.yml").read_text()
    panels = json.loads((DEPLOY / "grafana" / "pccheck.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [*re.sub(r"(?m)^\s*#.*$", "", rules).splitlines(), *found]


def names_in_use() -> set[str]:
    """Of metrics, in the dashboard and in the alerts."""
    return {name for line in _expressions() for name in _WORD.findall(line)}


def labels_in_use() -> set[str]:
    text = " ".join(_expressions())
    listed = re.findall(r"\b(?:by|on) \(([a-z_, ]+)\)", text)
    matched = re.findall(r"[{,]\s*([a-z_]+)\s*=~?", text)
    return {name.strip() for part in listed for name in part.split(",")} | set(matched)


def test_the_dashboard_is_one() -> None:
    document = json.loads((DEPLOY / "grafana" / "pccheck.json").read_text())
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(set(numbers)) == len(numbers) > 20
    places = [panel["gridPos"] for panel in document["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert {"datasource", "instance", "job_name"} == {
        variable["name"] for variable in document["templating"]["list"]
    }


def test_the_alerts_name_what_the_issue_of_the_night_is() -> None:
    rules = (DEPLOY / "prometheus" / "pccheck.rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(set(alerts)) == len(alerts) >= 8
    assert rules.count("severity:") == rules.count("summary:") == len(alerts)
