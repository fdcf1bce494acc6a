"""The job's torch store, with real servers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from pccheck.nodes import stores
from pccheck.nodes.stores import JobStore, StoreError
from pccheck_wire.messages import NOT_YET
from pccheck_wire.packing import VALUE_BYTES_MAX
from tests.support.programs import Program
from tests.support.storeuser import ADDS
from tests.support.waiting import suspend, until


def agent(port: int) -> dict[str, str]:
    """What torchrun sets for its workers."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


class Server(Program):
    def __init__(self) -> None:
        super().__init__("tests.support.storeserver")
        self.port = int(self.line())

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.fixture
def store(server: Server) -> Iterator[JobStore]:
    with contextlib.closing(JobStore(agent(server.port))) as made:
        yield made


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ANSWER_LIMIT_S", 0.3)


def test_the_operations(server: Server, store: JobStore) -> None:
    other = JobStore(agent(server.port))
    store.set("a/b", b"\0\xff value")
    assert other.get(["a/b"]) == [b"\0\xff value"]
    other.set("a/b", b"")
    assert (store.add("n", 5), other.add("n", -2), store.add("n", 0)) == (5, 3, 3)
    assert store.swap("first", b"mine") == b"mine"
    assert other.swap("first", b"later") == b"mine"
    assert other.get(["none", "n", "first", "nor", "a/b", "n"]) == [
        None, b"3", b"mine", None, b"", b"3",
    ]  # fmt: skip
    assert other.get(["none"]) == [None]
    assert other.get(["n", "first", "n", "a/b", "n"]) == [b"3", b"mine", b"3", b"", b"3"]
    with pytest.raises(StoreError, match="not empty"):
        store.swap("x", b"")
    raw = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    assert raw.get("pccheck/first") == b"mine"
    assert not raw.check(["first"])


def test_a_wait_ends_with_value_limit_or_call(server: Server, store: JobStore) -> None:
    other = JobStore(agent(server.port))
    assert not store.wait("key", 0.05)
    assert not store.wait("key", 0)
    assert not store.wait("key", 1e9, lambda *_: None)

    def sleep(descriptor: int | None, limit_s: float) -> bool | None:
        other.set("key", b"there")
        return stores._sleep(descriptor, limit_s)

    assert store.wait("key", 1e9, sleep)

    def late(descriptor: int | None, limit_s: float) -> bool | None:
        """The answer arrives, and then this thread is called away."""
        other.set("late", b"1")
        stores._sleep(descriptor, limit_s)
        return None

    assert store.wait("late", 1e9, late)
    made = store._store
    assert not store.wait("last", 0.01)
    assert (store.add("n", 1), store._store) == (1, made)  # the connection is in step


def test_old_rings_are_deleted_after_the_answer(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "RINGS_KEPT", 2)
    rung = [store.ring("key", b"value", "bell") for _ in range(4)]
    rings = [f"bell/{number}" for number in (1, 2, 3, 4)]
    assert rung == [1, 2, 3, 4] and store.get(rings) == [b"1"] * 4
    store.tidy()
    assert store.get(rings) == [None, None, b"1", b"1"]
    assert store.get(["key", "bell"]) == [b"value", b"4"]


def test_a_server_with_another_format_is_asked_again_and_again(
    server: Server, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_WAIT", 99)
    other = JobStore(agent(server.port))
    assert not store.wait("key", 0.01)
    other.set("key", b"there")
    assert store.wait("key", 1e9)


def test_answers_have_a_limit_and_begin_with_the_first_key(store: JobStore) -> None:
    half = b"x" * (VALUE_BYTES_MAX // 2)
    for key in "abc":
        store.set(key, half)
    assert store.get(["a", "b", "none", "c"]) == [half, half, None]
    store.set("long", half * 2 + b"x")
    assert store.get(["a", "long"]) == [half]
    with pytest.raises(StoreError, match="the limit is 1048576"):
        store.get(["long", "a"])


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.add("n", 1), lambda store: store.get(["n"]),
        lambda store: store.set("n", b"1"), lambda store: store.set("n", b"x" * VALUE_BYTES_MAX),
        lambda store: store.swap("n", b"1"), lambda store: store.wait("none", 0.05),
    ],
    ids=["add", "get", "set", "set-long", "swap", "wait"],
)  # fmt: skip
def test_a_stopped_server_ends_the_operation_and_is_replaced(
    server: Server, store: JobStore, hurried: None, operation: Callable[[JobStore], object]
) -> None:
    assert store.add("n", 1) == 1
    suspend(server.pid)
    with pytest.raises(StoreError):
        operation(store)
    with pytest.raises(StoreError, match=r"no store answers at 127\.0\.0\.1 port"):
        operation(store)
    server.resume()
    until(lambda: reaches(store))
    assert store.swap("again", b"1") == b"1"


