"""Pull from trainers that are apart from the daemon: in another PID namespace."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import SMALL
from tests.support import fakegpu
from tests.support.gpunode import Node

ALONE = ("unshare", "--pid", "--fork", "--kill-child")

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's counts")


@pytest.fixture
def apart() -> Iterator[Node]:
    """The daemon is in a PID namespace that has no trainer."""
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace here (unshare)")
    with Node(*SMALL) as node:
        plain = node.daemon.command
        node.daemon.command = lambda *flags: [*ALONE, *plain(*flags)]  # type: ignore[method-assign]
        yield node.start()


@pytest.mark.parametrize("expands", [False, True])
def test_a_trainer_in_another_pid_namespace_is_pulled(apart: Node, expands: bool) -> None:
    trainer = apart.connect(expands=expands)
    for _ in range(3):
        trainer.step()
        last = trainer.checkpoint()
    assert trainer.wait_durable(last) == "durable"
    assert apart.transfer() == ("pull", "")
    assert trainer.faults.copies_to_host == 0
    trainer.step()
    trainer.checkpoint()
    trainer.kill()
    assert apart.connect(expands=expands).restored() in {(3, ""), (4, "")}


def test_no_byte_of_a_dead_one_counts(apart: Node) -> None:
    trainer = apart.connect()
    assert trainer.save() == "durable"
    trainer.step()
    apart.faults.hold_copies(after=1)
    trainer.checkpoint()
    apart.faults.wait_for(lambda f: f.held_copies > 0)
    trainer.kill()
    apart.faults.release_copies()
    apart.faults.wait_for(lambda f: f.open_mappings == 0)
    assert apart.faults.scrambled > 0
    assert apart.connect().restored() == (1, "")
