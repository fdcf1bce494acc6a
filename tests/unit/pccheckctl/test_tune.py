"""The arithmetic of `tune`, held against the paper's formulas worked out by hand."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest

from pccheck_wire.units import GIB
from pccheckctl import arguments, cli
from pccheckctl.measure import tune
from pccheckctl.measure.goodput import Costs, best_interval, goodput
from pccheckctl.measure.tune import Rates, Workload
from pccheckd.config import options

#: 2 GiB/s, one checkpoint alone as fast, flushes for nothing, copies at 10 GiB/s.
PLAIN = Rates(2 * GIB, 2 * GIB, 0.0, 2, 10 * GIB, "a test")


def given(**changes: object) -> Workload:
    return Workload(10 * GIB, 2.0, 1.0, None)._replace(**changes)  # type: ignore[arg-type]


def test_the_interval_is_the_papers() -> None:
    """T_w(2) = 2 x 10 / 2 = 10 s; f* = ceil(10 / (2 x 1 x 2)) = 3."""
    advice = tune.advise(PLAIN, given())
    assert (advice.in_flight, advice.persist_s, advice.interval) == (2, 10.0, 3)
    assert advice.dram_bytes == 20 * GIB
    assert advice.stall_s == 0
    assert tune.advise(PLAIN, given(slowdown=1.25)).interval == 2  # 10 / (2 x 1.25 x 2)


def test_an_interval_that_fits_exactly_is_not_rounded_up() -> None:
    assert tune.advise(PLAIN, given(step_s=2.5)).disk_interval == 2
    assert tune.advise(PLAIN, given(step_s=0.1)).disk_interval == 50


def test_less_memory_than_a_checkpoint_is_said_in_numbers() -> None:
    """M = m / 4: N is about 1.25, T_w = 6.25 s, and the copy takes 0.25 s + 7.5 GiB at 2 GiB/s."""
    advice = tune.advise(PLAIN, given(dram_bytes=5 * GIB // 2, slowdown=1.05))
    assert advice.effective == 1.25
    assert advice.persist_s == 6.25
    assert advice.copy_s == 4.0
    assert advice.stall_s == pytest.approx(4.0 - 4 / 3)
    assert advice.interval == advice.stall_interval == 27  # 2.667 / (0.05 x 2)
    assert advice.slowdown == pytest.approx(1 + (8 / 3) / 54)
    text = tune.as_text(PLAIN, given(dram_bytes=5 * GIB // 2, slowdown=1.05), advice)
    assert "about 1 + M/m = 1.25 checkpoints are in flight, not 2" in text


def test_more_in_flight_is_worth_it_where_flushes_are_dear() -> None:
    dear = PLAIN._replace(flush_s=20.0)
    assert tune.best_in_flight(dear, 10 * GIB) > 2
    slow_alone = PLAIN._replace(one_bytes_per_s=GIB / 2)
    assert tune.best_in_flight(slow_alone, 10 * GIB) == 4


def test_more_in_flight_never_asks_for_longer_intervals() -> None:
    for slots in range(3, 10):
        fewer, more = (
            tune.advise(PLAIN._replace(flush_s=1.0), given(slots=n, dram_bytes=100 * GIB))
            for n in (slots, slots + 1)
        )
        assert more.disk_interval <= fewer.disk_interval


def test_with_no_slowdown_allowed_a_long_copy_is_told() -> None:
    slow = PLAIN._replace(copy_bytes_per_s=GIB)
    advice = tune.advise(slow, given())
    assert "every interval slows training down" in tune.as_text(slow, given(), advice)


def checkpoint(payload: int, seconds: float, **more: object) -> dict[str, object]:
    at = {"begin": 1, "first_write": 1, "sealed": 1 + 10**8, "written": 1 + int(seconds * 1e9)}
    times = at | {"durable": at["written"] + 10**7}
    return {"state": "durable", "payload_bytes": payload, **times, **more}


def test_the_daemons_history_is_what_was_nearest_in_size() -> None:
    large = [checkpoint(8 * GIB, 4.0) for _ in range(3)]
    small = [checkpoint(GIB // 8, 10.0) for _ in range(3)]
    failed = checkpoint(8 * GIB, 1.0, state="failed")
    status = {"daemon": {"writers": 3}, "checkpoints": [*large, *small, failed]}
    rates = tune.seen(status, 10 * GIB, 5.0, copy_given=False)
    assert rates is not None
    assert rates.write_bytes_per_s == 2 * GIB
    assert rates.flush_s == pytest.approx(0.01)
    assert rates.copy_bytes_per_s == pytest.approx(80 * GIB)
    assert rates.writers == 3
    assert tune.seen({"checkpoints": large[:2]}, GIB, 5.0, copy_given=True) is None


@pytest.mark.parametrize(
    "wrong",
    ["--checkpoint 0 --step-time 1s", "--checkpoint 1GiB --step-time 1s --slowdown 0.9",
     "--checkpoint 1GiB --step-time 1s --slowdown nan",
     "--checkpoint 1GiB --step-time 1s --slots 2", "--checkpoint 1GB --step-time 1s",
     "--checkpoint 1GiB --step-time 1s --slots 33", "--checkpoint 1GiB --step-time 1s --keep 0",
     "--checkpoint 1GiB --step-time 1s --keep 5000000000",
     "--checkpoint 1GiB --step-time fast", "--step-time 1s",
     "--checkpoint 1GiB --step-time 1s --mtbf 0s"],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--bandwidth", "1GiB", *wrong.split()]) == 2
    assert capsys.readouterr().err.startswith("pccheckctl: ")


def test_the_document_has_what_the_daemon_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "tune --checkpoint 10GiB --step-time 2s --slowdown 1 --bandwidth 2GiB --json"
    assert cli.main([*words.split(), "--copy-bandwidth", "10GiB"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["slots"], document["interval_steps"]) == (1, 4, 3)
    assert 40 * GIB < document["storage_bytes"] < 44 * GIB


def test_without_figures_it_says_where_they_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PCCHECK_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.delenv("PCCHECK_STORAGE", raising=False)
    assert cli.main(["tune", "--checkpoint", "1GiB", "--step-time", "1s"]) == 12
    assert "--storage" in capsys.readouterr().err


@pytest.mark.parametrize(("mtbf_s", "interval"), [(None, 45), (10.0, 47)])
def test_with_failures_the_disk_keeps_up(mtbf_s: float | None, interval: int) -> None:
    """The disk writes a checkpoint in 46.3 steps; 3 percent of slowdown are allowed."""
    rates = Rates(25e6, 25e6, 0.0, 1, 1e9, "made up")
    given = Workload(int(46.3 * 25e6 * 0.01), 0.01, 1.03, None, mtbf_s=mtbf_s)
    assert tune.advise(rates, given).interval == interval


@pytest.mark.parametrize("held_s", [0.0, 0.02, 1.5, 40.0])
@pytest.mark.parametrize("mtbf_s", [600.0, 6 * 3600.0])
@pytest.mark.parametrize("least", [1, 7])
def test_the_best_interval_is_that_of_an_exhaustive_search(
    held_s: float, mtbf_s: float, least: int
) -> None:
    costs = Costs(0.35, held_s, 12.0, 60.0, mtbf_s)
    best = max(range(least, 5000), key=lambda interval: goodput(costs, interval))
    found = best_interval(costs, least)
    assert goodput(costs, found) == goodput(costs, best)
    young_s = math.sqrt(2 * held_s * mtbf_s)
    assert found == least or abs(found * 0.35 - young_s) < 0.35


def test_failures_make_the_interval_that_loses_least(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """10 GiB at 2 GiB/s: saving aside holds nothing, so the disk's interval stays; stopping for
    5 s is best every sqrt(2 x 5 x 3600) = 190 s, which are 95 steps."""
    words = "tune --checkpoint 10GiB --step-time 2s --slowdown 1 --bandwidth 2GiB --mtbf 1h"
    file = tmp_path / "pccheckd.toml"
    command = [*words.split(), "--copy-bandwidth", "10GiB", "-o", str(file)]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("save every 3 steps") and "best interval is 95 steps" in out
    # 1 - (6 / 2 + 10 + 60) / 3600, and 1 - 5 / 190 - (95 + 60) / 3600
    assert "goodput     0.9797 " in out and "; 0.9306 with a save that stops" in out
    written = tomllib.loads(file.read_text())
    assert written == {"slots": 4, "keep": 2, "writers": 2, "dram": "20480MiB"}
    assert cli.main(command) == 2 and "exists" in capsys.readouterr().err


def test_slots_and_keep_are_those_of_a_volume(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers beyond C's integers were a traceback, and 31 kept left the daemon too few slots."""
    assert arguments.SLOTS_MAX == options.SLOTS_MAX
    words = ["tune", "--checkpoint=1GiB", "--step-time=1s", "--bandwidth=1GiB", "--json"]
    for option, most in (("slots", 32), ("keep", 31)):
        assert cli.main([*words, f"--{option}={most}"]) == 0
        assert json.loads(capsys.readouterr().out)["slots"] == 32
        for value in (most + 1, 5_000_000_000, 2**63 - 1, "9" * 5000):
            assert cli.main([*words, f"--{option}={value}"]) == 2
            message = json.loads(capsys.readouterr().out)["error"]["message"]
            assert f"argument --{option}: " in message and f"to {most}" in message


