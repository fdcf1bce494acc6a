"""A client's session over reconnects: when it connects again, what each daemon learns, and P7."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck import PccheckWarning
from pccheck.daemon import session as module
from pccheck.daemon.session import Session
from pccheck.job.naming import Identity
from pccheck.warn import Warner
from pccheck_wire.errors import (
    DaemonUnreachableError,
    PccheckError,
    ProtocolError,
    RefusedError,
    StorageFullError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Done, Goodbye, Hello, Register, Registered, Restored

MIB = 1 << 20
GONE = DaemonUnreachableError("no daemon listens")


class Connection:
    """One daemon; `requests` has what it was asked."""

    def __init__(self, daemon: Daemons, hello: Hello) -> None:
        self.daemon = daemon
        self.path = "/s"
        self.welcome = SimpleNamespace(
            token=os.urandom(16), pid=77, incarnation=daemon.incarnation, start=bytes(16),
            storage=daemon.storage,
            newest_step=daemon.newest_step, protected_step=daemon.protected_step,
        )  # fmt: skip
        self.hello = hello
        self.lives = True
        self.requests: list[Any] = []
        self.error: PccheckError | None = None
        self.absent: list[int] = []
        self.arrived: list[tuple[Callable[[Any], None], Any]] = []

    def alive(self) -> bool:
        return self.lives

    def request(self, body: Any, *, timeout_s: float) -> Any:
        self.requests.append(body)
        if self.error is not None:
            raise self.error
        if isinstance(body, Register):
            return Registered(
                4, 2, 2, 0, 2.0, "v", absent=self.absent, incarnation=9, expected_bytes=7 * MIB
            )
        return Done()

    def ask(self, body: Any, callback: Callable[[Any], None]) -> None:
        self.requests.append(body)
        self.arrived.append((callback, Registered(4, 2, 2, 0, 2.0, "v", incarnation=9)))

    def pump(self) -> None:
        while self.arrived:
            callback, answer = self.arrived.pop(0)
            callback(answer)

    def gone(self) -> DaemonUnreachableError:
        return GONE

    def close(self) -> None:
        self.lives = False


class Daemons:
    """Stands for the sockets of this machine, and for its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.error: Exception | None = None
        self.attempts: list[Attempt] = []
        self.incarnation, self.storage = 5, "disk"
        self.newest_step: int | None = None
        self.protected_step: int | None = None
        self.is_late = False
        monkeypatch.setattr(module.attach, "Attempt", lambda *given, **_: Attempt(self, *given))
        monkeypatch.setattr(module, "Connection", lambda made, **_: made)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)


class Attempt:
    """One Hello; `closed` when the client has given it up, or the daemon has refused it."""

    def __init__(self, daemons: Daemons, hello: Hello, _path: Path) -> None:
        daemons.attempts.append(self)
        self.daemons, self.hello, self.closed = daemons, hello, False

    @property
    def answered(self) -> bool:
        return not self.daemons.is_late

    def finish(self, *, timeout_s: float) -> Connection:
        assert not self.closed
        if self.daemons.is_late:
            raise WaitTimeoutError(f"no answer in {timeout_s} s")
        if self.daemons.error is not None:
            self.close()
            raise self.daemons.error
        return Connection(self.daemons, self.hello)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemons]:
    yield Daemons(monkeypatch)


def session(*, rank: int = 0, world: int = 1, fresh: bool = False, solo: bool = False) -> Session:
    return Session(
        Identity("gpt", rank, world, world, ""), lambda: "/s", fresh=fresh, solo=solo,
        stall_limit_s=5.0, warner=Warner(),
    )  # fmt: skip


def connected(daemons: Daemons, **options: Any) -> tuple[Session, Connection]:
    made = session(**options)
    found: Any = made.require()
    return made, found


