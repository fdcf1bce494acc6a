"""Hosts of our own on one machine, joined by a bridge: each has its own network, host name,
processes, /etc/hosts and disk. Needs root, and of Debian iproute2, util-linux, e2fsprogs.

Each host is a set of unnamed namespaces. They end with their first process, and that process ends
with this one, also by SIGKILL. A folder may be left; the next network removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

import psutil

from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DISK_BYTES = 96 << 20
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "losetup", "mkfs.ext4")
_PREFIX = "pcc-hosts-"
#: A hardware address that no host has.
_NOBODY = "02:00:00:00:00:00"
_APART = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid",
          "--fork", "--kill-child", "--mount-proc", "sh", "-ec")  # fmt: skip
_SHUTDOWN = (  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
    "import fcntl, os, sys; "
    "fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, bytes((2, 0, 0, 0)))"
)
#: The shell is the first process of its host: it also takes the end of processes without a parent.
_RUNS = "echo runs; while :; do sleep 1000000 & wait; done"


def missing() -> str:
    """Why this machine cannot have hosts; "" if it can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces and mounts"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: iproute2, util-linux, e2fsprogs)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"])
    if tried.returncode or not Path("/dev/loop-control").exists():
        return "this kernel or container allows no namespaces or no loop devices"
    return ""


