"""Everything that only a GPU can test, by two commands of 8 minutes, on a machine without network.

    make gpu-check PYTHON=python3          the checks
    make gpu-bench PYTHON=python3          the benches; or, with options,
    python3 bench/gpu/check.py [--half checks|benches] [--wheels wheels] [--limit-s 470]
                               [--directory DIR] [--output DIR] [--logs DIR]

Each builds PCcheck into a directory of its own. The checks are the probe, then the GPU tests with
the real driver (PCCHECK_TEST_GPU=real pytest tests/integration), those of FIRST first; with
pytest-xdist half as many at a time as there are CPUs. The benches are those of this directory:
train on tmpfs, bandwidth, resume, train on --directory. After every part, what there is goes to
bench/results/gpu-DATE-HALF.json and .md; a part that fails or takes too long is named there and
stops no other. --logs keeps what each part printed. The exit code is 0 when all parts ended well.

The Python that runs this needs torch with CUDA, and pip. What else PCcheck and its tests need, and
that Python lacks, is installed from --wheels. To fill it on a machine with network, for the GPU
machine's Python (3.12 on x86-64 here), in the project's root:

    pip download -d wheels --only-binary=:all: --no-deps --implementation cp \\
        --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 \\
        setuptools msgpack pyzmq psutil uvloop shtab numpy safetensors \\
        pytest iniconfig pluggy packaging pygments pytest-timeout hypothesis sortedcontainers \\
        pytest-xdist execnet
    pip wheel --no-deps --no-build-isolation -w wheels .

The last line is for a GPU machine without a C compiler or Python headers: the extension keeps to
Python's stable ABI, so that a wheel made by any Python from 3.11 on, on the same architecture and
with an older glibc, works there. Sources are preferred; they need xxhash.h, from the system or in
native/build, where `make` puts it. `wheels` and native/build are not part of the repository.

With --dry all of it is tried without a GPU: small, on the CPU, tests left to the stand-in driver.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Distribution and the oldest major version that will do; torch comes with the machine.
NEEDED = {
    "setuptools": 77, "msgpack": 1, "pyzmq": 26, "psutil": 5, "uvloop": 0, "numpy": 1,
    "safetensors": 0, "shtab": 1, "pytest": 8, "pytest-timeout": 2, "hypothesis": 6,
}  # fmt: skip
#: Tests of what the design depends on: the waiting stream, its release, copies and restores.
FIRST = (
    "test_gpu_gate.py::test_the_stream_waits_and_the_cpu_does_not",
    "test_gpu_gate.py::test_a_stream_is_let_go_at_the_deadline",
    "test_gpu_gate.py::test_a_dead_daemon_lets_the_stream_go",
    "test_gpu_gate.py::test_a_manual_gate",
    "test_gpu_gate.py::test_buffers_may_change_at_once",
    "test_gpu_resume.py::test_resumed_training_is_the_same",
    "test_gpu_pull.py::test_restarts_leave_nothing_behind",
    "test_gpu_pull.py::test_what_changes_between_checkpoints_is_exposed_anew",
)
#: Limits in seconds for each part; the sum of a half is LIMIT_S at most.
BUDGETS_S = {
    "checks": {"requirements": 40, "build": 90, "probe": 110, "first_tests": 100, "tests": 130},
    "benches": {
        "requirements": 40, "build": 60, "train_in_memory": 75, "bandwidth": 90, "resume": 60,
        "train": 145,
    },
}  # fmt: skip
LIMIT_S = 470.0
GRACE_S = 15.0  # to end after Ctrl-C, daemons included
RESERVE_S = 30.0  # of a bench, for what it has begun when its budget is used up
TEST_LIMIT_S = 60  # of one test, for what a real driver may never answer
TAIL_CHARACTERS = 4000

Document = dict[str, Any]


@dataclass(slots=True)
class Ended:
    how: str  # "ok", or what happened
    seconds: float
    output: str  # its end


class Check:
    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.logs: Path = options.logs or work
        self.logs.mkdir(parents=True, exist_ok=True)
        self.site = work / "site"
        self.start_s = time.monotonic()
        self.document: Document = self.facts() | {"steps": {}}
        self.output: Path = options.output
        self.output.mkdir(parents=True, exist_ok=True)
        self.budgets_s = BUDGETS_S[options.half]
        self.stem = self.output / f"gpu-{datetime.date.today().isoformat()}-{options.half}"

    def facts(self) -> Document:
        cpus = Path("/proc/cpuinfo").read_text().splitlines()
        names = ("torch", "numpy", "safetensors", "pyzmq", "msgpack", "uvloop")
        return {
            "cpu": next((line.split(":")[1].strip() for line in cpus if "model name" in line), "?"),
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "versions": {name: version_of(name) or "missing" for name in names},
            "load_before": os.getloadavg(),
            "gpu": "not asked yet",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv]),
            "dry": self.options.dry,
        }

    # -- running parts ---------------------------------------------------------------------------

    def left_s(self) -> float:
        return float(self.options.limit_s) - (time.monotonic() - self.start_s)

    def environment(self) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH", "")
        path = [str(self.site), str(ROOT), *([before] if before else [])]
        made = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        if not self.options.dry:
            made["PCCHECK_TEST_GPU"] = "real"
        return made

    def run(self, name: str, command: list[str], limit_s: float) -> Ended:
        """One part. After its limit it gets Ctrl-C, so that it ends its daemons; then all
        processes that it has started are killed."""
        limit_s = min(limit_s, self.left_s())
        start_s = time.monotonic()
        log = self.logs / f"{name}.log"
        if limit_s <= 1:
            return self.record(name, Ended("no time left", 0.0, ""))
        print(f"== {name} (at most {limit_s:.0f} s): {' '.join(command)}", flush=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            how = self.wait(process, limit_s)
        text = log.read_text(errors="replace")[-TAIL_CHARACTERS:]
        print(text, flush=True)
        return self.record(name, Ended(how, round(time.monotonic() - start_s, 1), text))

    def wait(self, process: subprocess.Popen[bytes], limit_s: float) -> str:
        try:
            code = process.wait(limit_s)
            return "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return f"timed out after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own, see Popen
            process.wait()

    def record(self, name: str, ended: Ended) -> Ended:
        self.document["steps"][name] = {"ended": ended.how, "seconds": ended.seconds}
        if ended.how != "ok":
            self.document["steps"][name]["output"] = ended.output
        self.write()
        return ended

    def write(self) -> None:
        self.stem.with_suffix(".json").write_text(json.dumps(self.document, indent=1) + "\n")
        self.stem.with_suffix(".md").write_text("\n".join(table(self.document)) + "\n")

    def adopt(self, name: str, path: Path) -> None:
        """Takes what a part has written, whole or not, into the document."""
        try:
            self.document[name] = json.loads(path.read_text())
            self.document["gpu"] = self.document[name].get("gpu", self.document["gpu"])
        except (OSError, json.JSONDecodeError) as error:
            self.document[name] = {"missing": str(error)}
        self.write()

    # -- the parts -------------------------------------------------------------------------------

    def build(self) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        pip += ["--no-index", "--no-deps", "--no-compile", "--target", str(self.site)]
        wheels: Path = self.options.wheels
        missing = [name for name, oldest in NEEDED.items() if major_of(name) < oldest]
        if missing:
            find = ["--find-links", str(wheels)]
            self.run("requirements", [*pip, *find, *missing], self.budgets_s["requirements"])
        with_source = [*pip, "--no-build-isolation", str(ROOT)]
        if self.run("build", with_source, self.budgets_s["build"]).how == "ok":
            return
        for wheel in sorted(wheels.glob("pccheck-*.whl")):
            self.run("carried wheel", [*pip, str(wheel)], 30)

    def probe(self) -> None:
        result = self.work / "probe.json"
        command = [sys.executable, "bench/gpu/probe.py", "--output", str(result)]
        self.run("probe", [*command, *(["--small"] if self.options.dry else [])],
                 self.budgets_s["probe"])  # fmt: skip
        self.adopt("probe", result)
        self.document["gpu"] = (
            self.document["probe"].get("steps", {}).get("facts", {}).get("name", "none")
        )

    def first_tests(self) -> None:
        self.pytest("first_tests", [f"tests/integration/{name}" for name in FIRST])

    def tests(self) -> None:
        others = [f"--deselect=tests/integration/{name}" for name in FIRST]
        self.pytest("tests", ["tests/integration", "-k", "gpu", *others])

    def pytest(self, name: str, which: list[str]) -> None:
        result = self.work / f"{name}.xml"
        at_once = max(2, (os.cpu_count() or 1) // 2)
        side_by_side = ["-n", str(at_once)] if version_of("pytest-xdist") else []
        self.run(
            name,
            [sys.executable, "-m", "pytest", *which, *side_by_side, "-p", "no:cacheprovider",
             f"--timeout={TEST_LIMIT_S}", f"--junitxml={result}"],
            self.budgets_s[name],
        )  # fmt: skip
        self.document[name] = counts(result)
        self.write()

    def bench(
        self, name: str, *flags: str, module: str = "", directory: Path | None = None
    ) -> None:
        """The bench's budget is below its limit, so the bench ends in time."""
        limit_s = self.budgets_s[name]
        result = self.work / f"{name}.json"
        budget_s = max(5.0, min(limit_s, self.left_s()) - RESERVE_S)
        command = [sys.executable, "-m", f"bench.gpu.{module or name}", "--json", str(result)]
        command += ["--directory", str(directory or self.options.directory), *flags]
        command += ["--budget-s", f"{budget_s:.0f}"]
        self.run(name, [*command, *(["--device", "cpu", "--tiny"] if self.options.dry else [])],
                 limit_s)  # fmt: skip
        self.adopt(name, result)

    def parts(self) -> list[tuple[str, Callable[[], None]]]:
        if self.options.half == "checks":
            return [
                ("build", self.build), ("probe", self.probe), ("first_tests", self.first_tests),
                ("tests", self.tests),
            ]  # fmt: skip
        return [
            ("build", self.build),
            ("train_in_memory", self.train_in_memory),
            ("bandwidth", lambda: self.bench("bandwidth")),
            ("resume", lambda: self.bench("resume", "--layers", "6", "--batch", "4")),
            ("train", lambda: self.bench("train", "--rounds", "1")),
        ]

    def train_in_memory(self) -> None:
        """On tmpfs: what pulling and pushing cost the steps of a script that reads its loss at
        every step, where no disk holds them up."""
        flags = ["--intervals", "10", "--no-rivals", "--look-every", "1"]
        flags.append("--daemon-flags=--allow-any-filesystem")
        self.bench("train_in_memory", *flags, module="train", directory=Path("/dev/shm"))


