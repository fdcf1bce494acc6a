"""Each integration takes durable_every: its steps stay in memory, and outlive a killed training."""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck import CheckpointState, PCcheckClient
from pccheck_native import catalog
from tests.frameworks.forked import Forks, printed
from tests.integration.test_group import COUNTS, end, ranks
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, expected

EVERY = 1000  # the disk gets none before the training ends, or dies
KILL_AT = 5


def needs(name: str) -> pytest.MarkDecorator:
    missing = not importlib.util.find_spec(name)
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


@pytest.fixture
def daemon(start_daemon: Start) -> Daemon:
    """Its log names what is replaced in memory."""
    return start_daemon("--log-level", "debug")


def replaced(daemon: Daemon) -> list[int]:
    """Steps that newer ones have replaced in memory."""
    found = re.findall(r"step (\d+) was superseded: .* is in memory", daemon.log.read_text())
    return [int(step) for step in found]


def on_disk(daemon: Daemon) -> list[int]:
    return sorted(found.id.step for found in catalog.scan(daemon.storage).checkpoints)


@pytest.mark.parametrize(
    ("name", "options", "begins", "last"),
    [
        pytest.param(
            "accelerate", {"stateful": True}, r"FROM (\d+)", 21, marks=needs("accelerate")
        ),
        pytest.param("deepspeed", {"folder": ""}, r"FROM (\d+)", 0, marks=needs("deepspeed")),
        pytest.param(
            "hf", {"output_dir": ""}, r"RESUME checkpoint-(\d+)", 21, marks=needs("transformers")
        ),
    ],
)
def test_a_killed_training_goes_on_from_memory(
    daemon: Daemon, tmp_path: Path, name: str, options: dict[str, Any], begins: str, last: int
) -> None:
    options = {key: value or str(tmp_path) for key, value in options.items()}
    options |= {"socket": str(daemon.socket), "every": 1, "durable_every": EVERY}
    with Forks(f"tests.frameworks.{name}_training") as forks:
        assert forks.run(tmp_path / "killed", kill_at=KILL_AT, **options) == [-signal.SIGKILL]
        assert KILL_AT - 2 in replaced(daemon)
        assert forks.run(tmp_path / "resumed", **options) == [0]
    said = "\n".join(printed(tmp_path / "resumed"))
    found = re.search(f"^{begins}", said, re.MULTILINE)
    assert found is not None, said
    assert int(found[1]) in (KILL_AT, KILL_AT - 1)  # the last one may not have been copied
    assert int(found[1]) in on_disk(daemon)
    assert last in (0, on_disk(daemon)[-1])  # close() has written it


@needs("lightning")
def test_lightning(daemon: Daemon, tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    from pccheck.integrations.lightning import PCcheckCallback

    saver = PCcheckCallback(1, job="job", socket=daemon.socket, durable_every=EVERY)
    lightning.Trainer(
        max_steps=6, accelerator="cpu", callbacks=[saver], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(BoringModel())  # fmt: skip
    assert set(replaced(daemon)) & {1, 2, 3}
    assert on_disk(daemon)[-1] == 6


def test_a_tag_of_deepspeed_in_memory_only_is_found(daemon: Daemon) -> None:
    from pccheck.integrations.deepspeed_files import tags_of

    with PCcheckClient("job", socket=daemon.socket, durable_every=EVERY) as client:
        client.checkpoint([torch.zeros(3)], step=7, metadata={"tag": "best"}).wait_copied(60)
        assert on_disk(daemon) == []
        assert tags_of(client) == {"best": 7}


def test_dcp(daemon: Daemon) -> None:
    from pccheck.integrations import dcp

    with PCcheckClient("job", socket=daemon.socket, durable_every=EVERY) as client:
        state = {"a": torch.zeros(1000)}
        for step in (1, 2, 3):
            handle = dcp.async_save(state, client=client, step=step)
            handle.wait_copied(60)
            state["a"] += 1
        assert handle.state is CheckpointState.COPIED and on_disk(daemon) == []
        assert dcp.load(state, client=client).step == 3
        assert state["a"].tolist() == [2.0] * 1000
        dcp.save(state, client=client, step=4)  # waits for the disk
        assert on_disk(daemon)[-1] == 4
    assert set(replaced(daemon)) & {1, 2}


@pytest.mark.parametrize("world", [1, 2])
def test_dcp_after_a_kill(start_daemon: Start, start_trainer: Connect, world: int) -> None:
    """The disk is slow: it has step 1 when all ranks die."""
    from pccheck.integrations import dcp

    daemon = start_daemon("--slots", "4", "--chunk", "64KiB", "--max-bandwidth", "1MiB")
    group = ranks(start_trainer, daemon, "0", world, durable_every=EVERY)
    for trainer in group:
        trainer.step()
        trainer.post("checkpoint", to="disk")
    for trainer in group:
        assert trainer.wait_global(trainer.answer()) in ("durable", "global")
    for trainer in group * 3:
        trainer.step()
        trainer.wait_copied(trainer.checkpoint())
    end(group)
    state = {"model": {f"parts.{i}": torch.zeros(count) for i, count in enumerate(COUNTS)}}
    with PCcheckClient("job", socket=daemon.socket) as client:
        assert dcp.load(state, client=client).step == 4
    for i, count in enumerate(COUNTS):
        assert torch.equal(state["model"][f"parts.{i}"], expected(4, i, count))
