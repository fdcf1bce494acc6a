"""A client warns where the daemon ends with the trainer, and keeps checkpoints in memory only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.daemon import Start
from tests.support.trainer import Connect

SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(("step", "every", "told"), [("0", 10, 1), ("1", 10, 0), ("0", 1, 0)])
def test_in_one_step_of_slurm(
    start_daemon: Start, start_trainer: Connect, monkeypatch: pytest.MonkeyPatch,
    step: str, every: int, told: int,
) -> None:  # fmt: skip
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    daemon = start_daemon()
    trainer = start_trainer(
        daemon, durable_every=every, environment=SLURM | {"SLURM_STEP_ID": step}
    )
    words = [one for one in trainer.warnings if "same Slurm step 12.0" in one]
    assert len(words) == len(trainer.warnings) == told


@pytest.mark.parametrize("step", ["0", "1"])
def test_a_checkpoint_that_asks_for_memory(
    start_daemon: Start, start_trainer: Connect, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """attach() does not know it."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    trainer = start_trainer(start_daemon(), environment=SLURM | {"SLURM_STEP_ID": step})
    told = []
    for to in ("disk", "memory", "memory"):
        trainer.step()
        trainer.checkpoint(to=to)
        told.append(len(trainer.warnings))
    assert told == ([0, 1, 1] if step == "0" else [0, 0, 0])
    assert all("same Slurm step 12.0" in one for one in trainer.warnings)


#: A daemon and a trainer in namespaces of their own, as in a container; prints the warnings.
BOTH = """
import os, socket, subprocess, sys, tempfile, warnings
from pathlib import Path

import torch

from pccheck import PCcheckClient

root = Path(tempfile.mkdtemp(prefix="pcc-"))
(root / "storage").mkdir()
daemon = subprocess.Popen([
    sys.executable, "-m", "pccheckd", "--storage", str(root / "storage"), "--dram", "64MiB",
    "--socket", str(root / "run" / "attach.sock"), "--allow-any-filesystem",
])
try:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        while daemon.poll() is None and probe.connect_ex(str(root / "run" / "attach.sock")):
            os.sched_yield()
    with warnings.catch_warnings(record=True) as caught:
        with PCcheckClient("job", socket=root / "run" / "attach.sock", durable_every=9) as client:
            client.attach(model=torch.nn.Linear(2, 2))
            client.attach(other=torch.nn.Linear(2, 2))
    print(*(one.message for one in caught), sep="\\n")
finally:
    daemon.terminate()
    daemon.wait()
"""


@pytest.mark.parametrize("service", [False, True])
def test_in_one_container(service: bool) -> None:
    alone = ("unshare", "--ipc", "--net", *(("--user", "--map-root-user") if os.geteuid() else ()))
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here (unshare)")
    environment = {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"}
    if service:  # the trainer has this variable as well, which is no harm
        environment["NOTIFY_SOCKET"] = "@nobody"
    ended = subprocess.run(
        [*alone, sys.executable, "-c", BOTH], env=environment, capture_output=True, text=True,
        timeout=800,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("PCcheck") == (not service), ended.stdout
    assert ("runs in the same container or pod (ipc:[" in ended.stdout) == (not service)
