"""Searches what may happen to jobs on several nodes, around the real rules: `make nodes-search`.

    python -m tests.integration.nodes_search_campaign [--walks N] [--seed S] [--limit STATES]

Prints a row per job: states, depth, whether the search reached the last of them, and the
broken invariant, if there is one, with the shortest way to it. Then seeded walks through jobs that
are too large for a search. Exit code 1 if an invariant is broken, or a broken rule is not seen.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.support.nodesmodel import Config, Model, Outcome, Rules
from tests.support.nodesmutants import A2, A3, MUTANTS, N, begun, one_has, saved

TURNED = (1, 0)
CONFIGS = [
    Config("late messages, a copy fails", 2, (A2,), slots=2, steps=4, fails=1, cuts=1, daemons=1,
           lates=1),
    Config("the store is lost, copies fail", 2, (A2,), slots=2, steps=4, fails=2, stores=1, cuts=2),
    Config("a slot more, late, the store is lost", 2, (A2,), steps=4, fails=1, stores=1, lates=1,
           cuts=1),
    Config("a slot more, offered later", 2, (A2,), steps=4, fails=1, daemons=1, lates=1,
           marks_late=True),
    Config("two kept", 2, (A2,), slots=3, keep=2, steps=4, fails=1, daemons=1, lates=1),
    Config("two kept, a slot more", 2, (A2,), slots=4, keep=2, steps=4, fails=1, stores=1,
           daemons=1),
    Config("three, a copy fails", 3, (A3,), slots=2, steps=3, fails=1),
    Config("three, a slot more, late", 3, (A3,), steps=3, lates=1),
    Config("a round, the store is lost", 2, (A2,), steps=3, rounds=1, stores=1, fails=1),
    Config("a round, a new daemon, late", 2, (A2,), slots=2, steps=2, rounds=1, daemons=1, lates=1),
    Config("a round of three after a global", 3, (A3,), steps=3, rounds=1, begin=saved(A3, "A1")),
    Config("a round, then a start", 2, (A2, TURNED), steps=2, rounds=1, begin=saved(A2, "A1")),
    Config("a round, replicated, each its own disk", 2, (A2, A2), True, steps=2, rounds=1,
           travel=False),
    Config("a start, turned, the store is lost", 2, (A2, TURNED), slots=2, steps=2, stores=1),
    Config("a start, a new daemon, a cut", 2, (A2, A2), slots=2, steps=2, daemons=1, cuts=1),
    Config("a start, a slot more, a copy fails", 2, (A2, A2), steps=3, fails=1),
    Config("two starts at once", 2, (A2, A2, TURNED), slots=2, steps=2),
    Config("three, a start of two, a source", 3, ((0, 1, N), (N, 1, 0)), slots=2, steps=2, stores=1,
           sources=True),
    Config("replicated, a start of two of three", 3, (A3, (0, 1, N)), True, slots=2, steps=2,
           cuts=1),
    Config("replicated, each its own disk", 2, (A2, A2), True, steps=3, fails=1, travel=False),
    Config("sharded, each its own disk", 2, (A2, A2), steps=3, fails=1, daemons=1, travel=False),
    Config("replicated of three, each its own disk", 3, (A3, A3), True, slots=2, steps=2,
           travel=False),
    Config("replicated, two starts of two at once", 3, (A3, (0, 1, N), (N, 0, 1)), True, slots=2,
           steps=1),
    Config("replicated, one alone, then the other", 2, (A2, (0, N), (N, 0)), True, slots=2,
           steps=2),
    Config("replicated, alone by its user's word", 2, (A2, (0, N), (N, 0)), True, slots=2, steps=2,
           explicit=True),
    Config("sharded, 2 -> 1 by its user's word", 2, (A2, (0, N)), slots=2, steps=2, explicit=True),
    Config("the second start, a copy fails, the store is lost", 2, (A2, TURNED), slots=2, steps=3,
           fails=1, stores=1, begin=(*saved(A2, "A1"), *begun(A2, "B"))),
    Config("a global, then two starts", 2, (A2, A2, TURNED), slots=2, steps=2,
           begin=saved(A2, "A1")),
    Config("2 -> 3", 3, ((0, 1, N), A3), slots=2, steps=2,
           begin=(*saved(A2, "A1"), *begun(A3, "B"))),
    Config("three, the second start, zombies between", 3, (A3, (1, 2, 0)), slots=2, steps=2,
           begin=saved(A3, "A1")),
    Config("replicated, two starts at once after a global", 3, (A3, (0, 1, N), (N, 0, 1)), True,
           slots=2, steps=2, begin=saved(A3, "A1")),
    Config("replicated 3 -> 2, the store is lost, a source", 3, (A3, (0, 1, N)), True, slots=2,
           steps=2, stores=1, sources=True, begin=saved(A3, "A1")),
    Config("replicated, a start of two with a source", 3, (A3, (0, 1, N), (N, 0, 1)), True,
           steps=2, sources=True, begin=(*one_has(0, "A1"), *begun((0, 1), "B"))),
    Config("an empty disk", 2, (A2, A2), slots=2, steps=2, wipes=1),
    Config("an old image, two kept", 2, (A2,), slots=3, keep=2, steps=3, rolls=1),
    Config("replicated, an old image", 3, (A3,), True, slots=2, steps=2, rolls=1),
]  # fmt: skip
WALKS = [
    Config("three, all faults, two starts", 3, (A3, (1, 2, 0), (2, 0, 1)), steps=4, fails=2, cuts=3,
           stores=2, daemons=2, lates=2),
    Config("three, N + keep slots, two starts", 3, (A3, (2, 1, 0), A3), slots=2, steps=5, fails=2,
           cuts=2, stores=1, daemons=1, lates=2),
    Config("three, two kept", 3, (A3, A3), slots=4, keep=2, steps=6, fails=2, cuts=2, stores=1,
           daemons=1, lates=1),
    Config("three, rounds and starts", 3, (A3, (1, 2, 0)), steps=4, rounds=1, fails=2, cuts=2,
           stores=1, daemons=1, lates=1, marks_late=True),
    Config("2 -> 3 -> 2, sources", 3, ((0, 1, N), A3, (N, 1, 0)), steps=4, fails=1, cuts=2,
           stores=1, daemons=1, lates=1, sources=True),
    Config("replicated, starts of two", 3, (A3, (0, 1, N), (N, 0, 1)), True, steps=4, fails=1,
           cuts=3, stores=1, daemons=1, lates=1, sources=True),
    Config("replicated, rounds, each its own disk", 3, (A3, A3), True, steps=4, rounds=1, fails=1,
           cuts=2, stores=1, daemons=1, lates=1, travel=False),
    Config("replicated, alone by its user's word", 2, (A2, (0, N), A2), True, steps=4, fails=1,
           cuts=2, daemons=1, explicit=True),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--walks", type=int, default=2000, help="seeded walks through each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, help="states of each search (default: 160,000)")
    parser.add_argument(
        "--only", default="", help="jobs and broken rules with these words in their name"
    )
    options = parser.parse_args()
    total, bad, began = 0, 0, time.monotonic()
    jobs = [config for config in CONFIGS if options.only in config.name]
    for config in jobs:
        found = Model(config, Rules()).search(options.limit)
        total, bad = total + found.states, bad + _row(config.name, found)
    print(f"{total} states in {len(jobs)} jobs, {time.monotonic() - began:.0f} s", flush=True)
    walked = 0
    larger = [config for config in WALKS if options.only in config.name]
    seeds = range(options.seed * 1_000_000, options.seed * 1_000_000 + options.walks)
    for config in larger:
        found, far = Model(config, Rules()).walks(seeds)
        walked, bad = walked + found.states, bad + _row(config.name, found)
        print(f"    {far} of {options.walks} walks reach a second complete start", flush=True)
    print(f"{walked} more states on {options.walks * len(larger)} walks, seed {options.seed}")
    mutants = [one for one in MUTANTS if options.only in one.rules.__name__]
    for mutant in mutants:
        rules = mutant.rules()
        rules.only = mutant.broken
        found = Model(mutant.config, rules).search()
        if not found.violation:
            print(f"NOT SEEN: {mutant.rules.__name__}, in {found.states} states")
            bad += 1
    print(f"{len(mutants)} broken rules; {bad} mistakes; {time.monotonic() - began:.0f} s in all")
    return bool(bad)


def _row(name: str, found: Outcome) -> bool:
    """Prints it; whether an invariant is broken."""
    end = "all" if found.closed else "cut"
    said = found.violation or "holds"
    print(f"{name:50} {found.states:8} states, depth {found.depth:2}, {end}  {said}", flush=True)
    for label in found.trace:
        print("       ", label)
    return bool(found.violation)


if __name__ == "__main__":
    sys.exit(main())
