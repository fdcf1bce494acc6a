"""`pccheckctl wait`: which checkpoint is waited for, when it is there, when there is no hope."""

from __future__ import annotations

from argparse import Namespace

import pytest

from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    UsageError,
    WaitTimeoutError,
)
from pccheckctl.commands import wait
from pccheckctl.commands.wait import Seen

NOTHING = Seen([], [])


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waiting(**changes: object) -> Namespace:
    values = {"job": "job", "rank": 0, "uid": None, "state": "durable", "step": 5, "newest": False,
              "ended": False, "timeout": 10.0, "json": False}  # fmt: skip
    return Namespace(**(values | changes))


def stored(step: int, **more: object) -> dict[str, object]:
    return {"job": "job", "step": step, "sequence": step, "world_size": 1, **more}


def recent(step: int, state: str, **more: object) -> dict[str, object]:
    return {"step": step, "state": state, **more}


def looks(monkeypatch: pytest.MonkeyPatch, *answers: object) -> Clock:
    """What each look sees, the last one for ever."""
    left = list(answers)

    def look(_: Namespace) -> object:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(wait, "look", look)
    return Clock()


def test_it_polls_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = looks(monkeypatch, NOTHING, NOTHING, Seen([stored(6)], []))
    assert wait.run(waiting(), clock=clock, sleep=clock.sleep) == 0
    assert capsys.readouterr().out == "step 6 is durable, later than 5\n"
    assert clock.now == pytest.approx(0.06)


def test_it_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = looks(monkeypatch, NOTHING)
    with pytest.raises(
        WaitTimeoutError,
        match=r"timeout after 10 s: step 5 of job 'job' rank 0, or a later step, is not durable",
    ):
        wait.run(waiting(), clock=clock, sleep=clock.sleep)
    assert clock.now == pytest.approx(10.0)


def test_it_says_what_is_on_the_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = looks(monkeypatch, Seen([stored(4)], [recent(5, "copying", on_device=True)]))
    with pytest.raises(WaitTimeoutError, match=r"\(newest durable step: 4\); step 5 is on the GPU"):
        wait.run(waiting(state="copied"), clock=clock, sleep=clock.sleep)


def test_it_bridges_a_restart_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = looks(monkeypatch, DaemonUnreachableError("gone"), Seen([stored(5)], []))
    assert wait.run(waiting(), clock=clock, sleep=clock.sleep) == 0


def test_the_newest_is_settled_at_the_first_look_that_has_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = looks(
        monkeypatch,
        NOTHING,
        Seen([stored(3)], [recent(4, "writing"), recent(5, "failed")]),
        Seen([stored(3)], [recent(4, "writing"), recent(6, "copying")]),
        Seen([stored(4), stored(3)], [recent(6, "writing")]),
    )
    arguments = waiting(step=None, newest=True)
    assert wait.run(arguments, clock=clock, sleep=clock.sleep) == 0
    assert capsys.readouterr().out == "step 4 is durable\n"


def test_without_any_checkpoint_the_newest_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = looks(monkeypatch, NOTHING)
    with pytest.raises(WaitTimeoutError, match="has requested no checkpoint yet"):
        wait.run(waiting(step=None, newest=True), clock=clock, sleep=clock.sleep)


def test_copied_is_what_the_daemon_vouches_for() -> None:
    seen = Seen([], [recent(5, "writing"), recent(6, "failed", reason="EIO")])
    assert wait.judge(seen, 5, "copied") == seen.recent[0]
    assert wait.judge(seen, 5, "durable") is None
    with pytest.raises(CheckpointFailedError, match="step 6 failed: EIO"):
        wait.judge(seen, 6, "durable")


def test_what_was_durable_and_is_lost_is_not_waited_for() -> None:
    lost = recent(5, "durable", lost="its file was removed")
    for state in ("copied", "durable", "global"):
        with pytest.raises(
            CheckpointFailedError, match="step 5 was durable, and is lost: its file"
        ):
            wait.judge(Seen([], [lost]), 5, state)
        assert wait.judge(Seen([], [lost, recent(6, "copying")]), 5, state) is None


@pytest.mark.parametrize(
    ("one", "there"),
    [
        (stored(5), True),
        (stored(5, world_size=2), False),
        (stored(5, world_size=2, **{"global": True}), True),
    ],
)
def test_global_is_what_every_rank_has(one: dict[str, object], *, there: bool) -> None:
    reached = wait.judge(Seen([one], []), 5, "global")
    assert (reached is not None) == there
    assert reached is None or reached["state"] == "global"


def test_damaged_checkpoints_and_other_ranks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        def status(self, **_: object) -> dict[str, object]:
            mine = {"uid": 7, "job": "job", "rank": 0, "checkpoints": [recent(7, "copied")]}
            return {"ranks": [mine, mine | {"rank": 1}, mine | {"job": "other", "uid": 8}]}

        def listing(self, *_: object, **__: object) -> dict[str, object]:
            checkpoints = [stored(5, rank=0), stored(6, rank=0, damaged=True), stored(7, rank=1)]
            return {"checkpoints": checkpoints}

        def __enter__(self) -> Source:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(wait, "daemon", lambda _: Source())
    seen = wait.look(waiting())
    assert [one["step"] for one in seen.stored] == [5]
    assert [one["step"] for one in seen.recent] == [7]
    assert (seen.known, seen.jobs) == (True, ("job", "other"))
    assert not wait.look(waiting(rank=2)).known
    monkeypatch.setattr(
        Source, "status", lambda *_, **__: {"ranks": [{"uid": u, "job": "job"} for u in (7, 8)]}
    )
    with pytest.raises(UsageError, match="exists for uids 7, 8"):
        wait.look(waiting())


def test_a_job_that_has_not_come_is_waited_for_and_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name may be wrong, or the job starts in a minute: in both cases the text says what is
    waited for."""
    unknown = Seen([], [], known=False, jobs=("gpt", "bert"))
    clock = looks(monkeypatch, unknown, unknown, Seen([stored(5)], []))
    assert wait.run(waiting(), clock=clock, sleep=clock.sleep) == 0
    told = capsys.readouterr()
    assert told.out == "step 5 is durable\n"
    (line,) = told.err.splitlines()
    assert "the daemon does not know job 'job' rank 0 yet (visible jobs: gpt, bert)" in line
    clock = looks(monkeypatch, unknown)
    with pytest.raises(WaitTimeoutError, match="timeout after 10 s: the daemon does not know"):
        wait.run(waiting(), clock=clock, sleep=clock.sleep)


def test_what_ended_trainers_left_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a trainer that lives, or in another job, is not."""
    clock = Clock()
    ranks = [
        {"job": "job", "connected": False, "in_flight": 1, "in_memory": 0},
        {"job": "job", "connected": True, "in_flight": 1, "in_memory": 1},
        {"job": "other", "connected": False, "in_flight": 0, "in_memory": 1},
    ]

    class Source:
        def __enter__(self) -> Source:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def status(self, **_: object) -> dict[str, object]:
            done = [rank | {"in_flight": 0} for rank in ranks] if clock.now > 3 else ranks
            return {"ranks": done}

    monkeypatch.setattr(wait, "daemon", lambda _: Source())
    assert wait.run(waiting(ended=True), clock=clock, sleep=clock.sleep) == 0
    assert 3 < clock.now < 5 and "everything is written" in capsys.readouterr().out
    with pytest.raises(WaitTimeoutError, match="after 10 s: still being written: other"):
        wait.run(waiting(ended=True, job=None), clock=clock, sleep=clock.sleep)
    with pytest.raises(UsageError, match="wait needs a job"):
        wait.run(waiting(job=None))