def reaches(store: JobStore) -> bool:
    with contextlib.suppress(StoreError):
        store.add("reached", 1)
        return True
    return False


def test_a_killed_server_is_an_error_and_another_port_follows(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Server() as first, Server() as second:
        environ = agent(first.port)
        store = JobStore(environ)
        store.set("n", b"1")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        with pytest.raises(StoreError, match="closed the connection"):
            store.set("n", b"2")
        with pytest.raises(StoreError, match=f"port {first.port}: Connection refused"):
            store.set("n", b"2")
        environ |= agent(second.port)
        assert store.get(["n"]) == [None]
        store.set("n", b"2")
        assert store.get(["n"]) == [b"2"]
    assert not capfd.readouterr().err  # torch would print stacks of C++ functions


def test_no_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "CONNECT_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(StoreError, match=str(port)):
        JobStore(agent(port)).add("n", 1)


def test_another_thread_breaks_an_operation_off(server: Server, store: JobStore) -> None:
    store.add("n", 1)
    suspend(server.pid)
    ended: list[str] = []

    def run() -> None:
        try:
            store.add("n", 1)
        except StoreError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: unsent(server.port))
    store.break_off()
    thread.join()
    assert len(ended) == 1
    server.resume()
    with pytest.raises(StoreError, match="closed"):
        store.add("n", 1)


def unsent(port: int) -> bool:
    """Whether the server has received what it has not read."""
    rows = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    return any(
        int(row[1].split(":")[1], 16) == port and int(row[4].split(":")[1], 16) for row in rows
    )


def test_the_limits_are_set_on_its_own_connection_only(server: Server, store: JobStore) -> None:
    training = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    store.add("n", 1)
    assert store._socket is not None
    with socket.socket(fileno=os.dup(int(re.findall(r"fd=(\d+)", repr(training))[0]))) as theirs:
        for level, option in (
            (socket.SOL_SOCKET, socket.SO_RCVTIMEO), (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ):  # fmt: skip
            ours = store._socket.getsockopt(level, option, 16)
            assert any(ours) and not any(theirs.getsockopt(level, option, 16))


def test_of_two_processes_one_wins_each_swap(server: Server) -> None:
    users = [
        Program("tests.support.storeuser", "swap", 300, environment=agent(server.port))
        for _ in range(2)
    ]
    with users[0], users[1]:
        first, second = (user.finish().split() for user in users)
        assert first == second
        assert len(first) == 300
        assert set(first) <= {str(user.pid) for user in users}


def test_every_add_of_several_clients_counts(server: Server, store: JobStore) -> None:
    users = [
        Program("tests.support.storeuser", "add", environment=agent(server.port)) for _ in range(4)
    ]
    with contextlib.ExitStack() as all_of_them:
        for user in users:
            all_of_them.enter_context(user)
        for user in users:
            assert user.finish() == ""
    assert store.get(["sum"]) == [str(8 * ADDS).encode()]


@pytest.mark.parametrize("kind", ["env", "file", "hash", "wrapped"])
def test_without_an_agent_the_store_is_that_of_the_process_group(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = agent(port) | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    with Program(
        "tests.support.storeuser", "group", kind, tmp_path / "store", environment=environment
    ) as user:
        early, got, swapped, waited, added, seen, own = eval(user.finish())
    assert early.startswith(NOT_YET)
    assert (got, swapped, waited, added, seen) == ([b"value", None], b"value", False, 2, b"value")
    assert own is (kind == "env")
