"""`pccheckctl doctor --gpu` says of each GPU what the daemon answers a trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node, Start

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's faults")


def said(node: Node, *, blind: bool = False, **gpus: Any) -> list[dict[str, str]]:
    """`blind`: doctor has no driver."""
    environment = dict(os.environ)
    if not blind:
        environment |= fakegpu.environment(node.directory, **gpus)
    done = subprocess.run(
        [sys.executable, "-m", "pccheckctl", "--socket", str(node.daemon.socket), "doctor", "--gpu",
         "--json"],
        env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return [one for one in findings if one["check"] == "gpu pull"]


def test_a_daemon_that_pulls(start_node: Start) -> None:
    node = start_node(devices=2)
    found = said(node, devices=2)
    assert [one["level"] for one in found] == ["ok", "ok"]
    assert [one["found"][:5] for one in found] == ["GPU 0", "GPU 1"]
    assert not [*node.daemon.storage.rglob("*.pcc")]


def test_a_daemon_that_sees_one_of_two(start_node: Start) -> None:
    found = said(start_node(devices=2, visible="0"), devices=2)
    assert [one["level"] for one in found] == ["ok", "warning"]
    assert "the daemon does not see the trainer's GPU 1" in found[1]["found"]


def test_a_daemon_without_a_driver(start_node: Start) -> None:
    (found,) = said(start_node(blind=True))
    assert found["level"] == "warning"
    assert found["found"].startswith("the daemon offers push: ")


@pytest.mark.parametrize(
    ("without", "why"), [({"blind": True}, "has no driver"), ({"devices": 0}, "sees no GPU")]
)
def test_without_a_gpu_there_is_nothing_to_share(
    start_node: Start, without: dict[str, Any], why: str
) -> None:
    (found,) = said(start_node(), **without)
    assert found["level"] == "ok" and found["found"].startswith("not checked: ")
    assert why in found["found"]


def test_without_a_daemon_nothing_is_checked(start_node: Start) -> None:
    node = start_node()
    node.daemon.stop()
    (found,) = said(node)
    assert found["level"] == "ok" and "no daemon" in found["found"]
