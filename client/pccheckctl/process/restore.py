"""`pccheckctl restore-process`: makes a process again from its snapshot, and stays its parent."""

from __future__ import annotations

import argparse
from pathlib import Path

from pccheck_process import restoring
from pccheck_process.becoming import become_user
from pccheckctl import source
from pccheckctl.output.documents import answer, note


def run(arguments: argparse.Namespace) -> int:
    """The exit code of the process, 128 and the number of a signal; 0 with --detach."""
    owner = restoring.owner(source.files(arguments), arguments.job, arguments.uid)
    become_user(owner)  # what the image says of itself is its owner's word
    wanted = restoring.RestoreWanted(
        job=arguments.job, step=arguments.step,
        stdout=arguments.stdout and Path(arguments.stdout),
        cgroup=arguments.cgroup and Path(arguments.cgroup), own_pids=arguments.own_pids,
        gpus=arguments.gpus, force=arguments.force, note=note,
    )  # fmt: skip
    signals = restoring.Signals()
    restored = restoring.restore_process(source.files(arguments), wanted)
    found = {"schema": 1, "pid": restored.pid, "step": restored.step, "job": arguments.job}
    inside = f" (pid {restored.receiver} is process 1 there)" if arguments.own_pids else ""
    text = f"process {restored.pid} goes on from step {restored.step}{inside}"
    if arguments.detach:
        answer(arguments, found, lambda: text)
        return 0
    signals.pass_on(restored)
    if arguments.json:
        answer(arguments, found, str)
    else:
        note(text)
    return restored.wait()
