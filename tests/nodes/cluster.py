"""Hosts with a daemon each, and launches of a training across them by torchrun."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from tests.nodes.forked import Forked
from tests.support.daemon import Daemon, build
from tests.support.hosts import DISK_BYTES, ROOT, Host, Network, Process
from tests.support.waiting import until

FLAGS = ("--chunk", "256KiB", "--block-bytes", "64KiB", "--dram", "16MiB")
RENDEZVOUS_PORT = 29500
_SAID = re.compile(
    r"rank (?P<rank>\d+) (?:begins at step (?P<begin>\d+) at (?P<when>[\d.]+) s"
    r"|step (?P<step>\d+) loss (?P<loss>-?[\d.]+(?:e[-+]\d+)?)"
    r"|knows (?P<known>\d+)|is (?P<done>done)|holds (?P<held>\w+) at step (?P<at>\d+))"
)


class NodeDaemon(Daemon):
    """A pccheckd in a host, with its storage on the host's disk."""

    def __init__(self, host: Host, *flags: str) -> None:
        super().__init__(*FLAGS, *flags, storage=host.disk / "storage")
        self._host = host
        self._clock = self.root / "clock"

    def set_clock(self, ahead_s: int) -> None:
        """Steps the daemon's wall clock."""
        fresh = self._clock.with_suffix(".new")
        fresh.write_text(str(ahead_s))
        fresh.rename(self._clock)

    def spawn(self, environment: dict[str, str], log: int, *flags: str) -> None:
        environment |= {"LD_PRELOAD": str(build("clockshim")), "PCC_CLOCK": str(self._clock)}
        self.process = self._host.begin(
            *self.command(*flags), stdout=log, stderr=log, env=environment
        )


class Cluster:
    """`with Cluster(2) as cluster:` has two hosts whose daemons run."""

    def __init__(self, count: int, *flags: str, disk_bytes: int = DISK_BYTES) -> None:
        self._network = Network(count, disk_bytes)
        self.hosts = self._network.hosts
        self.daemons = [NodeDaemon(host, *flags) for host in self.hosts]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._network)
            for daemon in self.daemons:
                stack.enter_context(daemon).start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def restart(self, host: Host) -> None:
        """A host that was killed boots, and so does its daemon."""
        host.start()
        self.daemons[self.hosts.index(host)].start()

    def launch(
        self, *words: object, job: str = "job", order: Sequence[int] = (), **options: object
    ) -> Launch:
        """`order`: of the hosts that take part, if not all; the ranks follow it."""
        order = order or range(len(self.hosts))
        hosts, daemons = ([some[at] for at in order] for some in (self.hosts, self.daemons))
        return Launch(hosts, daemons, words, job, **options)  # type: ignore[arg-type]


