"""Models, optimizers and processes unlike the usual ones: saved, restored, and named if not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import PCcheckClient
from tests.support.daemon import Daemon
from tests.unit.test_flatten import same

Start = Callable[..., Daemon]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "part", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 4))]
)
def test_a_part_of_torch_jit_is_saved_and_restored(start_daemon: Start, part: Any) -> None:
    """The parts of such a module are no dicts."""
    daemon, saved = start_daemon(), dict[str, Any]()
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
                client.checkpoint(step=step).wait_durable(30)
        saved = {key: value.clone() for key, value in model.state_dict().items()}