def test_it_tries_again_less_and_less_often(daemons: Daemons) -> None:
    """Each attempt costs training time."""
    made, daemons.error = session(), GONE
    delays: list[float] = []
    for _ in range(8):
        since_s, before = daemons.now_s, len(daemons.attempts)
        while len(daemons.attempts) == before:
            made.reconnect()
            daemons.now_s += 0.05
        delays.append(daemons.now_s - since_s)
    assert delays == sorted(delays)
    assert delays[-1] <= module.BACKOFF_LAST_S + 0.1
    daemons.error = None
    daemons.now_s += module.BACKOFF_LAST_S
    assert made.reconnect() is made.current() is not None
    made.close()
    daemons.error = GONE
    assert made.reconnect() is None  # at once: the last attempt succeeded


@pytest.mark.parametrize("error", [RefusedError("no room"), ConnectionResetError(104, "reset")])
def test_a_daemon_that_refuses_is_asked_seldom(daemons: Daemons, error: Exception) -> None:
    made, daemons.error = session(), error
    assert made.reconnect() is None
    slow = isinstance(error, RefusedError)
    assert isinstance(made.error, RefusedError if slow else DaemonUnreachableError)
    daemons.now_s += module.BACKOFF_LAST_S + 1
    made.reconnect()
    assert len(daemons.attempts) == (1 if slow else 2)


def test_an_attempt_that_was_not_answered_in_time_goes_on(daemons: Daemons) -> None:
    """Without another one, and without waiting for it again."""
    made, daemons.is_late = session(), True
    for _ in range(5):
        assert made.reconnect() is None
        daemons.now_s += module.BACKOFF_SLOW_S + 1
    daemons.is_late = False
    assert made.reconnect() is made.current() is not None
    assert [attempt.closed for attempt in daemons.attempts] == [False]


@pytest.mark.parametrize("end", [Session.close, Session.forget_in_child])
def test_the_end_of_a_client_is_the_end_of_its_attempt(
    daemons: Daemons, end: Callable[[Session], None]
) -> None:
    made, daemons.is_late = session(), True
    made.reconnect()
    end(made)
    assert [attempt.closed for attempt in daemons.attempts] == [True]


def test_after_an_attempt_that_was_refused_late_there_is_another(daemons: Daemons) -> None:
    made, daemons.is_late = session(), True
    made.reconnect()
    daemons.is_late, daemons.error = False, GONE
    assert made.reconnect() is None
    daemons.error = None
    daemons.now_s += module.BACKOFF_SLOW_S + 1
    assert made.reconnect() is not None
    assert [attempt.closed for attempt in daemons.attempts] == [True, False]


def test_a_reconnect_repeats_who_it_is(daemons: Daemons) -> None:
    made, first = connected(daemons)
    made.took_over(first, 8)  # type: ignore[arg-type]
    first.lives = False
    assert made.current() is None
    second: Any = made.reconnect()
    assert second.hello.process == first.hello.process
    assert (first.hello.incarnation, first.hello.storage) == (0, "")
    assert (second.hello.incarnation, second.hello.storage) == (5, "disk")
    assert second.hello.restored == 8


@pytest.mark.parametrize(
    ("options", "same"), [({"world": 1}, False), ({"world": 2}, True),
                          ({"world": 2, "solo": True}, False)],
)  # fmt: skip
def test_a_second_client_is_a_new_start_only_of_a_lone_rank(
    daemons: Daemons, options: dict[str, Any], same: bool
) -> None:
    """A notebook runs its cell again; the ranks of a group stay one start."""
    (_, first), (_, second) = connected(daemons, **options), connected(daemons, **options)
    assert (first.hello.process == second.hello.process) is same


# -- P7 ----------------------------------------------------------------------------------------


def test_a_reconnect_names_the_start_that_it_restored_in(daemons: Daemons) -> None:
    """The answer has arrived, and no checkpoint was asked for since."""
    client = session(rank=1, world=2)
    connection: Any = client.require()
    client.took_over(connection, 3)
    client.announce(connection, MIB, 1)
    connection.lives = False
    client.reconnect()
    assert [attempt.hello.incarnation for attempt in daemons.attempts] == [0, 9]


