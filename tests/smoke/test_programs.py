"""The demo, the examples and the campaigns from end to end, as small as possible."""

from __future__ import annotations

import fcntl
import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.smoke import examples
from tests.smoke.conftest import ROOT, Run

CAMPAIGNS = {
    "fault_campaign": ("--cases", "1"),
    "fuzz_campaign": ("--decoded", "1000", "--packets", "50"),
    "gpu_campaign": ("--rounds", "1"),
    "last_step_campaign": ("--rounds", "1"),
    "rank_step_campaign": ("--rounds", "1"),
    "gpu_lies_campaign": ("--lie", "none", "--way", "push", "--steps", "1"),
    "gpu_restart_campaign": ("--rounds", "1"),
    "group_campaign": ("--rounds", "1"),
    "handler_campaign": ("--outer", "gate", "--inner", "flush", "--every", "100"),
    "kill_campaign": ("--rounds", "1"),
    "memory_campaign": ("--rounds", "1"),
    "nodes_campaign": ("--rounds", "1"),
    "nodes_search_campaign": ("--walks", "2", "--limit", "100", "--only", "all faults"),
    "process_campaign": ("--rounds", "1"),
    "restart_campaign": ("--rounds", "1"),
    "resume_campaign": ("--kills", "1", "--only", "own-stream", "own-quantized"),
    "sharded_campaign": ("--rounds", "3"),  # with each number of ranks
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_ends_well(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, whose trainers are forked from a server that has imported torch already."""
    campaign = importlib.import_module(f"tests.integration.{name}")
    monkeypatch.setattr(sys, "argv", [name, *CAMPAIGNS[name]])
    assert campaign.main() == 0
    assert capsys.readouterr().out


def test_no_campaign_is_left_out() -> None:
    made = (ROOT / "tests/integration").glob("*_campaign.py")
    assert {path.stem for path in made if not path.stem.startswith("test_")} == CAMPAIGNS.keys()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_demo_ends_well(run: Run) -> None:
    said = run("examples.demo", "--steps", 10, "--every", 2, "--rounds", 1).out
    assert "OK: all" in said
    ways = ("none", "PCcheck, 3 in flight", "PCcheck, 1 at a time", "torch.save and fsync")
    assert all(said.count(f"   {way} ") == 2 for way in ways)  # the run, and the table


def test_no_example_imports_from_the_tests() -> None:
    for path in examples.EXAMPLES.glob("*.py"):
        assert not re.search(r"^\s*(from|import) tests\b|tests\.", path.read_text(), re.M), path


@pytest.mark.long
def test_an_example_is_killed_and_goes_on(run: Run) -> None:
    assert "resumed at step" in run("tests.smoke.examples", "lora").out


@pytest.mark.parametrize("name", examples.names())
def test_an_example_is_short(name: str) -> None:
    assert len((examples.EXAMPLES / f"{name}.py").read_text().splitlines()) < 100


@pytest.mark.long
def test_the_shortest_script_goes_on_where_it_was(tmp_path: Path) -> None:
    """As its docstring asks: killed, and run again. Then Ctrl-C also ends its private daemon."""
    script = [sys.executable, "-u", str(ROOT / "examples/quickstart.py")]
    runs = []
    for lines, end in ((10, signal.SIGKILL), (1, signal.SIGINT)):
        with subprocess.Popen(
            script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as trainer:
            assert trainer.stdout is not None
            runs.append([int(trainer.stdout.readline().split()[1]) for _ in range(lines)])
            trainer.send_signal(end)
    assert runs[0] == list(range(10, 101, 10))
    assert runs[1][0] > 10
    with (tmp_path / "checkpoints/.pccheckd.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # when the daemon has ended
