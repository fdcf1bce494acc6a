"""What a run has, and what no checkpoint gives back to the next run: it is refused as soon as the
client can see it, or named once."""

from __future__ import annotations

from typing import Any

import pytest

from pccheck import PCcheckClient, UnsupportedStateError
from tests.support.daemon import Daemon
from tests.support.programs import script

PACKED = """
import sys, torch
from torch import nn
from pccheck import PCcheckClient

class Packed(nn.Linear):  # as a quantized layer: its state dict has more than torch loads
    def __init__(self, size):
        super().__init__(size, size)
        self.weight.requires_grad_(False)
        self.scale = torch.ones(size)
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale

base = nn.Sequential(Packed(4), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(base[1].parameters())
with PCcheckClient(job="packed", socket=sys.argv[1]) as client:
    what = base if sys.argv[2] == "whole" else base[1]
    client.attach(model=what, optimizer=optimizer)
    done = client.restore()
    print("FROM", done.step)
    base(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(client.checkpoint(step=done.step + 1).result(60).step)
"""


def test_a_base_that_cannot_load_its_state_is_refused(daemon: Daemon) -> None:
    """When it is attached, and not by restore() of the next run."""
    with script(PACKED, daemon.socket, "whole") as run:
        said = run.finish()
    assert run.returncode == 1 and "FROM" not in said
    error = said.splitlines()[-1]
    assert "UnsupportedStateError: model.0.weight.absmax: load_state_dict() refuses" in error
    assert "Packed" in error and "attach the adapters alone" in error
    for step in (0, 1):
        with script(PACKED, daemon.socket, "adapters") as run:
            said = run.finish()
        assert run.returncode == 0, said
        assert {f"FROM {step}", f"{step + 1}"} <= set(said.splitlines())


def test_a_model_that_is_packed_later_is_refused_when_saved(daemon: Daemon) -> None:
    from torch import nn

    class Late(nn.Linear):
        packed = False

        def _save_to_state_dict(self, destination: Any, *args: Any) -> None:
            super()._save_to_state_dict(destination, *args)
            if self.packed:
                destination["absmax"] = self.weight.abs().max()

    model = Late(2, 2)
    with PCcheckClient(job="late", socket=daemon.socket) as client:
        client.attach(model=model)
        model.packed = True
        with pytest.raises(UnsupportedStateError, match=r"^model\.absmax: load_state_dict\(\)"):
            client.checkpoint(step=1)