class _Apart:
    """Namespaces and their first process."""

    def __init__(self, script: str) -> None:
        self._holder = subprocess.Popen([*_APART, f"{script}\n{_RUNS}"], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"runs\n":
            raise OSError(f"no namespaces: the script ended with {self._holder.wait()}")
        (self.first,) = psutil.Process(self._holder.pid).children()

    def within(self, *command: object) -> list[str]:
        """The command, for all of these namespaces."""
        where = ["-t", str(self.first.pid), "--net", "--uts", "--mount", "--pid", f"--wd={ROOT}"]
        return ["nsenter", *where, "--", *map(str, command)]

    def net(self, *command: object) -> str:
        """For their network only. Raises CalledProcessError."""
        where = ["nsenter", "-t", str(self.first.pid), "--net", "--"]
        return subprocess.run(
            [*where, *map(str, command)], check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def kill(self) -> None:
        """All processes at once. They have ended on return."""
        self._holder.kill()
        self._holder.wait()
        until(self._has_ended)

    def _has_ended(self) -> bool:
        """Its new parent may take its time to notice."""
        try:
            return self.first.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


class Network:
    """Hosts n1, n2, ... with the addresses 10.88.0.1, 10.88.0.2, ... A with block starts and ends
    it, in a thread that lives as long."""

    def __init__(self, count: int, disk_bytes: int = DISK_BYTES) -> None:
        self.root, self._lock = _folder()
        self.hosts = [Host(self, number, disk_bytes) for number in range(1, count + 1)]
        lines = [f"{host.address} {host.name}" for host in self.hosts]
        (self.root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (self.root / "resolv.conf").touch()  # a name server would be out of reach
        self.switch: _Apart | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.close)
            self.switch = _Apart("ip link add br0 type bridge\nip link set br0 up")
            for host in self.hosts:
                host.start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            if host.apart is not None:
                host.kill()
            host.forget()
        if self.switch is not None:
            self.switch.kill()
        shutil.rmtree(self.root)
        self._lock.close()


class Host:
    """One host. Its disk outlives it, and is seen from inside only."""

    def __init__(self, network: Network, number: int, disk_bytes: int) -> None:
        self._network = network
        self.name, self.address = f"n{number}", f"10.88.0.{number}"
        self._hardware = f"02:00:00:00:00:{number:02x}"  # of all its lives
        #: In the network of the switch: the end of this host's cable; both ends of a second cable.
        self._cable, self._near, self._far = f"v{number}", f"x{number}", f"y{number}"
        self.disk = network.root / self.name
        self.disk.mkdir()
        self._image = network.root / f"{self.name}.img"
        with self._image.open("wb") as file:
            file.truncate(disk_bytes)
        subprocess.run(["mkfs.ext4", "-q", "-F", self._image], check=True)
        self.apart: _Apart | None = None
        self._spoiled: Process | None = None
        self._network_of_dead: int | None = None

    # -- its life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Boots; after a `kill` with the disk as it was."""
        self.forget()
        place = self._network.root
        self.apart = _Apart(
            f"hostname {self.name}\nip link set lo up\n"
            f"mount --bind {place}/hosts /etc/hosts\n"
            f"mount --bind {place}/resolv.conf /etc/resolv.conf\n"
            f"mount -o loop {self._image} {self.disk}"
        )
        self._plug("link", "add", self._cable, "type", "veth",
                   "peer", "name", "eth0", "address", self._hardware,
                   "netns", self.apart.first.pid)  # fmt: skip
        self.heal()
        self.apart.net("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.apart.net("ip", "link", "set", "eth0", "up")

    def kill(self) -> None:
        """Ends every process. Its network stays until `start`, so that the others hear of it at
        once, unless the host is cut off."""
        self._network_of_dead = os.open(f"/proc/{self._inside.first.pid}/ns/net", os.O_RDONLY)
        self._inside.kill()
        self.apart = None
        until(lambda: not subprocess.run(
            ["losetup", "-j", self._image], check=True, capture_output=True).stdout)  # fmt: skip

    def forget(self) -> None:
        """Ends the network of a killed host."""
        if self._network_of_dead is not None:
            self._mend()
            self._plug("link", "del", self._cable)
            os.close(self._network_of_dead)
            self._network_of_dead = None

    def lose_power(self) -> None:
        """As `kill`, but the others hear nothing. What the disk has not flushed is not lost."""
        self.cut()
        self.kill()

    # -- its disk ------------------------------------------------------------------------------

    def fill(self) -> None:
        """Leaves no room on the disk, until `empty`."""
        write = f"cat /dev/zero >>{self.disk}/filling 2>/dev/null; sync {self.disk}"
        self.run("sh", "-c", f"{write}; {write}")  # what is written late takes less than promised

    def empty(self) -> None:
        self.run("rm", f"{self.disk}/filling")

    def break_disk(self) -> None:
        """From now on each access fails with EIO. What was not flushed is lost."""
        self.run(sys.executable, "-c", _SHUTDOWN, self.disk)

    def mend_disk(self) -> None:
        """No process may use the disk meanwhile."""
        self.run("umount", self.disk)
        self.run("mount", "-o", "loop", self._image, self.disk)

    # -- its cable -----------------------------------------------------------------------------

    def cut(self) -> None:
        """Nothing comes through, and nobody is told."""
        self._mend()
        self._plug("link", "set", self._cable, "nomaster")

    def heal(self) -> None:
        """Of `cut` and `spoil`."""
        self._mend()
        self._plug("link", "set", self._cable, "master", "br0", "up")

    def mute(self, other: Host) -> None:
        """From now on nothing reaches the other host from here; what it says still arrives."""
        where = (other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
        self._inside.net("ip", "neighbour", "replace", *where)

    def unmute(self, other: Host) -> None:
        self._inside.net("ip", "neighbour", "del", other.address, "dev", "eth0")

    def slow(self, rate: str) -> None:
        """What it sends, like "100mbit"; "" ends it."""
        self._inside.net("tc", "qdisc", "del" if not rate else "replace", "dev", "eth0", "root",
                         *(("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
                           if rate else ()))  # fmt: skip

    def spoil(self, *, delay_ms: tuple[float, float] = (0, 0), loss: float = 0, twice: float = 0,
              seed: int = 1) -> None:  # fmt: skip
        """Each packet, both ways, is late by its own time, so that packets overtake each other;
        or is lost or comes twice, with these chances."""
        self.cut()
        self._plug("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        self._plug("link", "set", self._near, "up")
        self._plug("link", "set", self._far, "master", "br0", "up")
        self._spoiled = Process(self._switch, sys.executable, "-m", "tests.support.slowlink",
                                self._cable, self._near, *delay_ms, loss, twice, seed,
                                stdout=subprocess.PIPE)  # fmt: skip
        assert self._spoiled.stdout is not None
        assert self._spoiled.stdout.readline() == b"ready\n"

    def _mend(self) -> None:
        if self._spoiled is not None:
            self._spoiled.end()
            self._spoiled = None
            self._plug("link", "del", self._near)

    def _plug(self, *words: object) -> None:
        self._switch.net("ip", *words)

    @property
    def _switch(self) -> _Apart:
        assert self._network.switch is not None
        return self._network.switch

    # -- what runs there -----------------------------------------------------------------------

    @property
    def _inside(self) -> _Apart:
        assert self.apart is not None, f"{self.name} is down"
        return self.apart

    def run(self, *command: object, env: Mapping[str, str] | None = None) -> str:
        """What it prints. Raises CalledProcessError."""
        return subprocess.run(
            self._inside.within(*command), check=True, stdout=subprocess.PIPE, text=True, env=env
        ).stdout

    def retransmitted(self) -> int:
        """Packets that it sent once more, because nobody answered."""
        return self.counter("RetransSegs")

    def counter(self, name: str) -> int:
        """Of its network, like TCPOFOQueue: over all connections."""
        lines = self.run("cat", "/proc/net/netstat", "/proc/net/snmp").splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            if name in names.split():
                return int(values.split()[names.split().index(name)])
        raise KeyError(name)

    def begin(self, *command: object, **options: Any) -> Process:
        """`options` are those of Popen."""
        return Process(self._inside, *command, **options)


class Process:
    """One in namespaces, with the methods of Popen. Its number is that of this machine."""

    def __init__(self, apart: _Apart, *command: object, **options: Any) -> None:
        self._outer = subprocess.Popen(apart.within(*command), **options)
        self.stdin, self.stdout, self.stderr = (
            self._outer.stdin, self._outer.stdout, self._outer.stderr,
        )  # fmt: skip
        self.poll, self.wait = self._outer.poll, self._outer.wait

    @property
    def pid(self) -> int:
        """Raises ProcessLookupError after its end."""
        found = until(lambda: _children(self._outer.pid) or self.poll() is not None)
        if not isinstance(found, list):
            raise ProcessLookupError
        return found[0].pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _folder() -> tuple[Path, IO[bytes]]:
    """A folder of this process, locked while it lives. Removes those of dead ones."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        gone = contextlib.suppress(BlockingIOError, FileNotFoundError)  # it lives, or just went
        with gone, (left / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix="pcc-fresh-"))
    lock = (fresh / "lock").open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return fresh.rename(fresh.with_name(f"{_PREFIX}{secrets.token_hex(4)}")), lock