def test_an_empty_volume_counts_as_restored(daemons: Daemons) -> None:
    """All later checkpoints are this run's; a daemon that comes later must not protect them."""
    made, first = connected(daemons)
    assert first.hello.restored is None
    first.lives, daemons.newest_step = False, 3
    second: Any = made.reconnect()
    assert second.hello.restored == 0


def test_checkpoints_that_were_not_restored_stay_so_over_reconnects(daemons: Daemons) -> None:
    daemons.newest_step = daemons.protected_step = 40
    made, first = connected(daemons)
    first.lives, daemons.newest_step = False, None
    second: Any = made.reconnect()
    assert second.hello.restored is None
    with pytest.warns(PccheckWarning, match=r"checkpoint of step 40 that was NOT restored"):
        made.warn_if_unrestored()


def test_a_restore_ends_the_warning(daemons: Daemons, recwarn: pytest.WarningsRecorder) -> None:
    daemons.newest_step = daemons.protected_step = 40
    made, connection = connected(daemons)
    made.took_over(connection, 8)  # type: ignore[arg-type]
    made.warn_if_unrestored()
    assert connection.requests == [Restored(8)] and not recwarn.list


def test_fresh_counts_as_restored(daemons: Daemons) -> None:
    daemons.newest_step = 40
    _, connection = connected(daemons, fresh=True)
    assert (connection.hello.fresh, connection.hello.restored) == (True, 0)


# -- capacity ----------------------------------------------------------------------------------


def test_it_registers_once_for_a_size_and_again_for_a_larger_one(daemons: Daemons) -> None:
    made, connection = connected(daemons)
    for payload_bytes in (MIB - 1, MIB, MIB + 1, 2 * MIB):
        made.register(connection, payload_bytes, 1)  # type: ignore[arg-type]
    assert connection.requests == [Register(MIB, 0), Register(2 * MIB, 0)]
    assert made.incarnation == 9


def test_a_first_memory_only_checkpoint_registers_again(daemons: Daemons) -> None:
    made, connection = connected(daemons)
    for levels in (1, 3, 3):
        made.register(connection, MIB, levels)  # type: ignore[arg-type]
    assert connection.requests == [Register(MIB, 0), Register(MIB, 0, 3)]
    assert made.room_bytes == 7 * MIB


@pytest.mark.parametrize(("error", "left"), [(None, 0), (StorageFullError("full"), 0), (GONE, 3)])
def test_failures_that_no_daemon_counted_are_reported_once(
    daemons: Daemons, error: PccheckError | None, left: int
) -> None:
    made, connection = connected(daemons)
    made.uncounted, connection.error = 3, error
    if error is None:
        made.register(connection, MIB, 1)  # type: ignore[arg-type]
    else:
        with pytest.raises(type(error)):
            made.register(connection, MIB, 1)  # type: ignore[arg-type]
    assert connection.requests == [Register(MIB, 3)]
    assert made.uncounted == left


def test_another_daemon_is_registered_with_again(daemons: Daemons) -> None:
    made, first = connected(daemons)
    made.register(first, MIB, 1)  # type: ignore[arg-type]
    first.lives = False
    second: Any = made.reconnect()
    made.register(second, MIB, 1)
    assert second.requests == [Register(MIB, 0)]


def test_absent_ranks_are_warned_of_once(daemons: Daemons) -> None:
    made, connection = connected(daemons, world=4)
    connection.absent = [1, 2]
    with pytest.warns(PccheckWarning, match="these are not connected: 1, 2") as caught:
        for size in (MIB, 2 * MIB):
            made.register(connection, size, 1)  # type: ignore[arg-type]
    assert len(caught) == 1


def test_goodbye_goes_to_a_living_daemon_only(daemons: Daemons) -> None:
    made, connection = connected(daemons)
    assert made.say_goodbye(True)
    made.uncounted = 2  # failures that the next Register would have reported
    assert made.say_goodbye(False)
    assert made.say_goodbye(False)
    assert connection.requests == [Goodbye(True), Goodbye(False, 2), Goodbye(False)]
    connection.lives = False
    assert not made.say_goodbye(False)


