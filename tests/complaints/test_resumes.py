"""What users of other checkpoint software have reported of resuming, and of runs that hang, tried
here: a test for each complaint. `test_named.py` names the tests of the others."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import Checkpoint, CheckpointState, PCcheckClient, Reader
from tests.support import programs, stall
from tests.support.daemon import Daemon, Start
from tests.support.torchrun import started

LIMIT_S = 60.0


class Loss(nn.Module):
    """A loss with a parameter of its own, which holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.model(x) * self.scale).square().mean()
        return found


def held() -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What is attached, and the tensors that others have got of it before the restore."""
    linear, norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))
    model = nn.Sequential(linear, norm, last)
    loss = Loss(model)
    optimizer = torch.optim.AdamW([*model.parameters(), loss.scale], lr=0.01)
    loss(torch.randn(4, 8)).backward()
    optimizer.step()
    moments = list(optimizer.state[linear.weight].values())
    views = [linear.weight, linear.weight.detach().view(-1), *model.state_dict().values(), *moments]
    return {"model": model, "loss": loss, "optimizer": optimizer}, views


def test_the_loss_kept_the_model_from_before_the_resume(daemon: Daemon) -> None:
    """sentence-transformers: a new model was loaded, and the loss went on with the first one. Here
    whoever has got a parameter, a view or a buffer before `restore()` sees the restored values."""
    torch.manual_seed(1)
    things, views = held()
    with PCcheckClient("held", socket=daemon.socket) as client:
        client.attach(**things)
        client.checkpoint(step=1).wait_durable(LIMIT_S)
    other, seen = held()
    assert not any(map(torch.equal, views[:2], seen[:2]))
    with PCcheckClient("held", socket=daemon.socket) as client:
        client.attach(**other)
        assert client.restore().step == 1
        assert all(map(torch.equal, views, seen))
        x = torch.randn(4, 8)
        for each in (things, other):
            each["loss"].eval()
        assert torch.equal(things["loss"](x), other["loss"](x))
        other["optimizer"].step()  # trains what the model and the loss have
        assert not torch.equal(views[0], seen[0]) and seen[0] is other["model"][0].weight


def tuned(socket: str, job: str, last: int, *, kill: bool = False) -> list[str]:
    """A fine-tuning that begins with the weights of another job, up to a step. The step from which
    it continues, and what it predicts before each step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with Reader("pretrained", socket=socket) as reader:
        model.load_state_dict(reader.open().read("model"))
    with PCcheckClient(job, socket=socket) as client:
        client.attach(model=model, optimizer=optimizer)
        first = client.restore().step + 1
        found = [str(first - 1)]
        for step in range(first, last + 1):
            found.append(model(torch.ones(1, 4)).item().hex())
            optimizer.zero_grad()
            model(torch.full((1, 4), float(step))).square().sum().backward()
            optimizer.step()
            client.checkpoint(step=step)
        if kill:
            client.flush(LIMIT_S)
            os.kill(os.getpid(), signal.SIGKILL)
    return found


TUNED = """
import sys
from tests.complaints.test_resumes import tuned
print(*tuned(sys.argv[1], "tuned", int(sys.argv[2]), kill=sys.argv[3] == "kill"))
"""


def test_a_restarted_fine_tuning_began_with_pretrained_weights(daemon: Daemon) -> None:
    """Enerzyme: restarting and fine-tuning were mixed up, and the optimizer began anew. Here the
    same command, killed and run again, continues with its own weights and moments."""
    with PCcheckClient("pretrained", socket=daemon.socket) as client:
        client.attach(model=nn.Linear(4, 1))
        client.checkpoint(step=7).wait_durable(LIMIT_S)
    with programs.script(TUNED, daemon.socket, 3, "kill") as killed:
        killed.finish()
        assert killed.returncode == -signal.SIGKILL
    with programs.script(TUNED, daemon.socket, 6, "") as resumed:
        said = resumed.finish().splitlines()[-1]
    whole = tuned(str(daemon.socket), "whole", 6)
    assert said.split() == ["3", *whole[4:]]


def test_a_disk_that_hung_held_training_for_hours(start_daemon: Start) -> None:
    """Orbax: a fifth of the saves hung until the run crashed. Here one step waits for
    `stall_limit_s`, later checkpoints are skipped, and what was durable is restored."""
    daemon = start_daemon("--dram", "8MiB", shim="slow:data:600000000")
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    client = PCcheckClient("hung", socket=daemon.socket)
    client.attach(model=model, optimizer=optimizer)

    def save(step: int) -> Checkpoint:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return client.checkpoint(step=step)

    for step in (1, 2):
        save(step).wait_durable(LIMIT_S)
    kept = model.weight.detach().clone()
    stall.shorten(client, 0.3)
    daemon.armed.touch()
    with pytest.warns(UserWarning, match="stall_limit_s"):
        handles = [save(step) for step in range(3, 30)]
    ends = {handle.state for handle in handles[9:]}
    assert ends == {CheckpointState.SKIPPED}, [(one.state, one.reason) for one in handles]
    daemon.kill()
    client.close()
    daemon.armed.unlink()
    daemon.start()
    with PCcheckClient("hung", socket=daemon.socket) as client:
        client.attach(model=model, optimizer=optimizer)
        assert client.restore().step == 2 and torch.equal(model.weight, kept)


def test_ranks_that_held_nothing_of_a_parameter_lost_its_moments(daemon: Daemon) -> None:
    """Fast-LLM: the optimizer was not loaded in another number of ranks. PyTorch: rank 0 alone
    could not load and broadcast it. Here some ranks hold nothing of a parameter."""
    last = ""
    for number, ranks in enumerate((3, 2, 4)):
        with started(daemon, "empty", ranks, "tests.support.emptyshards") as launcher:
            said = launcher.finish()
        assert launcher.returncode == 0, said
        lines = [line for line in said.splitlines() if line.startswith(("READ", "FROM", "AT"))]
        *restored, at = [line.partition(" ")[2] for line in lines]
        assert restored == [last] * (2 if number else 0), said
        assert at.startswith(f"{3 * (number + 1)} 24 "), said
        last = at
