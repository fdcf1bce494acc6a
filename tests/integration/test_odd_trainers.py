"""Unusual models, optimizers and processes: they are saved and restored, or the error names
them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import PCcheckClient
from tests.support.daemon import Daemon
from tests.support.programs import Program
from tests.unit.pccheck.restoring.test_inplace import Float32, Named, OwnBoth
from tests.unit.pccheck.state.test_flatten import same


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "part", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 4))]
)
def test_a_part_of_torch_jit_is_saved_and_restored(daemon: Daemon, part: Any) -> None:
    """The parts of such a module are not dicts."""
    saved = dict[str, Any]()
    for restores in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), part(nn.Linear(4, 4)))
        optimizer = torch.optim.AdamW(model.parameters())
        with PCcheckClient("jit", socket=daemon.socket) as client:
            client.attach(model=model, optimizer=optimizer)
            assert client.restore().step == 2 * restores
            if restores:
                assert same(dict(model.state_dict()), saved)
            for step in (1, 2):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                client.checkpoint(step=step).wait_durable(60)
        saved = {key: value.clone() for key, value in model.state_dict().items()}


class Sharing(torch.optim.Optimizer):
    """A wrapper that shares state and groups with the optimizer inside."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.Adam(parameters)
        super().__init__(self.inner.param_groups, {})
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("cls", [Named, OwnBoth, Sharing])
def test_an_optimizer_of_its_own_kind_goes_on_as_if_nothing_had_happened(
    daemon: Daemon, cls: type[Float32]
) -> None:
    def kit() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        return model, cls(model.parameters())

    def train(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    (straight, whole) = kit()
    for step in (1, 2):
        train(straight, whole)
        model, optimizer = kit()
        with PCcheckClient("own", socket=daemon.socket) as client:
            client.attach(model=model, optimizer=optimizer)
            assert client.restore().step == step - 1
            train(model, optimizer)
            client.checkpoint(step=step).wait_durable(60)
    assert same(dict(straight.state_dict()), dict(model.state_dict()))
    assert same(whole.state_dict(), optimizer.state_dict())


def spawned(daemon: Daemon, how: str, method: str = "fork") -> list[str]:
    with Program("tests.support.spawned", daemon.socket, how, method) as program:
        printed = program.finish()
        assert program.returncode == 0, printed
    return sorted(re.findall(r"(?m)^\d: .*", printed))


def test_ranks_of_mp_spawn_take_their_rank_from_the_process_group(daemon: Daemon) -> None:
    assert spawned(daemon, "late", "spawn") == ["0: 0 0", "1: 0 1"]
    assert spawned(daemon, "late") == ["0: 1 0", "1: 1 1"]


def test_a_rank_that_connects_before_the_process_group_is_told_how(daemon: Daemon) -> None:
    texts = spawned(daemon, "early")
    assert sum("rank= and world_size=, or make the client after init" in one for one in texts) == 1


def test_zero_of_torch_goes_on_bit_for_bit_with_its_scheduler(daemon: Daemon) -> None:
    """Its own state_dict() gathers the state of all ranks, and the scheduler changes its groups,
    not those of the optimizer inside."""
    assert spawned(daemon, "zero") == ["0: True", "1: True"]


def test_the_exchange_of_parameters_belongs_to_the_step_of_zero(daemon: Daemon) -> None:
    """On each rank the parameters of the other rank are still those of step 1."""
    assert spawned(daemon, "interrupted") == ["0: 1 True", "1: 1 True"]
