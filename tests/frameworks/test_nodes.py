"""Trainings with frameworks whose two ranks run on two nodes, killed with SIGKILL, continue bit for
bit. `test_lightning.py` has that of Lightning."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck import PCcheckClient, UsageError
from pccheck.integrations import dcp
from tests.frameworks.forked import Forks, printed
from tests.support.daemon import Daemon

KILLED = -signal.SIGKILL
HF: dict[str, Any] = {"settings": {"ddp_backend": "gloo"}}


@pytest.mark.parametrize(
    ("framework", "options", "kill_at", "resumed"),
    [
        ("accelerate", {"every": 2}, 6, "FROM 6"),
        ("deepspeed", {"stage": 0}, 5, "FROM 4"),
        ("deepspeed", {"stage": 2}, 5, "FROM 4"),
        ("deepspeed", {"stage": 3}, 5, "FROM 4"),
        ("hf", HF, 5, "RESUME checkpoint-4"),
    ],
)
def test_a_killed_training_continues_with_the_same_numbers(
    start_daemon: Callable[..., Daemon], tmp_path: Path,
    framework: str, options: dict[str, Any], kill_at: int, resumed: str,
) -> None:  # fmt: skip
    sockets = [str(start_daemon().socket) for _ in range(2)]
    place = "output_dir" if framework == "hf" else "folder"

    with Forks(f"tests.frameworks.{framework}_training") as forks:

        def run(name: str, code: int = 0, **more: Any) -> list[list[str]]:
            output = tmp_path / f"printed-{name}"
            folder = {} if framework == "accelerate" else {place: str(tmp_path / name[:5])}
            codes = forks.run(output, ranks=2, **folder, **options, **more)
            told = [printed(output, rank) for rank in range(2)]
            assert codes == [code] * 2, "\n".join(line for lines in told for line in lines)
            return told

        plain = run("plain")
        run("saved", KILLED, kill_at=kill_at, socket=sockets)
        again = run("saved-again", socket=sockets)
    for before, after in zip(plain, again, strict=True):
        assert any(line.startswith(resumed) for line in after), after
        losses = _losses(after)
        assert losses and losses == _losses(before)[-len(losses) :]
    assert _losses(plain[0]) != _losses(plain[1]) or framework == "hf"  # which prints on rank 0


def test_a_state_that_other_nodes_would_load_is_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    state = {"tensor": torch.ones(1)}
    with PCcheckClient("job", rank=0, world_size=2, socket=daemon.socket) as client:
        for call in (
            lambda: dcp.async_save(state, client=client, step=1),
            lambda: dcp.save(state, client=client, step=1),
            lambda: dcp.PCcheckWriter(client, 1),
            lambda: dcp.load(state, client=client),
        ):
            with pytest.raises(UsageError, match=r"several nodes.*attach model and optimizer"):
                call()


def _losses(told: list[str]) -> list[str]:
    return [line for line in told if line.startswith("LOSS") or line[:1].isdigit()]
