"""Slurm across hosts of our own, with the scripts of deploy/slurm as a cluster would use them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.nodes.cluster import Cluster, Life, lives_in
from tests.support.hosts import ROOT, Host
from tests.support.waiting import until

#: Where Slurm and munge are unpacked (`make slurm-check` sets it); "": its scenarios are left out.
SLURM = os.environ.get("PCC_SLURM", "")
LIBRARIES = ":".join(
    f"{SLURM}/{one}"
    for one in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu",
                "usr/lib/x86_64-linux-gnu/slurm-wlm")
)  # fmt: skip
DEPLOY = ROOT / "deploy/slurm"
OWN_DAEMON = f"place=/mnt/local/pccheck; . {DEPLOY}/own-daemon.sh"
CONFIGURATION = """
ClusterName=check
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
PluginDir={plugins}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
PrologFlags=Alloc
Prolog={deploy}/prolog.sh
Epilog={deploy}/epilog.sh
ReturnToService=2
SlurmctldTimeout=30
KillWait=5
MinJobAge=600
NodeName={names} CPUs=8
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm:
    """On the hosts of a cluster. The first host has the controller."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._folder = tempfile.TemporaryDirectory(prefix="slurm-")
        self.root = Path(self._folder.name)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        hosts = self._cluster.hosts
        with ExitStack() as stack:
            stack.callback(self._folder.cleanup)
            (self.root / "slurm.conf").write_text(CONFIGURATION.format(
                first=hosts[0].name, names=",".join(host.name for host in hosts), root=self.root,
                plugins=f"{SLURM}/usr/lib/x86_64-linux-gnu/slurm-wlm", deploy=DEPLOY,
            ))  # fmt: skip
            (self.root / "state").mkdir()
            key = self.root / "munge.key"
            key.write_bytes(secrets.token_bytes(64))
            key.chmod(0o400)
            self._begin(
                stack, hosts[0], "munged", "--foreground", "--force", f"--key-file={key}",
                f"--socket={self.root}/munge.sock", f"--pid-file={self.root}/munged.pid",
                f"--log-file={self.root}/munged.log", f"--seed-file={self.root}/munged.seed",
            )  # fmt: skip
            until((self.root / "munge.sock").exists)
            self._begin(stack, hosts[0], "slurmctld-wlm", "-D", "-c")
            for host, daemon in zip(hosts, self._cluster.daemons, strict=True):
                _furnish(host, daemon.socket.parent)
                stepd = f"{SLURM}/usr/sbin/slurmstepd-wlm"
                self._begin(stack, host, "slurmd-wlm", "-D", "-N", host.name, "-d", stepd)
            until(lambda: self._idle() == len(hosts), self.logs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin(self, stack: ExitStack, host: Host, program: str, *words: object) -> None:
        log = stack.enter_context((self.root / f"{program}-{host.name}.out").open("wb"))
        process = host.begin(
            f"{SLURM}/usr/sbin/{program}", *words, env=self.environment(), stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        stack.callback(process.end)

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "SLURM_CONF": str(self.root / "slurm.conf"), "LD_LIBRARY_PATH": LIBRARIES,
            "PATH": f"{SLURM}/usr/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
            "PCCHECK_JOB": "job",
        }  # fmt: skip

    def ask(self, *command: object) -> str:
        """What a command of Slurm prints, on the first host."""
        return self._cluster.hosts[0].run(*command, env=self.environment())

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.root.glob("*.out"))
        )

    def _idle(self) -> int:
        try:
            return len(self.ask("sinfo", "-h", "-N", "-t", "idle").splitlines())
        except subprocess.CalledProcessError:
            return 0

    # -- jobs ----------------------------------------------------------------------------------

    def submit(self, ranks: int, *command: object, more: str = "") -> int:
        """The number of a job with so many ranks on each host: train.sbatch, with the lines that a
        user would change. `more`: a line before its last command."""
        text = (DEPLOY / "train.sbatch").read_text()
        lines = [
            line
            for line in text.replace("ntasks-per-node=8", f"ntasks-per-node={ranks}").splitlines()
            if "gpus-per-node" not in line and "cpus-per-task" not in line
        ]
        at = next(at for at, line in enumerate(lines) if line.startswith("srun "))
        script = self.root / "train.sbatch"
        script.write_text("\n".join([*lines[:at], more, *lines[at:], ""]))
        where = ("--parsable", f"--nodes={len(self._cluster.hosts)}", f"--chdir={self.root}")
        return int(self.ask("sbatch", *where, script, *command))

    def states(self) -> dict[int, str]:
        """Of all jobs that the controller knows."""
        lines = self.ask("squeue", "-h", "-t", "all", "-o", "%A %T").splitlines()
        return {int(number): state for number, state in map(str.split, lines)}

    def texts(self) -> list[str]:
        """What the jobs have printed, in their order."""
        paths = sorted(self.root.glob("train-*.out"), key=lambda one: int(one.stem.split("-")[1]))
        return [path.read_text(errors="replace") for path in paths]

    def lives(self) -> list[Life]:
        return lives_in(*self.texts())

    def reaches(self, step: int, count: int) -> None:
        """Waits until so many ranks have made the step."""

        def at() -> bool:
            return len({one.rank for one in self.lives() if step in one.losses}) == count

        until(at, lambda: "\n".join([*self.texts(), self.logs()])[-8000:])

    def ends(self) -> list[str]:
        """Waits until no job is left; how they ended, in their order."""
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        until(
            lambda: not set(going) & set(self.states().values()),
            lambda: "\n".join([str(self.states()), *self.texts(), self.logs()])[-8000:],
        )
        return [state for _, state in sorted(self.states().items())]


def _furnish(host: Host, sockets: Path) -> None:
    """The usual places of a node: a /run with the daemon's socket, a program, and a disk."""
    programs = Path(sys.executable).parent
    host.run("sh", "-ec", "; ".join([
        "mount -t tmpfs none /run", "mkdir /run/pccheck", f"mount --bind {sockets} /run/pccheck",
        "mount -t tmpfs none /opt", "mkdir -p /opt/pccheck", f"ln -s {programs} /opt/pccheck/bin",
        "mount -t tmpfs none /mnt", "mkdir /mnt/local", f"mount --bind {host.disk} /mnt/local",
    ]))  # fmt: skip


def training(*words: object) -> Sequence[object]:
    return (sys.executable, "-m", "tests.nodes.training", *words)
