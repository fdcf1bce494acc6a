"""Prometheus metrics: what is counted as it happens, and what is read when somebody asks.

The only module that imports prometheus_client, an extra; import it when metrics are wanted."""

from __future__ import annotations

import threading
from collections import Counter as Count
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from pccheckd.tenancy.checkpoint import Checkpoint
from pccheckd.tenancy.phases import Phases
from pccheckd.tenancy.volumes import Key

from .gauges import Family

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: Ranks with series of their own; users choose the names of jobs, so there has to be a limit.
SERIES_MAX = 256
#: Not "job": that label is Prometheus' own, of every target, and ours would be renamed.
RANK = ("uid", "job_name", "rank")
JOB = ("uid", "job_name")
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300,
)  # fmt: skip

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each one, that hardly anybody reads


class Metrics:
    """Told on the loop, rendered in another thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self._families: tuple[Family, ...] = ()
        self._rendering = threading.Lock()
        self._known: OrderedDict[Key, None] = OrderedDict()
        self._requests = self._counter("requests", "Checkpoints that trainers asked for", RANK)
        self._checkpoints = self._counter(
            "checkpoints", "Checkpoints that ended, by result", (*RANK, "result")
        )
        self._failures = self._counter(
            "failures", "Failed checkpoints by stage and error", (*RANK, "stage", "error")
        )
        self._bytes = self._counter("durable_bytes", "Payload that became durable", RANK)
        self._rehomed = self._counter(
            "rehomed", "Moves of checkpoints to another slot after a write error", RANK
        )
        self._stall = self._counter(
            "stall_seconds", "Time for which the gate held trainers, as they say", RANK
        )
        self._histograms = {
            "waited": self._histogram("admission_wait", "From request to a free lane and slot"),
            "copied": self._histogram("copy", "From there to a complete copy in the pool"),
            "written": self._histogram("write", "From the first write to the end of the last"),
            "flushed": self._histogram("flush", "Flush of the data"),
            "published": self._histogram("publish", "Write and flush of the commit record"),
            "durable": self._histogram("persist", "From request to durable"),
        }

    # -- told on the loop ----------------------------------------------------------------------

    def requested(self, key: Key, item: Checkpoint) -> None:
        self._admit(key)
        self._requests.labels(*_rank(key)).inc()
        if item.held_ns:
            self._stall.labels(*_rank(key)).inc(item.held_ns / 1e9)

    def ended(self, key: Key, item: Checkpoint, took: Phases) -> None:
        self._admit(key)
        rank, result = _rank(key), item.state.name.lower()
        self._checkpoints.labels(*rank, result).inc()
        if result == "failed":
            self._failures.labels(*rank, item.stage or "admission", item.error or "OTHER").inc()
        if item.rehomed:
            self._rehomed.labels(*rank).inc(item.rehomed)
        if result == "durable":
            self._bytes.labels(*rank).inc(item.payload_bytes)
            for name, seconds in took._asdict().items():
                if seconds is not None:
                    self._histograms[name].labels(*_job(key)).observe(seconds)

    # -- rendered in another thread ------------------------------------------------------------

    def render(self, families: Iterable[Family]) -> bytes:
        """The text that Prometheus reads; `families` is what was read on the loop just now."""
        with self._rendering:
            self._families = tuple(families)
            return bytes(generate_latest(self.registry))

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for it."""
        for family in self._families:
            kind = CounterMetricFamily if family.counts else GaugeMetricFamily
            made = kind(f"pccheck_{family.name}", family.text, labels=family.labels)
            for labels, value in family.samples:
                made.add_metric(list(labels), value)
            yield made

    def describe(self) -> Iterator[Metric]:
        """Nothing: what is there is only known when it is asked for."""
        return iter(())

    # -- small ---------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"pccheck_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"pccheck_{name}_seconds", f"{text}; of durable checkpoints", JOB,
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip

    def _admit(self, key: Key) -> None:
        """Makes room for a rank: the one longest quiet goes, of the user who has most."""
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) <= SERIES_MAX:
            return
        most = Count(known.uid for known in self._known).most_common(1)[0][0]
        gone = next(known for known in self._known if known.uid == most)
        del self._known[gone]
        named = dict(zip(RANK, _rank(gone), strict=True))
        for metric in (self._requests, self._checkpoints, self._failures, self._bytes,
                       self._rehomed, self._stall):  # fmt: skip
            metric.remove_by_labels(named)
        if all(_job(known) != _job(gone) for known in self._known):
            for histogram in self._histograms.values():
                histogram.remove_by_labels(dict(zip(JOB, _job(gone), strict=True)))


def _rank(key: Key) -> tuple[str, str, str]:
    return str(key.uid), key.job, str(key.rank)


def _job(key: Key) -> tuple[str, str]:
    return str(key.uid), key.job
