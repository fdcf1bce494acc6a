"""mpirun of Open MPI across hosts of our own. Its agent for remote hosts is this file: the agent
asks the process of the tests, which alone can begin a program in another host."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.nodes.cluster import Cluster
from tests.support.hosts import ROOT, Host

#: Where Open MPI is unpacked (`make mpi-check` sets it); "": the scenario of mpirun is left out.
MPI = os.environ.get("PCC_MPI", "")
PORT = "29500"
#: mpirun gives numbers; torch wants them under these names.
NAMES = "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"


class Agents:
    """Begins what the agents ask for, until the with block ends."""

    def __init__(self, hosts: Sequence[Host], environment: dict[str, str]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="mpi-")
        self.path = Path(self._folder.name) / "agents.sock"
        self._listener = socket.create_server(str(self.path), family=socket.AF_UNIX)
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._run, args=(link,), daemon=True).start()

    def _run(self, link: socket.socket) -> None:
        with link:
            host, command = link.makefile().read().split("\n", 1)
            begun = self._hosts[host].begin("sh", "-c", command, env=self._environment)
            link.sendall(str(begun.wait()).encode())


def mpirun(cluster: Cluster, ranks: int, *words: object) -> str:
    """What so many ranks on each host print."""
    environment = os.environ | {
        "OPAL_PREFIX": MPI, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
        "LD_LIBRARY_PATH": f"{MPI}/lib/x86_64-linux-gnu", "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    sockets = "".join(
        f"{host.name}) export PCCHECK_SOCKET={daemon.socket};; "
        for host, daemon in zip(cluster.hosts, cluster.daemons, strict=True)
    )
    training = shlex.join([sys.executable, "-m", "tests.nodes.training", *map(str, words)])
    script = f"case $(hostname) in {sockets} esac; export {NAMES}; exec {training}"
    exported = ("OPAL_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS",
                "GLOO_SOCKET_IFNAME", f"MASTER_ADDR={cluster.hosts[0].name}",
                f"MASTER_PORT={PORT}", "PCCHECK_JOB=job")  # fmt: skip
    with Agents(cluster.hosts, environment) as agents, tempfile.TemporaryFile() as output:
        launcher = cluster.hosts[0].begin(
            f"{MPI}/bin/mpirun.openmpi", "--prefix", MPI,
            "--mca", "plm_rsh_agent", f"{sys.executable} {__file__} {agents.path}",
            "--mca", "oob_tcp_if_include", "eth0", "-n", ranks * len(cluster.hosts),
            "--host", ",".join(f"{host.name}:{ranks}" for host in cluster.hosts),
            *(word for name in exported for word in ("-x", name)), "sh", "-c", script,
            env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        code = launcher.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert code == 0, f"mpirun ended with {code}:\n{text[-4000:]}"
    return text


def agent(path: str, host: str, *command: str) -> int:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.sendall(f"{host}\n{' '.join(command)}".encode())
        link.shutdown(socket.SHUT_WR)
        return int(link.recv(16) or b"1")


if __name__ == "__main__":
    sys.exit(agent(*sys.argv[1:]))