def test_in_memory_the_copy_sets_the_interval_and_the_disk_every_kth() -> None:
    """T_c = 10 / 10 = 1 s of steps of 2 s; T_w(1) = 10 / 2 = 5 s, so k = ceil(5 / 2) = 3."""
    found = tune.in_memory(PLAIN, given())
    assert found == (1, 3, 30 * GIB, 2, 1 * 3 + 3)
    text = tune.as_text(PLAIN, given(), tune.advise(PLAIN, given()))
    assert 'every 1 step, and one of 3 on the disk: durable_every=3, or "auto"' in text
    assert "at most 2 steps when a process dies, 6 when the node does" in text
    assert "DRAM for 3 states of each rank: 30.0 GiB" in text
    assert tune.document(PLAIN, given(), tune.advise(PLAIN, given()))["in_memory"] == {
        "interval": 1, "durable_every": 3, "dram_bytes": 30 * GIB, "lost_with_process": 2,
        "lost_with_node": 6,
    }  # fmt: skip
    small = given(dram_bytes=20 * GIB)
    assert "30.0 GiB, and --dram gives 20.0 GiB" in tune.as_text(
        PLAIN, small, tune.advise(PLAIN, small)
    )


def test_in_memory_a_copy_that_waits_is_as_rare_as_allowed() -> None:
    """Of T_c = 1 s, steps of 1 s hide 2/3: 1/3 of a second may be 5 % of 7 steps."""
    assert tune.in_memory(PLAIN, given(step_s=1.0, slowdown=1.05))[:2] == (7, 1)
    slow = PLAIN._replace(write_bytes_per_s=GIB / 2, one_bytes_per_s=GIB / 2)  # T_w(1) = 20 s
    assert tune.in_memory(slow, given(step_s=1.0, slowdown=1.05))[:2] == (7, 3)
    assert tune.in_memory(slow, given(step_s=0.25))[:2] == (4, 20)  # a copy takes four steps
    no = given(step_s=1.0, slowdown=1.05)
    text = tune.as_text(PLAIN, no, tune.advise(PLAIN, no))
    assert "no gain (durable_every): the copy sets the interval" in text


def test_a_disk_that_takes_each_step_needs_no_memory_only_ones() -> None:
    slow = given(step_s=1000.0)
    text = tune.as_text(PLAIN, slow, tune.advise(PLAIN, slow))
    assert "no gain (durable_every): the disk takes every step" in text
