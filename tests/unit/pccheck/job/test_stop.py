"""What the ranks answer when a signal, or the end of a rank, comes during their reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pccheck import PccheckWarning, UsageError
from pccheck.job import agreement
from pccheck.job.agreement import RankAgreement
from pccheck.job.stop import Stop
from pccheck.warn import Warner
from tests.support.waiting import until

Make = Callable[[Callable[[torch.Tensor], object]], Stop]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """One of two ranks; `total` is what all_reduce() does to its word."""

    def made(total: Callable[[torch.Tensor], object]) -> Stop:
        group: Any = object()
        monkeypatch.setattr("torch.distributed.all_reduce", lambda word, _op, _group: total(word))
        ranks = RankAgreement(2, Warner())
        ranks._group = group
        return Stop(ranks)

    return made


def test_a_rank_that_waits_for_the_first_call_of_the_others_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when only rank 0 calls it. The words come while the call waits."""
    monkeypatch.setattr(agreement, "_WAIT_S", 0.01)
    monkeypatch.setattr(agreement, "_group", lambda *_: until(lambda: caplog.records))
    RankAgreement(2, Warner()).begin("should_checkpoint()")
    assert "should_checkpoint() waits for the other ranks: every rank must" in caplog.text


def test_a_signal_after_the_sum_counts_in_the_next_one(make: Make) -> None:
    """The other ranks have not seen it."""
    stop = make(lambda _: stop.ask())
    assert [stop.asked(), stop.asked()] == [False, True]


def test_the_signal_of_another_rank_starts_the_deadline_here(make: Make) -> None:
    stop = make(lambda word: word.fill_(1))
    assert stop.left_s() is None
    assert stop.asked() and stop.left_s() is not None


def test_a_rank_that_ended_leaves_the_flag_of_this_one(make: Make) -> None:
    def total(_word: torch.Tensor) -> None:
        raise RuntimeError("connection closed by peer")

    stop = make(total)
    with pytest.warns(PccheckWarning, match="only signals to this rank"):
        assert not stop.asked()
    stop.ask()
    assert stop.asked()


def test_all_ranks_of_the_job_take_part() -> None:
    with pytest.raises(UsageError, match=r"the 2 ranks .* torch.distributed is not set up"):
        Stop(RankAgreement(2, Warner())).on((15,), 1)


def test_a_handler_in_a_reduction_makes_none_of_its_own(make: Make) -> None:
    """The other ranks would take it for the next one."""
    inside: list[bool] = []
    reductions = 0

    def total(word: torch.Tensor) -> None:
        nonlocal reductions
        reductions += 1
        inside.append(stop.asked())
        word.fill_(1)

    stop = make(total)
    assert stop.asked() and inside == [False] and reductions == 1
