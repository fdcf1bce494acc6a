"""Metrics, health, traces, logs and the background check of a real daemon."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pccheck_store.observer import Observer
from pccheckctl import cli
from pccheckctl.output.documents import rows, whole
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect
from tests.support.volumes import damage, make
from tests.support.waiting import until
from tests.unit.pccheckd.observe.test_metrics import labels_in_use, names_in_use

LIMIT_S = 240.0


def base(daemon: Daemon) -> str:
    found = re.search(r"metrics at (http://\S+)/metrics", daemon.log.read_text())
    assert found is not None, daemon.log.read_text()
    return found[1]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def durable_lines(daemon: Daemon) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    return [line for line in lines if line.get("event") == "durable"]


def test_metrics_of_a_job_and_every_name_in_use(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--metrics", "127.0.0.1:0", "--log-format", "json")
    trainer = start_trainer(daemon, job="gpt")
    for step in (1, 2, 3):
        assert trainer.save() == "durable"
        assert trainer.step() and step
    # the client sees `durable` on its page before the daemon's loop has counted it
    until(lambda: "pccheck_last_durable_step{" in (text := get(f"{base(daemon)}/metrics")[1])
          and len(durable_lines(daemon)) == 3 and "} 5.0" in text)  # fmt: skip
    code, text = get(f"{base(daemon)}/metrics")
    assert code == 200
    values: dict[str, dict[str, float]] = {}
    labels: set[str] = set()
    for family in text_string_to_metric_families(text):
        values.setdefault(family.name, {})
        for sample in family.samples:
            labels |= sample.labels.keys()
            values.setdefault(sample.name, {})[sample.labels.get("result", "")] = sample.value
        if family.type == "counter":  # declared, even where nothing was counted yet
            values.setdefault(f"{family.name}_total", {})
        if family.type == "histogram":
            for end in ("_bucket", "_sum", "_count"):
                values.setdefault(family.name + end, {})
    assert values["pccheck_checkpoints_total"] == {"durable": 3}
    assert values["pccheck_persist_seconds_count"] == {"": 3}
    assert values["pccheck_last_durable_step"] == {"": 5}
    assert values["pccheck_stall_seconds_total"][""] > 0
    assert values["pccheck_request_interval_seconds"][""] > 0
    assert values["pccheck_connected"] == {"": 1}
    assert re.search(r'pccheck_info\{.*engine="pwrite".*\} 1', text)
    assert values["pccheck_fronts"] == {"": 1}
    assert values["pccheck_front_restarts_total"] == {"": 0}
    missing = names_in_use() - values.keys()
    assert not missing, f"dashboard or alerts use what is not exported: {sorted(missing)}"
    known = labels | {"stage", "error", "instance", "job", "gpu", "name", "dies"}
    assert labels_in_use() <= known
    assert get(f"{base(daemon)}/healthz") == (200, "ok\n")
    assert get(f"{base(daemon)}/readyz") == (200, "ready\n")
    durable = durable_lines(daemon)
    assert [line["step"] for line in durable] == [1, 3, 5]
    assert all(line["job"] == "gpt" and line["durable_s"] >= line["flushed_s"] for line in durable)


def test_a_daemon_that_hangs_is_told_from_one_that_is_gone(start_daemon: Start) -> None:
    """The event loop of the daemon hangs, for example under a debugger; here SIGSTOP stops the
    daemon."""
    daemon = start_daemon("--metrics", "0")
    url = base(daemon)
    daemon.kill(signal.SIGSTOP)
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=0.3) as answer:
            raise AssertionError(answer.read())
    except (TimeoutError, urllib.error.URLError):
        pass
    daemon.kill(signal.SIGCONT)
    assert get(f"{url}/healthz") == (200, "ok\n")
    assert daemon.stop() == 0
    try:
        get(f"{url}/healthz")
        raise AssertionError("it still listens")
    except urllib.error.URLError:
        pass


def test_metrics_in_a_file_that_goes_with_the_daemon(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "pccheck.prom"
    daemon = start_daemon("--metrics", str(path))
    until(path.exists)
    assert "pccheck_pool_bytes 6.7108864e+07" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    assert daemon.stop() == 0
    assert not list(tmp_path.iterdir())


def test_without_the_extra_it_does_not_start_and_says_what_to_install(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'prometheus_client' else find(name, *a)\n"
    )
    with Daemon("--metrics", "0") as daemon:
        for flags in ((), ("--check-config",)):
            ended = subprocess.run(
                daemon.command(*flags), capture_output=True, text=True, timeout=LIMIT_S,
                env=daemon.environment() | {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
            )  # fmt: skip
            assert ended.returncode == 2
            assert "pip install 'pccheck[metrics]'" in ended.stderr


def test_an_address_in_use_ends_the_start(start_daemon: Start) -> None:
    port = base(start_daemon("--metrics", "0")).rpartition(":")[2]
    with Daemon("--metrics", port) as second:
        ended = subprocess.run(
            second.command(), capture_output=True, text=True, env=second.environment(),
            timeout=LIMIT_S,
        )  # fmt: skip
    assert ended.returncode == 2
    assert f"cannot listen at http://127.0.0.1:{port}" in ended.stderr


def test_a_trace_shows_the_overlap(
    start_daemon: Start,
    start_trainer: Connect,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A disk slower than training: N = 2 are in flight at once, as in the paper's Figure 6."""
    daemon = start_daemon("--max-bandwidth", "8MiB")
    trainer = start_trainer(daemon, [300_000])
    trainer.run(5, 1)
    trainer.wait_durable(4)
    with Observer(str(daemon.socket)) as observer:  # its loop hears of the end after the client
        until(lambda: rows(observer.trace(0), "checkpoints") == [])  # all those in flight are shown
        found = rows(observer.trace(3600), "checkpoints")
        assert len(found) == 5
    path = tmp_path / "trace.json"
    command = ["--socket", str(daemon.socket), "trace", "-o", str(path)]
    assert cli.main(command) == 0
    assert cli.main(command) == 2  # it is there, and stays
    assert cli.main([*command, "--force"]) == 0
    target = tmp_path / "report.html"
    asked = [
        ["--socket", str(daemon.socket), "report"], ["report", "job", "--trace", str(path)]
    ]  # fmt: skip
    pages = []
    for words in asked:
        assert cli.main([*words, "-o", str(target), "--force"]) == 0
        pages.append(target.read_text())
    durable = 'title="step 5, durable'  # an earlier one may be superseded
    assert pages[0].count(durable) == pages[1].count(durable) > 0
    for words in (asked[0], ["report", "--trace", str(path)]):
        capsys.readouterr()
        assert cli.main([*words, "other", "-o", str(target), "--force"]) == 13
        assert "checkpoint of job 'other'" in capsys.readouterr().err
    assert cli.main([*asked[0], "job", "--last=0", "-o", str(target), "--force"]) == 0
    assert "No checkpoint in this time" in target.read_text()
    capsys.readouterr()
    assert cli.main(["--socket", str(daemon.socket), "tune", "--job", "job", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["interval_steps"] >= 1
    assert cli.main(["--socket", str(daemon.socket), "tune", "--job", "none"]) == 13
    assert "there is no durable checkpoint of job 'none'" in capsys.readouterr().err
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"lane 0: copy", "lane 1: copy", "admission", "gate: the trainer is held"} <= tracks
    assert not any(name.startswith("lane 2") for name in tracks)
    in_flight = [event["args"]["checkpoints"] for event in events if event["ph"] == "C"]
    assert max(in_flight) == 2 and in_flight[-1] == 0
    names = [event["name"] for event in events if event["ph"] == "X"]
    published = [item for item in found if whole(item, "durable")]  # the others were superseded
    assert len(published) >= 3
    for word in ("wait", "copy", "write", "flush", "publish"):
        assert {f"{word} {item['step']}" for item in published} <= set(names)
    for item in published:
        times = [whole(item, n) for n in ("requested", "begin", "first_write", "written", "flushed",
                                          "durable")]  # fmt: skip
        assert times == sorted(times) and times[0] > 0


def test_a_failure_is_counted_by_stage(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--metrics", "0", shim="eio:record-a:1")
    trainer = start_trainer(daemon)
    trainer.save()
    daemon.armed.touch()
    trainer.step()
    handle = trainer.checkpoint()
    until(lambda: trainer.state(handle) == "failed")
    daemon.logs("step 2 failed: publish: EIO; check the disk and the kernel's log")
    _, text = get(f"{base(daemon)}/metrics")
    (line,) = re.findall(r"(?m)^pccheck_failures_total\{(.*)\} 1\.0$", text)
    assert 'error="EIO"' in line and 'stage="publish"' in line
    with Observer(str(daemon.socket)) as observer:
        first, second = rows(observer.trace(3600), "checkpoints")
    assert (first["state"], second["state"], second["durable"]) == ("durable", "failed", 0)


def test_rot_is_found_in_the_background(start_daemon: Start, tmp_path: Path) -> None:
    storage = make(tmp_path / "storage", 10, 20, 30)
    damage(storage, 30)
    daemon = start_daemon(
        "--allow-any-filesystem", "--scrub-interval", "1", "--scrub-rate", "1GiB", "--metrics", "0",
        storage=storage,
    )  # fmt: skip
    until(lambda: "scrub_passes_total 0" not in get(f"{base(daemon)}/metrics")[1])
    assert daemon.status()["daemon"]["state"] == "degraded"
    daemon.logs("is damaged near byte 0 of")
    _, text = get(f"{base(daemon)}/metrics")
    assert re.search(r'pccheck_scrub_checkpoints_total\{result="damaged"\} 1\.0', text)
    assert re.search(r"pccheck_damaged_checkpoints\{.*\} 1\.0", text)
    listed = cli.main(["--storage", str(storage), "verify", "--step", "20"])
    assert listed == 0 and cli.main(["--socket", str(daemon.socket), "verify"]) == 14