def unavailable(wheels: Path) -> list[str]:
    """Requirements that are neither installed nor among the wheels."""
    there = {path.name.split("-")[0].replace("_", "-").lower() for path in wheels.glob("*.whl")}
    return [n for n, oldest in NEEDED.items() if major_of(n) < oldest and n not in there]


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def major_of(name: str) -> int:
    """-1: not installed."""
    first = version_of(name).split(".")[0]
    return int(first) if first.isdigit() else -1


def counts(path: Path) -> Document:
    """The counts in pytest's XML, and the failed tests."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as error:
        return {"missing": str(error)}
    found: Document = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    found["wrong"] = [
        f"{case.get('classname')}.{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return found


# -- for reading ---------------------------------------------------------------------------------

#: Step and key of the facts that the design depends on.
TELLING = (
    ("facts", ("name", "driver_version", "memory_ops_64", "plain_handle", "vmm_handle",
               "second_context_mib")),
    ("page", ("stream_write_to_other_cpu_us", "other_cpu_store_to_stream_us",
              "went_on_before_the_store", "pull_gb_s", "pull_while_stream_waits_gb_s")),
    ("overlap", ("imported_address_range", "imported_range_size_bytes", "open_twice",
                 "pull_alone_gb_s", "compute_with_pull_ratio", "compute_with_push_ratio",
                 "short_with_pull_ratio", "short_with_push_ratio", "memory_with_pull_ratio",
                 "memory_with_push_ratio")),
    ("death", ("idle_first_wrong_s", "copying_first_wrong_s", "idle_back_mib", "copying_back_mib")),
    ("uids", ("a_to_a_open", "a_to_b_open", "root_to_a_open", "a_to_root_open")),
    ("registration", ("small_pages_4gib_register_ms", "huge_pages_4gib_register_ms")),
    ("bandwidth", ("pinned_to_host_chunked_1_streams_gb_s", "pinned_to_host_256mib_gb_s")),
)  # fmt: skip


def table(document: Document) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        "# GPU check" + (" (dry: no GPU)" if document["dry"] else ""),
        "",
        f"{document['date'][:10]}, GPU {document['gpu']}; {document['cpu']}, "
        f"{document['cpus']} CPUs, {document['memory_gib']} GiB, kernel {document['kernel']}; "
        f"Python {document['python']}, {versions}.",
        "",
        f"    {document['command']}",
        "",
        "| part | ended | s |",
        "|---|---|---|",
    ]
    for name, step in document["steps"].items():
        lines.append(f"| {name} | {step['ended']} | {step['seconds']} |")
    return [*lines, "", *probe_lines(document), *tests_lines(document), *bench_lines(document)]


def probe_lines(document: Document) -> list[str]:
    steps = document.get("probe", {}).get("steps", {})
    lines = ["## Probe", "", "| step | what | |", "|---|---|---|"]
    for step, keys in TELLING:
        for key in keys:
            if key in steps.get(step, {}):
                value = steps[step][key]
                shown = value["median"] if isinstance(value, dict) else value
                lines.append(f"| {step} | {key} | {shown} |")
    for step, found in steps.items():
        if found.get("ended") != "ok":
            lines.append(f"| {step} | {found.get('ended')} | {found.get('failures', '')} |")
    return [*lines, ""]


def tests_lines(document: Document) -> list[str]:
    lines: list[str] = []
    for name, title in (("first_tests", "First tests"), ("tests", "Tests")):
        found = document.get(name, {})
        if "tests" not in found:
            continue
        wrong = found["failures"] + found["errors"]
        passed = found["tests"] - wrong - found["skipped"]
        text = f"{passed} passed, {wrong} failed, {found['skipped']} skipped."
        lines += [f"## {title}", "", text, "", *(f"- {name}" for name in found["wrong"]), ""]
    return lines


def bench_lines(document: Document) -> list[str]:
    lines: list[str] = []
    for name in ("train_in_memory", "bandwidth", "resume", "train"):
        if name in document:
            cut = ["The bench did not end; see the JSON file for what it had measured."]
            lines += [
                f"## {name.capitalize().replace('_', ' ')}",
                "",
                *document[name].get("table", cut),
                "",
            ]
    return lines


def has_no_gpu() -> bool:
    """Whether the probe reports it; a probe without a report fails as a part later."""
    command = [sys.executable, "bench/gpu/probe.py", "--only", "facts", "--limit-s", "20"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return bool(said) and json.loads(said)["driver"] == "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--half", choices=tuple(BUDGETS_S), default="checks")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--directory", type=Path, default=ROOT, help="for checkpoints")
    parser.add_argument("--output", type=Path, help="default bench/results")
    parser.add_argument("--logs", type=Path, help="keeps what the parts print; default: removed")
    parser.add_argument("--only", action="append", default=[], help="parts; build is always run")
    parser.add_argument("--no-build", action="store_true", help="use the PCcheck that is installed")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.output is None:
        options.output = Path(tempfile.gettempdir()) if options.dry else ROOT / "bench" / "results"
    if not options.dry and has_no_gpu():
        parser.error("there is no GPU here; --dry tries this command without one")
    if lacking := unavailable(options.wheels):
        parser.error(
            f"{', '.join(lacking)}: neither installed nor in {options.wheels}; the head of "
            "bench/gpu/check.py has the command that fetches them"
        )
    work = Path(tempfile.mkdtemp(prefix="pcc-gpu-"))
    # Started in the background, this would ignore Ctrl-C, and so would the parts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        check = Check(options, work)
        for name, part in check.parts():
            if (name == "build" and options.no_build) or (
                options.only and name not in ("build", *options.only)
            ):
                continue
            part()
        check.write()
        print("\n".join(table(check.document)))
        print(f"written: {check.stem}.json and .md")
        return int(any(step["ended"] != "ok" for step in check.document["steps"].values()))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
