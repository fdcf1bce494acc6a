"""A torch store on another host that is cut off silently: nothing tells the client, which must end
by its own limits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import hosts
from tests.support.hosts import Network

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "none")

SERVER = """
from torch.distributed import TCPStore
store = TCPStore("n1", 4000, None, True, wait_for_workers=False)
print("listens", flush=True)
input()
"""
#: Two clients: one is in an operation when the cable is cut, one sleeps until a key is there.
USER = """
import threading
from pccheck.nodes import stores

stores.ANSWER_LIMIT_S = stores.CONNECT_LIMIT_S = 2.0
agent = {"MASTER_ADDR": "n1", "MASTER_PORT": "4000", "TORCHELASTIC_USE_AGENT_STORE": "True"}
asks, waits = stores.JobStore(agent), stores.JobStore(agent)
asks.set("key", b"value")

def sleep(descriptor, limit_s):
    print("sleeps", flush=True)
    return stores._sleep(descriptor, limit_s)

def wait():
    try:
        waits.wait("none", 1e9, sleep)
    except stores.StoreError as error:
        print("wait ended", flush=True)

waiting = threading.Thread(target=wait)
waiting.start()
input()
try:
    asks.add("n", 1)
except stores.StoreError as error:
    print("add ended", flush=True)
waiting.join()
try:
    asks.add("n", 1)
except stores.StoreError as error:
    print(error, flush=True)
input()
print(waits.get(["key"]), asks.get(["key"]), flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2, disk_bytes=16 << 20) as made:
        yield made


def test_a_silent_cut_ends_what_waits_and_a_connection_follows(
    network: Network,
) -> None:
    first, second = network.hosts
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = first.begin(sys.executable, "-c", SERVER, **pipes)
    assert server.stdout is not None
    assert server.stdout.readline() == "listens\n"
    user = second.begin(sys.executable, "-c", USER, **pipes)
    assert user.stdin is not None and user.stdout is not None

    def say() -> None:
        assert user.stdin is not None
        user.stdin.write("\n")
        user.stdin.flush()

    assert user.stdout.readline() == "sleeps\n"
    first.cut()
    say()
    ended = {user.stdout.readline(), user.stdout.readline()}
    assert ended == {"add ended\n", "wait ended\n"}
    assert user.stdout.readline().startswith("no store answers at n1 port 4000: ")
    first.heal()
    say()
    assert user.stdout.readline() == "[b'value'] [b'value']\n"