def test_no_daemon_is_warned_of_once_until_one_comes(
    daemons: Daemons, caplog: pytest.LogCaptureFixture
) -> None:
    made, daemons.error = session(), GONE
    with pytest.warns(PccheckWarning, match="training continues WITHOUT checkpoints") as caught:
        for _ in range(3):
            made.reconnect()
            made.warn_disconnected(private=False)
    assert len(caught) == 1
    daemons.error, daemons.now_s = None, daemons.now_s + 60
    made.reconnect()
    assert "checkpoints continue" in caplog.text


def meet(daemons: Daemons, *errors: PccheckError | None) -> None:
    """A session finds these one after the other; None: a daemon, which ends again."""
    made = session()
    for daemons.error in errors:
        daemons.now_s += 60
        connection: Any = made.reconnect()
        if connection is None:
            made.warn_disconnected(private=False)
        else:
            connection.lives = False


def test_each_reason_for_no_daemon_is_warned_of_once_until_one_comes(daemons: Daemons) -> None:
    other = ProtocolError("the daemon uses protocol 7")
    with pytest.warns(PccheckWarning) as caught:
        meet(daemons, GONE, other, GONE, other, None, GONE)
    reasons = [re.findall("no daemon|protocol", str(one.message)) for one in caught]
    assert reasons == [["no daemon"], ["protocol"], ["no daemon"]]


def test_the_filter_of_python_does_not_hide_that_the_daemon_is_gone_again(daemons: Daemons) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # the filter of a script
        meet(daemons, GONE, None, GONE)
    assert [one.filename for one in caught] == [__file__] * 2


def test_a_refusal_does_not_promise_what_only_a_daemon_that_starts_can_keep(
    daemons: Daemons,
) -> None:
    made, daemons.error = session(), RefusedError("is already served")
    made.reconnect()
    with pytest.warns(PccheckWarning, match=r"served\. Later calls of checkpoint\(\) try"):
        made.warn_disconnected(private=False)


def test_who_has_a_private_daemon_is_not_told_to_start_one(daemons: Daemons) -> None:
    made = session()
    daemons.error = DaemonUnreachableError("no daemon listens", hint="start it with: pccheckd")
    made.reconnect()
    with pytest.warns(PccheckWarning, match="The client starts its private daemon again") as caught:
        made.warn_disconnected(private=True)
    assert "start it with" not in str(caught[0].message)


def test_it_does_not_connect_with_its_last_descriptors(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq ends the process when it gets none."""

    def full(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module.os, "dup", full)
    with pytest.raises(RefusedError, match="can open fewer than") as refused:
        session().require()
    assert "ulimit -n" in refused.value.hint
    assert daemons.attempts == []


def test_only_ranks_of_a_job_on_several_nodes_have_a_voice(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the connection to each daemon, and ends with the session."""
    heard: list[object] = []

    class Voice:
        def __init__(self) -> None:
            heard.append("made")

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *given: heard.append((name, *given))

    monkeypatch.setattr(module, "Voice", Voice)

    def made(world: int, local: int, *, solo: bool = False) -> Session:
        return Session(
            Identity("gpt", 0, world, local, ""), lambda: "/s", fresh=False, solo=solo,
            stall_limit_s=5.0, warner=Warner(),
        )  # fmt: skip

    for alone in (made(1, 1), made(4, 4), made(4, 2, solo=True)):
        alone.require()
        alone.close()
    assert heard == []
    wide = made(4, 2)
    first: Any = wide.require()
    first.lives = False
    second: Any = wide.reconnect()
    wide.close()
    assert heard == [
        "made", ("follow", "/s", first.welcome.token), ("leave",),
        ("follow", "/s", second.welcome.token), ("leave",), ("close",),
    ]  # fmt: skip
