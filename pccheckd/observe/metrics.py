"""Prometheus metrics: events that are counted, and values that are read at each scrape.

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

from pccheck_native.identity import CheckpointId
from pccheckd.tenancy.checkpoint import Record
from pccheckd.tenancy.volumes import Key

from .gauges import RANK, Family

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: Ranks with series of their own; users choose the names of jobs, so there has to be a limit.
SERIES_MAX = 256
JOB = RANK[:2]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: By the name behind "pccheck_": the text, and labels besides those of a rank.
COUNTERS = {
    "requests": ("Checkpoints that trainers requested",),
    "checkpoints": ("Checkpoints that ended, by result", "result"),
    "failures": ("Failed checkpoints by stage and error", "stage", "error"),
    "durable_bytes": ("Payload that became durable",),
    "copied_bytes": ("Copied into DRAM for checkpoints; less if tensors are unchanged",),
    "written_bytes": ("Written to volumes for checkpoints; unchanged tensors once",),
    "rehomed": ("Moves of checkpoints to another slot after a write error",),
    "stall_seconds": ("Time for which the gate held trainers, as they report",),
}

disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series each, rarely read

_Rank = tuple[str, str, str]  # the values of RANK


class Metrics:
    """Counts on the loop, rendered in another thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self._families: tuple[Family, ...] = ()
        self._rendering = threading.Lock()
        self._known: OrderedDict[_Rank, None] = OrderedDict()
        self._counters = {
            name: Counter(f"pccheck_{name}", text, (*RANK, *more), registry=self.registry)
            for name, (text, *more) in COUNTERS.items()
        }
        self._histograms = {
            "waited": self._histogram("admission_wait", "From request to a free lane and slot"),
            "copied": self._histogram("copy", "From there to a complete copy in the pool"),
            "written": self._histogram("write", "From the first write to the end of the last"),
            "flushed": self._histogram("flush", "Flush of the data"),
            "published": self._histogram("publish", "Write and flush of the commit record"),
            "durable": self._histogram("persist", "From request to durable"),
        }

    # -- counted on the loop -------------------------------------------------------------------

    def requested(self, item: Record) -> None:
        rank = self._admit(item.id)
        self._count("requests", rank, 1)
        self._count("stall_seconds", rank, item.held / 1e9)

    def ended(self, item: Record) -> None:
        rank = self._admit(item.id)
        self._count("checkpoints", (*rank, item.state), 1)
        if item.state == "failed":
            self._count("failures", (*rank, item.stage or "admission", item.error or "OTHER"), 1)
        self._count("copied_bytes", rank, item.copied_bytes)
        self._count("written_bytes", rank, item.written_bytes)
        self._count("rehomed", rank, item.rehomed)
        if item.state == "durable":
            self._count("durable_bytes", rank, item.payload_bytes)
            for name, seconds in item.seconds().items():
                self._histograms[name].labels(*rank[:2]).observe(seconds)

    def unrequested(self, key: Key, count: int, error: str) -> None:
        rank = self._admit(key)
        self._count("requests", rank, count)
        self._count("checkpoints", (*rank, "failed"), count)
        self._count("failures", (*rank, "admission", error), count)

    # -- rendered in another thread ------------------------------------------------------------

    def render(self, families: Iterable[Family]) -> bytes:
        """The text that Prometheus reads; `families` was read on the loop just now."""
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
        """Nothing: the families are known only when they are collected."""
        return iter(())

    def _count(self, name: str, labels: tuple[str, ...], more: float) -> None:
        if more:  # a series appears with its first event
            self._counters[name].labels(*labels).inc(more)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"pccheck_{name}_seconds", f"{text}; of durable checkpoints", JOB,
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip

    def _admit(self, item: CheckpointId | Key) -> _Rank:
        """The labels of a rank, which gets series. Beyond SERIES_MAX, the least recently active
        rank of the user with the most series loses its own."""
        rank = str(item.uid), item.job, str(item.rank)
        self._known[rank] = None
        self._known.move_to_end(rank)
        if len(self._known) > SERIES_MAX:
            most = Count(uid for uid, _, _ in self._known).most_common(1)[0][0]
            gone = next(known for known in self._known if known[0] == most)
            del self._known[gone]
            for counter in self._counters.values():
                counter.remove_by_labels(dict(zip(RANK, gone, strict=True)))
            if all(known[:2] != gone[:2] for known in self._known):
                for histogram in self._histograms.values():
                    histogram.remove_by_labels(dict(zip(JOB, gone[:2], strict=True)))
        return rank
