"""The hosts of the tests: they talk, and each fault is what it says."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing() or "none")

#: Answers each line of a client with the line; prints what a connection ends with.
ECHO = """
import socket, threading
def serve(one):
    try:
        while data := one.recv(65536):
            one.sendall(data)
        print("ended", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
server = socket.create_server(("", 4000))
print("listens", flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
#: Sends what it reads, and prints what comes back.
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 4000)) as one:
    for line in sys.stdin.buffer:
        one.sendall(line)
        data = b""
        while not data.endswith(b"\\n"):
            got = one.recv(65536)
            if not got: sys.exit("ended")
            data += got
        print(len(data), flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2, disk_bytes=16 << 20) as made:
        yield made


EARS = """
import socket
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(("", 5))
print("up", flush=True)
print(one.recv(9))
"""


class Call:
    """A connection from one host to an echo on the other one."""

    def __init__(self, here: Host, there: Host) -> None:
        pipe = subprocess.PIPE
        self.echo = there.begin(sys.executable, "-c", ECHO, stdout=pipe, text=True)
        assert self.echo.stdout and self.echo.stdout.readline() == "listens\n"
        self.ask = here.begin(sys.executable, "-c", ASK, there.name, stdin=pipe, stdout=pipe,
                              stderr=pipe, text=True)  # fmt: skip
        assert self.round() == 5

    def say(self, text: str) -> None:
        assert self.ask.stdin
        self.ask.stdin.write(text + "\n")
        self.ask.stdin.flush()

    def answer(self) -> int:
        assert self.ask.stdout
        return int(self.ask.stdout.readline())

    def round(self, text: str = "ping") -> int:
        self.say(text)
        return self.answer()

    def is_answered(self) -> bool:
        return bool(select.select([self.ask.stdout], [], [], 0)[0])


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stuck(call: Call, here: Host) -> None:
    """What is said here comes to nothing, and nobody is told."""
    before = here.retransmitted()
    call.say("into the void")
    until(lambda: here.retransmitted() > before + 2)
    assert not call.is_answered() and call.ask.poll() is None and call.echo.poll() is None


def test_hosts_are_apart(network: Network) -> None:
    n1, n2 = network.hosts
    assert [host.run("hostname") for host in network.hosts] == ["n1\n", "n2\n"]
    assert socket.gethostname() not in ("n1", "n2")
    n1.run("sh", "-c", f"echo mine >{n1.disk}/file")
    assert n2.run("ls", n2.disk) == "lost+found\n" and not list(n1.disk.iterdir())
    assert Call(n1, n2).round("x" * 100_000) == 100_001


def test_a_cut_is_silent_and_heals(network: Network) -> None:
    n1, n2 = network.hosts
    call = Call(n1, n2)
    n2.cut()
    stuck(call, n1)
    n2.heal()
    assert call.answer() == len("into the void") + 1


def test_a_cut_one_way(network: Network) -> None:
    n1, n2 = network.hosts
    call = Call(n1, n2)
    n1.mute(n2)
    stuck(call, n1)
    hears = n1.begin(sys.executable, "-c", EARS, stdout=subprocess.PIPE, text=True)
    assert hears.stdout and hears.stdout.readline() == "up\n"
    n2.run(sys.executable, "-c", "import socket; socket.socket(2, 2).sendto(b'there', ('n1', 5))")
    assert hears.stdout.readline() == "b'there'\n"
    n1.unmute(n2)
    assert call.answer() == len("into the void") + 1


def test_a_killed_host_is_heard_and_keeps_its_disk(network: Network) -> None:
    n1, n2 = network.hosts
    call = Call(n1, n2)
    n2.run("sh", "-c", f"echo kept >{n2.disk}/file")
    n2.kill()
    call.say("anybody")
    assert call.ask.wait() == 1
    n2.start()
    assert n2.run("cat", f"{n2.disk}/file") == "kept\n"
    assert Call(n1, n2).round() == 5


def test_a_host_without_power_says_nothing(network: Network) -> None:
    n1, n2 = network.hosts
    call = Call(n1, n2)
    n2.lose_power()
    before = n1.retransmitted()
    call.say("anybody")
    until(lambda: n1.retransmitted() > before + 2)
    assert call.ask.poll() is None
    n2.start()  # which knows nothing of the connection
    assert call.ask.wait() == 1
    assert call.ask.stderr and "ConnectionResetError" in call.ask.stderr.read()


def test_a_full_disk_and_a_dead_one(network: Network) -> None:
    (n1, n2) = network.hosts
    write = ("sh", "-c", f"seq 9999 >{n2.disk}/file && sync {n2.disk}/file")
    n2.fill()
    with pytest.raises(subprocess.CalledProcessError):
        n2.run(*write)
    n2.empty()
    n2.run(*write)
    n2.break_disk()
    with pytest.raises(subprocess.CalledProcessError):
        n2.run("touch", f"{n2.disk}/other")
    n1.run("touch", f"{n1.disk}/other")
    n2.mend_disk()
    assert n2.run("tail", "-n1", f"{n2.disk}/file") == "9999\n"


def test_a_bad_cable(network: Network) -> None:
    n1, n2 = network.hosts
    call = Call(n1, n2)
    n2.spoil(delay_ms=(0, 5), loss=0.01, twice=0.05)
    late = n2.counter("TCPOFOQueue")
    for _ in range(5):
        assert call.round("x" * 300_000) == 300_001
    assert n2.counter("TCPOFOQueue") > late  # packets overtook each other, or were lost
    n2.heal()
    n1.slow("20mbit")
    assert call.round("x" * 300_000) == 300_001
    (queue,) = json.loads(n1.run("tc", "-j", "-s", "qdisc", "show", "dev", "eth0"))
    assert queue["kind"] == "tbf" and queue["overlimits"] > 0
    n1.slow("")
    assert call.round() == 5


def test_processes_of_a_host_are_signalled(network: Network) -> None:
    (n1, _) = network.hosts
    process = n1.begin("sleep", "1000")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_nothing_is_left_of_a_killed_check() -> None:
    script = (
        "from tests.support.hosts import Network\nwith Network(2) as made:\n"
        " print(made.root, *(host.apart.first.pid for host in made.hosts), flush=True)\n input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=hosts.ROOT,
    ) as check:  # fmt: skip
        assert check.stdout
        root, *pids = check.stdout.readline().split()
        check.kill()
    until(lambda: not any(map(lives, map(int, pids))))
    until(
        lambda: root not in subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout
    )
    with Network(0):
        assert not Path(root).exists()
