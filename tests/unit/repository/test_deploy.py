"""The files that run PCcheck on a cluster. `make slurm-check` runs those of Slurm on a real one;
`make kubernetes-check` compares the others with the schemas."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SLURM = ROOT / "deploy/slurm"


def run(script: str, folder: Path, code: int) -> tuple[int, str]:
    """A script of Slurm's, on a node where pccheckctl ends with this code."""
    program = folder / "pccheckctl"
    program.write_text(f'#!/bin/sh\necho "$@" >>"{folder}/asked"\nexit {code}\n')
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_UID": "1000", "SLURM_JOB_ID": "12"}
    done = subprocess.run([SLURM / script], env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (3, 0), (12, 12)])
def test_no_job_begins_where_pccheckd_does_not_answer(tmp_path: Path, code: int, ends: int) -> None:
    assert run("prolog.sh", tmp_path, code) == (ends, "")
    assert (tmp_path / "asked").read_text() == "status\n"


def test_the_end_of_a_job_waits_for_its_checkpoints(tmp_path: Path) -> None:
    assert run("epilog.sh", tmp_path, 0) == (0, "")
    code, told = run("epilog.sh", tmp_path, 1)
    assert code == 0 and "job 12: checkpoints of uid 1000 may not be on the disk" in told
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--uid 1000 wait --ended --timeout 2min"] * 2


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.s*")), ids=lambda path: path.name)
def test_scripts_are_valid(path: Path) -> None:
    subprocess.run(["sh", "-n", path], check=True)


def parts(name: str, kind: str) -> Any:
    """The pod of an object in a file of deploy/kubernetes."""
    objects = yaml.safe_load_all((ROOT / "deploy/kubernetes" / name).read_text())
    return next(one for one in objects if one["kind"] == kind)["spec"]["template"]["spec"]


def test_the_pods_and_the_image_have_one_socket_and_one_group() -> None:
    daemon, job = parts("pccheckd.yaml", "DaemonSet"), parts("train.yaml", "Job")
    image = (ROOT / "Containerfile").read_text()
    for pod in (daemon, job):
        (socket,) = (one for one in pod["volumes"] if one["name"] == "socket")
        (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "socket")
        assert socket["hostPath"]["path"] == mount["mountPath"] == "/run/pccheck"
    assert "PCCHECK_SOCKET=/run/pccheck/attach.sock" in image
    (gid,) = {int(one) for one in re.findall(r"--gid (\d+)", image)}
    assert daemon["securityContext"] == {"runAsUser": gid, "runAsGroup": gid}
    assert job["securityContext"]["supplementalGroups"] == [gid]
    (container,) = daemon["containers"]
    (storage,) = re.findall(r"PCCHECK_STORAGE=(\S+)", image)
    assert storage in [one["mountPath"] for one in container["volumeMounts"]]


@pytest.mark.parametrize(("node", "number"), [("node1", "0"), ("node2", "1")])
def test_a_node_has_the_same_ranks_in_every_start(tmp_path: Path, node: str, number: str) -> None:
    (container,) = parts("train.yaml", "Job")["containers"]
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    nodes = next(one["value"] for one in container["env"] if one["name"] == "NODES")
    said = subprocess.run(
        [*container["command"], *container["args"]], check=True, capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": nodes, "NODE": node},
    ).stdout  # fmt: skip
    assert f"--nnodes 2 --node-rank {number} " in said and "--master-addr node1 " in said
