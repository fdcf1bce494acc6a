"""Pull from trainers that are apart from the daemon: in another PID namespace, of another user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

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


def is_pulled(node: Node, **options: Any) -> None:
    trainer = node.connect(**options)
    for _ in range(3):
        trainer.step()
        last = trainer.checkpoint()
    trainer.step()
    assert trainer.wait_durable(last) == "durable"
    assert node.transfer() == ("pull", "")
    assert node.faults.bytes_to_host > 10 * trainer.faults.bytes_to_host  # proofs and samples
    trainer.kill()
    assert node.connect(**options).restored() == (3, "")


@pytest.mark.parametrize("expands", [False, True])
def test_a_trainer_in_another_pid_namespace_is_pulled(apart: Node, expands: bool) -> None:
    is_pulled(apart, expands=expands)


@pytest.mark.parametrize("expands", [False, True])
def test_a_trainer_of_another_user_is_pulled(node: Node, expands: bool) -> None:
    """The daemon of these tests is root's."""
    if os.geteuid():
        pytest.skip("needs root")
    node.daemon.open_to_everybody()
    is_pulled(node, expands=expands, uid=65534)


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
