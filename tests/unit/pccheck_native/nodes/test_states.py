"""The rules for several nodes, in every state that a small job can reach.

What must hold: tests/support/nodesmodel.py. `make nodes-search` searches larger jobs. Then the
rules are broken, one at a time, and the same search must find it.
"""

from __future__ import annotations

import re

import pytest

from tests.support import nodesmodel
from tests.support.nodesmodel import Config, Model, Rules
from tests.support.nodesmutants import A2, A3, MUTANTS, Mutant, N, begun, saved

#: Each is searched to the last state, of which there are so many, or to its limit.
CONFIGS = {
    Config("a copy fails", 2, (A2,), slots=2, steps=2, fails=1): 2052,
    Config("a slot more", 2, (A2,), steps=2): 714,
    Config("late messages", 2, (A2,), slots=2, steps=2, lates=1, limit=3000): 3000,
    Config("a new daemon", 2, (A2,), slots=2, steps=2, daemons=1): 2766,
    Config("offered later", 2, (A2,), steps=2, daemons=1, marks_late=True): 2708,
    Config("two kept, an old image", 2, (A2,), slots=4, keep=2, steps=2, rolls=1): 2196,
    Config("a round", 2, (A2,), steps=2, rounds=1, limit=3000): 3000,
    Config("a start, shuffled", 2, (A2, (1, 0)), slots=2, steps=1): 1508,
    Config("a start after a global", 2, (A2, A2), slots=2, steps=2, begin=saved(A2, "A1")): 4100,
    Config("each reads its own disk", 2, (A2, A2), True, slots=2, steps=1, travel=False): 1508,
    Config("one alone, then the other", 2, (A2, (0, N), (N, 0)), True, slots=2, steps=1): 548,
    Config("by its user's word", 2, (A2, (0, N), (N, 0)), True, slots=2, steps=1, explicit=True,
           limit=3000): 3000,
    Config("an empty disk", 2, (A2, A2), slots=2, steps=1, wipes=1): 4356,
    Config("three, a source", 3, (A3, (0, 1, N)), True, slots=2, steps=1, sources=True,
           begin=saved(A3, "A1")): 208,
    Config("two become three", 3, ((0, 1, N), A3), slots=2, steps=2,
           begin=(*saved(A2, "A1"), *begun(A3, "B"))): 755,
}  # fmt: skip


def test_the_example_of_the_model_is_what_it_does() -> None:
    """Each row of the table at the top of nodesmodel.py is a state, and its move leads there."""
    rows = re.findall(r"^    ((?:node \d|B) [a-z].*)$", nodesmodel.__doc__ or "", re.MULTILINE)
    model = Model(Config("", 2, (A2, A2)), Rules())
    state = model.first()
    for row in rows:
        move, *cells = re.split(r" {2,}", row)
        state = dict(model.moves(state))[move]
        assert model.row(state) == cells and not model.wrong(state, move)
    assert len(rows) == 17


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_state_is_safe(config: Config) -> None:
    found = Model(config, Rules()).search()
    assert not found.violation, "\n".join(["", *found.trace, found.violation])
    assert found.states >= CONFIGS[config]
    assert found.closed or found.states >= config.limit


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rules.__name__)
def test_a_broken_rule_is_seen(mutant: Mutant) -> None:
    assert not Model(mutant.config, Rules()).search(300).violation
    rules = mutant.rules()
    rules.only = mutant.broken
    found = Model(mutant.config, rules).search(15_000)
    assert found.violation, f"{found.states} states, all well"
