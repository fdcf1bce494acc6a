"""Who was heard when, and who is waited for, in order of events."""

from __future__ import annotations

from pccheck_native.nodes.facts import Have, Said, SaveName
from pccheckd.nodes.view import NodesView, Waited


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def name(step: int) -> SaveName:
    return SaveName(0, 0, step, 0)


def have(*steps: int) -> Have:
    return Have(offered=tuple(map(name, steps)))


def test_a_member_is_heard_when_something_of_it_is_new() -> None:
    view = NodesView(Clock())
    view.saw([have(1), None])
    view.saw([have(1), have(1)])
    assert view.heard_s == {0: 1, 1: 2}
    view.saw([have(1), have(1)])
    assert view.heard_s == {0: 1, 1: 2}


def test_an_answer_counts_once_and_news_later() -> None:
    view = NodesView(Clock())
    view.answered({1})
    view.answered({1})
    assert view.heard_s == {1: 1}
    view.saw([None, have(1)])
    assert view.heard_s[1] > 1


def test_what_one_offers_waits_for_the_other_since_it_was_seen() -> None:
    view = NodesView(Clock())
    view.saw([have(1, 2), None])
    view.saw([have(1, 2, 3), have(1)])
    assert view.waited_for(0) is None
    assert view.waited_for(1) == Waited(name(2), 1)
    view.heard(Said((name(1),), (name(2),)))  # 2 is given up
    assert view.waited_for(1) == Waited(name(3), 2)
    view.heard(Said((name(3),)))
    assert view.waited_for(1) is None


def test_each_global_is_counted_once() -> None:
    view = NodesView(Clock())
    for said in ([1], [2, 1], [2, 1], [4, 2]):
        view.heard(Said(tuple(map(name, said))))
    assert view.globals == 3
