"""Threads for calls that block: how many, and what happens where the system refuses one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pccheckd.base.threads import Threads

LIMIT_S = 90.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Work that waits for it goes on when the test ends, whatever happens."""
    with ExitStack() as stack:
        made = threading.Event()
        stack.callback(made.set)
        yield made


def test_a_thread_that_is_free_is_used_again() -> None:
    threads = Threads(8, "t")
    idents = set()
    for _ in range(20):
        idents.add(threads.submit(threading.get_ident).result(LIMIT_S))
    threads.stop()
    assert len(idents) <= 2  # the first may not be back when the second call comes


def test_there_are_no_more_than_the_limit(gate: threading.Event) -> None:
    threads = Threads(3, "t")
    inside, most = threading.Semaphore(0), 0
    lock, now = threading.Lock(), 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        inside.release()
        assert gate.wait(LIMIT_S)
        with lock:
            now -= 1

    futures = [threads.submit(work) for _ in range(9)]
    for _ in range(3):
        assert inside.acquire(timeout=LIMIT_S)
    gate.set()
    for future in futures:
        future.result(LIMIT_S)
    threads.stop()
    assert most == 3


def test_work_waits_for_the_threads_there_are_where_the_system_refuses_more(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(4, "t")
    threads.begin()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first, second = threads.submit(gate.wait, LIMIT_S), threads.submit(int, "7")
    gate.set()
    assert first.result(LIMIT_S) and second.result(LIMIT_S) == 7
    with pytest.raises(RuntimeError, match="start new thread"):
        Threads(4, "other").begin()
    threads.stop()


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    threads = Threads(1, "t")
    with pytest.raises(ValueError, match="invalid literal"):
        threads.submit(int, "x").result(LIMIT_S)
    assert threads.submit(int, "7").result(LIMIT_S) == 7
    threads.stop()
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(int)


def test_a_stop_cancels_what_has_not_begun(gate: threading.Event) -> None:
    threads, begun = Threads(1, "t"), threading.Event()

    def work() -> bool:
        begun.set()
        return gate.wait(LIMIT_S)

    going, waiting = threads.submit(work), threads.submit(int)
    assert begun.wait(LIMIT_S)
    threads.stop()
    assert waiting.cancelled() and not going.done()
    gate.set()
    assert going.result(LIMIT_S)
