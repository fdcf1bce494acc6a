"""The cost of observability: persist with metrics, trace and log, and without.

    python -m bench.observability [--size 512MiB] [--pairs 400] [--directory DIR]

One daemon saves one state in one volume repeatedly. Of every two saves one is observed: the daemon
fills the ring for `pccheckctl trace`, counts for --metrics and writes a line of JSON, a scraper
asks for /metrics and /healthz every second (15 s are usual), and a trace is taken at the end. The
other save has none of this. SIGHUP switches between the two. The order within a pair is random,
because slots are at different places of the disk. The result is the median of the pairs' ratios,
with its 95 % confidence interval. Writes bench/results/observability-DATE.{json,md}.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path

from bench import common
from bench.common import GIB, MIB, BenchError, Spread
from bench.ours import Ours, Saved
from bench.rivals import State
from pccheck_store.observer import Observer

LIMIT = 0.01
SCRAPE_S = 1.0
SEED = 7
WAIT_S = 30.0
KEYS = ("persist_s", "durable_s", "cpu_daemon_s")


class Scraper(threading.Thread):
    """A Prometheus that scrapes every second, while an observed save runs."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._ended = threading.Event()
        self.seen = False
        self.count = 0

    def run(self) -> None:
        while not self._ended.wait(SCRAPE_S):
            if not self.seen:
                continue
            for page in ("metrics", "healthz"):
                with urllib.request.urlopen(f"{self._address}/{page}", timeout=WAIT_S) as answer:
                    answer.read()
            self.count += 1

    def stop(self) -> None:
        self._ended.set()
        self.join()


class Switch:
    """Switches observation on or off."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._put(seen=True)

    def _put(self, *, seen: bool) -> None:
        self.file.write_text(f'chronicle = "{"yes" if seen else "no"}"\n')

    def set(self, ours: Ours, *, seen: bool) -> None:
        before = self._reloads(ours)
        self._put(seen=seen)
        ours.daemon.kill(signal.SIGHUP)
        deadline = time.monotonic() + WAIT_S
        while self._reloads(ours) == before:
            if time.monotonic() > deadline:
                raise BenchError("the daemon does not reload")
            time.sleep(0.005)

    @staticmethod
    def _reloads(ours: Ours) -> int:
        return ours.daemon.log.read_text().count('"reload: ')


def measure(
    size_bytes: int, pairs: int, directory: Path
) -> tuple[int, dict[str, list[Saved]], int]:
    """Payload bytes, the saves of both kinds, and how often was scraped."""
    model, optimizer = common.make_training_state(size_bytes)
    payload = common.total_bytes(common.tensors_of(model, optimizer).values())
    runs: dict[str, list[Saved]] = {"seen": [], "unseen": []}
    drawn = random.Random(SEED)
    switch = Switch(directory / "bench.toml")
    flags = ("--config", str(switch.file), "--metrics", "127.0.0.1:0", "--log-format", "json")
    with Ours(State(model, optimizer), directory / "storage", payload, *flags) as ours:
        found = re.search(r"metrics at (http://[^/\s]+)/", ours.daemon.log.read_text())
        if found is None:
            raise BenchError("the daemon does not say where its metrics are")
        for _ in range(8):  # every slot is written before anything counts
            ours.save()
        common.settle()
        scraper = Scraper(found[1])
        scraper.start()
        for _ in range(pairs):
            for name in drawn.sample(("seen", "unseen"), 2):
                switch.set(ours, seen=name == "seen")
                scraper.seen = name == "seen"
                runs[name].append(ours.save())
                scraper.seen = False
                if name == "seen":
                    with Observer(str(ours.daemon.socket)) as observer:
                        observer.trace(60)
        scraper.stop()
        return payload, runs, scraper.count


def ratios(runs: dict[str, list[Saved]], key: str) -> tuple[float, float, float]:
    """Unseen over seen, pair by pair: median, and its 95 % interval by order statistics."""
    pairs = zip(runs["seen"], runs["unseen"], strict=True)
    found = sorted(getattr(off, key) / getattr(on, key) for on, off in pairs)
    half = 0.98 * len(found) ** 0.5  # 1.96 standard deviations of a binomial one
    low, high = (max(0, min(len(found) - 1, round(len(found) / 2 + s * half))) for s in (-1, 1))
    return statistics.median(found), found[low], found[high]


def table(payload: int, runs: dict[str, list[Saved]], scrapes: int) -> list[str]:
    lines = [
        f"## {payload / GIB:.2f} GiB, {len(runs['seen'])} pairs, {scrapes} scrapes", "",
        "| | persist, s | request to durable, s | CPU of the daemon, s |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, saved in runs.items():
        cells = (Spread.of([getattr(one, key) for one in saved]).text() for key in KEYS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    middle, low, high = ratios(runs, "persist_s")
    whole = ratios(runs, "durable_s")
    lines += [
        "",
        f"- persist throughput, seen / unseen: **{middle:.4f}** [{low:.4f}-{high:.4f}]: it costs "
        f"{1 - middle:.2%}, the limit is {LIMIT:.0%}",
        f"- request to durable, the same way: {whole[0]:.4f} [{whole[1]:.4f}-{whole[2]:.4f}]",
        "",
    ]
    return lines


def main() -> int:
    parser = common.arguments(__doc__)
    parser.add_argument("--size", type=common.parse_sizes, default=[512 * MIB])
    parser.add_argument("--pairs", type=int, default=400)
    options = parser.parse_args()
    facts = common.facts_of(options.directory)
    lines = common.heading("Metrics, trace and log: what they cost", facts)
    document: dict[str, object] = dict(facts)
    for size_bytes in options.size:
        common.require_room(options.directory, size_bytes * 5)
        with common.scratch(options.directory) as scratch:
            payload, runs, scrapes = measure(size_bytes, options.pairs, scratch)
        lines += table(payload, runs, scrapes)
        document[f"{size_bytes // MIB} MiB"] = {
            name: [{key: getattr(one, key) for key in KEYS} for one in saved]
            for name, saved in runs.items()
        }
    common.write_results("observability", document, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