def torchrun(
    host: Host, config: Mapping[str, Any], words: Sequence[object],
    environment: Mapping[str, str], output: Path,
) -> Process:  # fmt: skip
    """The command, with the configuration that LaunchConfig has."""
    command: list[object] = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", config["max_nodes"],
        "--nproc-per-node", config["nproc_per_node"], "--max-restarts", config["max_restarts"],
        "--local-addr", config["local_addr"],
    ]  # fmt: skip
    if config["rdzv_backend"] == "static":
        address, _, port = config["rdzv_endpoint"].partition(":")
        command += ["--node-rank", config["rdzv_configs"]["rank"]]
        command += ["--master-addr", address, "--master-port", port]
    else:
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", config["rdzv_endpoint"]]
        command += ["--rdzv-id", config["run_id"]]
        command += ["--rdzv-conf", f"is_host={config['rdzv_configs']['is_host']}"]
    with output.open("wb") as file:
        return host.begin(
            *command, "-m", "tests.nodes.training", *words,
            env=environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


@dataclass(slots=True)
class Life:
    """What one process of a rank printed."""

    rank: int
    begin: int
    when_s: float
    losses: dict[int, str] = field(default_factory=dict)
    known: int = 0  #: the newest step that it knew to be global
    held: dict[int, str] = field(default_factory=dict)  #: at each step, also the first one
    done: bool = False


def lives_in(*texts: str) -> list[Life]:
    """In the order of their begins. A rank may begin again on another host, in another text."""
    found: list[Life] = []
    for text in texts:
        here: dict[int, Life] = {}
        for said in _SAID.finditer(text):
            rank = int(said["rank"])
            if said["begin"]:
                here[rank] = Life(rank, int(said["begin"]), float(said["when"]))
                found.append(here[rank])
            elif said["step"]:
                here[rank].losses[int(said["step"])] = said["loss"]
            elif said["known"]:
                here[rank].known = int(said["known"])
            elif said["held"]:
                here[rank].held[int(said["at"])] = said["held"]
            else:
                here[rank].done = True
    return sorted(found, key=lambda life: life.when_s)


class Launch:
    """torchrun on each host. The end of a with block kills it."""

    def __init__(
        self, hosts: Sequence[Host], daemons: Sequence[NodeDaemon], words: Sequence[object],
        job: str, *, ranks: int = 1, restarts: int = 0, static: bool = False, kept: bool = True,
        command: bool = False,
    ) -> None:  # fmt: skip
        """`ranks` of each host. `static`: without a rendezvous. `kept`: torchrun starts ranks again
        with the same store, else with a new one. `command`: torchrun is the command, not forked."""
        self.ranks = ranks * len(hosts)
        self._outputs: list[Path] = []
        self._processes: list[Process | Forked] = []
        first = hosts[0].address
        for number, (host, daemon) in enumerate(zip(hosts, daemons, strict=True)):
            place = Path(tempfile.mkdtemp(prefix="launch-", dir=daemon.root))
            said = [*words, *(["--apart"] if kept else []), "--folder", place]
            config = {
                "min_nodes": len(hosts), "max_nodes": len(hosts), "nproc_per_node": ranks,
                "max_restarts": restarts, "local_addr": host.address, "run_id": job,
                "rdzv_backend": "static" if static else "c10d",
                "rdzv_endpoint": f"{first}:{RENDEZVOUS_PORT}",
                "rdzv_configs": {"rank": number} if static else {"is_host": str(number == 0)},
            }  # fmt: skip
            environment = daemon.environment() | {
                "PCCHECK_SOCKET": str(daemon.socket), "PCCHECK_JOB": job, "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not kept)),
            }  # fmt: skip
            self._outputs.append(place / "output")
            start = torchrun if command else Forked
            self._processes.append(start(host, config, said, environment, place / "output"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                launcher = psutil.Process(process.pid)
                for one in (launcher, *launcher.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.end()

    def text(self) -> str:
        return "\n".join(output.read_text(errors="replace") for output in self._outputs)

    def lives(self) -> list[Life]:
        return lives_in(*(output.read_text(errors="replace") for output in self._outputs))

    def generations(self) -> list[list[Life]]:
        """The lives that began together. The last one may lack ranks."""
        found: list[list[Life]] = []
        for life in self.lives():
            if (
                not found
                or len(found[-1]) == self.ranks
                or life.rank in {x.rank for x in found[-1]}
            ):
                found.append([])
            found[-1].append(life)
        return found

    def finish(self) -> list[Life]:
        """Waits for the end of all. Raises AssertionError unless the ranks end well. (An agent that
        leaves later than that of its store may fail, also of torchrun.)"""
        codes = [process.wait() for process in self._processes]
        done = {life.rank for life in self.lives() if life.done}
        assert len(done) == self.ranks, f"torchrun ended with {codes}:\n{self.text()[-6000:]}"
        return self.lives()

    def reaches(self, step: int) -> None:
        """Waits until every rank has made the step, or a launcher has ended."""
        until(lambda: self._at(step) == self.ranks or self.has_ended(), self.text)

    def has_ended(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def _at(self, step: int) -> int:
        return len({life.rank for life in self.lives() if step in life.losses})
