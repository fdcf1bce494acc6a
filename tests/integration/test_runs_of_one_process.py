"""Several runs in one process: a warning if a second run continues from the first one by mistake,
and so trains nothing. Every run logs whether it was resumed."""

from __future__ import annotations

from tests.support.daemon import Daemon
from tests.support.programs import script

FOLDS = """
import sys, torch
from pccheck import PCcheckClient
for fold in range(2):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with PCcheckClient(job=sys.argv[1].format(fold)) as client:
        client.attach(model=model, optimizer=optimizer)
        first = client.restore().step + 1
        for step in range(first, 4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            client.checkpoint(step=step).wait_durable(60)
        print("fold", fold, "begins with step", first, flush=True)
"""
ROLLBACK = """
import torch
from pccheck import PCcheckClient
with PCcheckClient(job="back") as client:
    client.attach(model=torch.nn.Linear(4, 1))
    for step in (1, 2):
        client.checkpoint(step=step).wait_durable(60)
    client.restore(step=1)
"""
GROUP = """
import torch
from pccheck import PCcheckClient
clients = [PCcheckClient("group", rank, 2) for rank in range(2)]
for client in clients:
    client.attach(model=torch.nn.Linear(4, 1))
print([client.restore().step for client in clients], flush=True)
made = [client.checkpoint(step=1) for client in clients]
[handle.wait_global(60) for handle in made]
"""
OWN = "an earlier client of this process saved"
CONTINUES = "continues from step"


def said(daemon: Daemon, text: str, *words: object) -> str:
    with script(text, *words, environment={"PCCHECK_SOCKET": str(daemon.socket)}) as program:
        return program.finish()


def test_a_second_run_of_one_job_is_warned_of(daemon: Daemon) -> None:
    told = said(daemon, FOLDS, "folds")
    assert "fold 1 begins with step 4" in told
    assert told.count(OWN) == 1 and "PCcheckClient(job=...)" in told
    assert told.count("job 'folds' continues from step 3") == 1
    again = said(daemon, FOLDS, "folds")  # another process: its first restore is no mistake
    before, _, after = again.partition("fold 0")
    assert CONTINUES in before and OWN not in before
    assert CONTINUES in after and OWN not in after  # fold 0 had nothing to do, and saved nothing


def test_runs_with_names_of_their_own_are_not(daemon: Daemon) -> None:
    told = said(daemon, FOLDS, "fold-{}")
    assert "fold 1 begins with step 1" in told
    assert OWN not in told and CONTINUES not in told


def test_going_back_with_the_same_client_is_no_second_run(daemon: Daemon) -> None:
    told = said(daemon, ROLLBACK)
    assert "job 'back' continues from step 1" in told and OWN not in told


def test_one_rank_shows_that_a_job_continues(daemon: Daemon) -> None:
    first, second = said(daemon, GROUP), said(daemon, GROUP)
    assert "[0, 0]" in first and CONTINUES not in first
    assert "[1, 1]" in second and second.count(CONTINUES) == 1
