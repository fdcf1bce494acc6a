"""What must hold on a card: for each sentence one figure, of one part of bench/gpu/check.py.

The dry run, whose figures are of no card, shows that each part leaves the figures that are looked
for.
Needs Python's own library only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
HOLDS, MISSED, TOO_FEW, NO_FIGURE, NOT_MEASURED, DRY = (
    "holds", "missed", "too few runs", "no figure", "not measured", "dry run",
)  # fmt: skip
NONE = "none"  # the contender of bench.gpu.train that saves nothing
SHARED = ("expandable segments", "another user", "another PID namespace")


@dataclass(frozen=True, slots=True)
class Target:
    sentence: str
    part: str
    values: Callable[[Document], Sequence[float]]
    least: float = 0.0
    most: float = float("inf")
    runs: int = 1
    says: Callable[[Document], str] = lambda _: ""  # words beside the figure

    def judge(self, document: Document) -> tuple[str, str]:
        """The verdict, and what was found: median, minimum, maximum and number of runs."""
        try:
            part = document["parts"][self.part]
            values, says = self.values(part), self.says(part)
            median = statistics.median(values)
        except (KeyError, IndexError, statistics.StatisticsError):
            ended = document["ended"].get(self.part, {}).get("how")
            return NO_FIGURE if ended == "ok" else NOT_MEASURED, ""
        text = f"{median:.3f} [{min(values):.3f}-{max(values):.3f}] n={len(values)} {says}".strip()
        if document["dry"]:
            return DRY, text
        if len(values) < self.runs:
            return TOO_FEW, text
        return HOLDS if self.least <= median <= self.most else MISSED, text


def ratios(rows: Iterable[Document]) -> dict[int, dict[str, list[float]]]:
    """Slowdowns by interval and contender, against the run without checkpoints of the round."""
    alone = {(r["every"], r["round"]): r["seconds"] for r in rows if r["contender"] == NONE}
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        place = (row["every"], row["round"])
        if row["contender"] != NONE and place in alone:
            by_name = found.setdefault(row["every"], {})
            by_name.setdefault(row["contender"], []).append(row["seconds"] / alone[place])
    return found


# -- figures of parts ------------------------------------------------------------------------------


def _way(part: Document, name: str) -> Document:
    return next((row for row in part["rows"] if row["way"] == name), {})


def _pulled(name: str) -> Target:
    return Target(
        f"{name}: `status` says pull", "ways",
        lambda part: [float(_way(part, name)["transfer"] == "pull")], least=1,
        says=lambda part: f"{_way(part, name)['transfer']} {_way(part, name)['reason']}",
    )  # fmt: skip


def _copied(name: str) -> Target:
    sentence = f"{name}: the copy has at least 0.95 of a pinned copy, from admission"
    return Target(sentence, "ways", lambda part: _way(part, name)["of_peak"], least=0.95, runs=3)


def _saves(name: str, key: str) -> Callable[[Document], list[float]]:
    return lambda part: [row[key] for row in part["saves"][name]]


def _restores(part: Document) -> list[Document]:
    found: list[Document] = part["loads"]["restore from memory"]
    return found


def _late(part: Document) -> list[float]:
    """Time to durable by pull against push, round by round."""
    both = (_saves(name, "durable_s")(part) for name in ("pull", "push"))
    return [pull / push for pull, push in zip(*both, strict=False)]


def _slowdown(sentence: str, part: str, name: str) -> Target:
    def values(found: Document) -> list[float]:
        (by_name,) = ratios(found["rows"]).values() or ({},)
        return by_name[name]

    return Target(f"{sentence}: at most 1.03", part, values, most=1.03, runs=3)


def _violations(part: Document) -> list[float]:
    violations = len(part["violations"])
    if violations + sum(part["outcomes"].values()) < part["rounds"]:
        raise KeyError("it had no time for all rounds")
    return [float(violations)]


TARGETS = (
    *map(_pulled, SHARED),
    *map(_copied, SHARED),
    Target("2,000 descriptors are mapped in at most 1 s", "ways",
           lambda part: [part["mapped"]["seconds"]], most=1,
           says=lambda part: f"({part['mapped']['pieces']} pieces)"),
    Target("20 deaths with to=\"device\": the last completed step, or the newest copied one",
           "deaths", _violations, most=0, says=lambda part: f"({part['rounds']} deaths)"),
    Target("push has at least 0.9 of a pinned copy", "bandwidth", _saves("push", "of_peak"),
           least=0.9, runs=3),
    Target("push has at least 0.85 of it in the first save after a connect", "bandwidth",
           _saves("push, first", "of_peak"), least=0.85, runs=3),
    Target("a restore from memory has at least 25 GB/s for 2 GB", "bandwidth",
           lambda part: [row["load_gb_s"] for row in _restores(part)], least=25, runs=2),
    Target("a restore from memory has at least 0.6 of a pinned copy for 8 GB", "restore 8 GB",
           lambda part: [row["load_gb_s"] / row["peak_gb_s"] for row in _restores(part)],
           least=0.6, runs=2),
    Target("durable by pull no later than by push, within 3 %", "bandwidth", _late,
           most=1.03, runs=3),
    *(
        _slowdown(f"f = 10, {state}, {name}", part, name)
        for part, state in (("gpt2", "GPT-2 medium"), ("8 GB", "8 GB"))
        for name in ("pull", "push", "expandable")
    ),
    _slowdown("f = 1 in memory", "every step", "memory:M=3"),
    _slowdown("f = 1 on the GPU (to=\"device\")", "every step", "last step:M=3"),
)  # fmt: skip


def judged(document: Document, parts: Iterable[str]) -> list[Document]:
    """The sentences of these parts."""
    found = []
    for target in TARGETS:
        if target.part in parts:
            verdict, text = target.judge(document)
            found.append({"sentence": target.sentence, "verdict": verdict, "found": text})
    return found
