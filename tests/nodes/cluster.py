"""Hosts with a daemon each, and launches of a training across them by torchrun."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from tests.support.daemon import Daemon
from tests.support.hosts import ROOT, Host, Network, Process
from tests.support.waiting import until

FLAGS = ("--chunk", "256KiB", "--block-bytes", "64KiB", "--dram", "16MiB")
RENDEZVOUS_PORT = 29500
_SAID = re.compile(
    r"rank (?P<rank>\d+) (?:begins at step (?P<begin>\d+) at (?P<when>[\d.]+) s"
    r"|step (?P<step>\d+) loss (?P<loss>-?[\d.]+(?:e[-+]\d+)?)|knows (?P<known>\d+))"
)


class NodeDaemon(Daemon):
    """A pccheckd in a host, with its storage on the host's disk."""

    def __init__(self, host: Host, *flags: str) -> None:
        super().__init__(*FLAGS, *flags, storage=host.disk / "storage")
        self._host = host

    def spawn(self, environment: dict[str, str], log: int, *flags: str) -> None:
        self.process = self._host.begin(
            *self.command(*flags), stdout=log, stderr=log, env=environment
        )


class Cluster:
    """`with Cluster(2) as cluster:` has two hosts whose daemons run."""

    def __init__(self, count: int, *flags: str) -> None:
        self._network = Network(count)
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

    def launch(self, *words: object, job: str = "job", **options: object) -> Launch:
        return Launch(self.hosts, self.daemons, words, job, **options)  # type: ignore[arg-type]


@dataclass(slots=True)
class Life:
    """What one process of a rank printed."""

    rank: int
    begin: int
    when_s: float
    losses: dict[int, str] = field(default_factory=dict)
    known: int = 0  #: the newest step that it knew to be global


class Launch:
    """torchrun on each host. The end of a with block kills it."""

    def __init__(
        self, hosts: Sequence[Host], daemons: Sequence[NodeDaemon], words: Sequence[object],
        job: str, *, ranks: int = 1, restarts: int = 0, static: bool = False, kept: bool = True,
    ) -> None:  # fmt: skip
        """`ranks` of each host. `static`: without a rendezvous. `kept`: torchrun starts ranks again
        with the same store, else with a new one."""
        self.ranks = ranks * len(hosts)
        self._outputs: list[Path] = []
        self._processes: list[Process] = []
        first = hosts[0].address
        for number, (host, daemon) in enumerate(zip(hosts, daemons, strict=True)):
            place = Path(tempfile.mkdtemp(prefix="launch-", dir=daemon.root))
            meet = (
                ["--rdzv-backend", "static", "--master-addr", first, "--node-rank", number,
                 "--master-port", RENDEZVOUS_PORT]
                if static
                else ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{RENDEZVOUS_PORT}",
                      "--rdzv-id", job, "--rdzv-conf", f"is_host={int(number == 0)}"]
            )  # fmt: skip
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", len(hosts),
                "--nproc-per-node", ranks, "--max-restarts", restarts,
                "--local-addr", host.address, *meet, "-m", "tests.nodes.training", *words,
                "--folder", place, *(["--apart"] if kept else []),
            ]  # fmt: skip
            environment = daemon.environment() | {
                "PCCHECK_SOCKET": str(daemon.socket), "PCCHECK_JOB": job, "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not kept)),
            }  # fmt: skip
            self._outputs.append(place / "output")
            with (place / "output").open("wb") as file:
                self._processes.append(
                    host.begin(*command, env=environment, stdout=file, stderr=subprocess.STDOUT)
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.end()

    def text(self) -> str:
        return "\n".join(output.read_text(errors="replace") for output in self._outputs)

    def lives(self) -> list[Life]:
        """In the order of their begins. A rank may begin again on another host."""
        found: list[Life] = []
        for output in self._outputs:
            here: dict[int, Life] = {}
            for said in _SAID.finditer(output.read_text(errors="replace")):
                rank = int(said["rank"])
                if said["begin"]:
                    here[rank] = Life(rank, int(said["begin"]), float(said["when"]))
                    found.append(here[rank])
                elif said["step"]:
                    here[rank].losses[int(said["step"])] = said["loss"]
                else:
                    here[rank].known = int(said["known"])
        return sorted(found, key=lambda life: life.when_s)

    def finish(self) -> list[Life]:
        """Waits for the end of all. Raises AssertionError unless they end well."""
        codes = [process.wait() for process in self._processes]
        assert not any(codes), f"torchrun ended with {codes}:\n{self.text()[-6000:]}"
        return self.lives()

    def reaches(self, step: int) -> None:
        """Waits until every rank has made the step."""
        until(lambda: self._at(step) == self.ranks, self.text)

    def _at(self, step: int) -> int:
        return len({life.rank for life in self.lives() if step in life.losses})
