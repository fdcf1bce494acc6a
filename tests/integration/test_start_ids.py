"""Each start of a job has a random id, which its checkpoints keep."""

from __future__ import annotations

import json

import pytest

from pccheck_native import catalog
from pccheck_native.identity import UNKNOWN
from pccheckctl import cli
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect


def ids(daemon: Daemon) -> dict[int, bytes]:
    """By step, the id of the start that saved it."""
    return {one.id.step: one.id.start for one in catalog.scan(daemon.storage).checkpoints}


def test_a_start_keeps_its_id_over_a_restart_of_the_daemon(
    start_daemon: Start, start_trainer: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = start_daemon("--slots", "5", "--keep", "3")
    first = start_trainer(daemon)
    first.step()
    assert first.wait_durable(first.checkpoint()) == "durable"
    before = ids(daemon)[1]
    daemon.stop()
    daemon.start()
    assert first.wait_durable(first.connects_again()) == "durable"
    assert set(ids(daemon).values()) == {before}
    assert before != UNKNOWN
    first.kill()

    second = start_trainer(daemon)
    second.restore()
    step = second.step()
    assert second.wait_durable(second.checkpoint()) == "durable"
    assert ids(daemon)[step] not in (before, UNKNOWN)
    assert cli.main(["--socket", str(daemon.socket), "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {one["step"]: one["start"] for one in shown["checkpoints"]} == {
        step: found.hex() for step, found in ids(daemon).items()
    }
    assert len({one["digest"] for one in shown["checkpoints"]}) == len(shown["checkpoints"])
    assert [one["start"] for one in shown["volumes"]] == [ids(daemon)[step].hex()]
