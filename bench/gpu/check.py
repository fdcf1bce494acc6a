"""Everything that only a GPU can show, by two commands, on a machine without network.

    make gpu-pack                  with network, once: what must be carried, in wheels/
    make gpu-check LIMIT_S=370     on the machine with the GPU: what its driver does, tests, kinds
    make gpu-bench LIMIT_S=400     what checkpoints cost there

PYTHON names that machine's Python, which needs pip and torch with CUDA (default python3). PARTS and
BENCHES are the parts, the most decisive first, with their seconds. A part for which too little is
left of LIMIT_S is skipped, and named; a part that fails or takes too long stops no other. After
every part OUTPUT (default gpu-results/) has the document so far, as .json and .md, and one archive,
.tar.gz, with these and all logs: its files belong into bench/results/. The document begins with
what must hold (targets.py), and whether it does. The exit code is 0 when no part failed and
nothing was missed.

DRY=1 tries a command without a GPU: small, on the stand-in driver and on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script, so that it runs where PCcheck is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu import targets

ROOT = Path(__file__).resolve().parents[2]
#: Distribution, and the oldest major version that will do: what a Python with torch may lack. What
#: is there already is not installed.
CARRIED = {
    "setuptools": 77, "msgpack": 1, "pyzmq": 26, "psutil": 5, "uvloop": 0, "shtab": 1, "numpy": 1,
    "safetensors": 0, "pytest": 8, "iniconfig": 2, "pluggy": 1, "packaging": 23, "pygments": 2,
    "pytest-timeout": 2, "pytest-xdist": 3, "execnet": 2, "hypothesis": 6, "sortedcontainers": 2,
    "anyio": 4, "idna": 3, "typing-extensions": 4, "torchsnapshot": 0, "nest-asyncio": 1,
    "importlib-metadata": 8, "lazy-importer": 0, "zipp": 3, "aiofiles": 24,
    "cryptography": 42, "cffi": 1, "pycparser": 2,
}  # fmt: skip
GRACE_S = 10.0  # to end after Ctrl-C, daemons included
TAIL_CHARACTERS = 4000
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

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    seconds: int  # its limit; less is left: skipped
    command: str  # behind `python`; {out} is its document, {budget} the seconds after which it
    # begins nothing new
    dry: str = ""  # added, or instead of the command if it begins with "="
    last: int = 0  # seconds that what it begins last may take; 0: three tenths of its limit


def probe(name: str, seconds: int) -> Part:
    return Part(name, seconds, f"bench/gpu/probe.py {name} --output {{out}}", "--small")


def tests(name: str, seconds: int, which: str) -> Part:
    workers = max(2, (os.cpu_count() or 1) // 2)
    command = f"-m pytest {which} -n {workers} -p no:cacheprovider --timeout=60 --junitxml={{out}}"
    return Part(name, seconds, command, f"=-m pytest {which} --collect-only -q")


def bench(name: str, seconds: int, words: str, dry: str, last: int = 0) -> Part:
    command = f"-m {words} --json {{out}} --budget-s {{budget}} --directory {{directory}}"
    return Part(name, seconds, command, dry, last)


_TINY = "--device cpu --tiny --layers 1 --rounds 1"


def train(name: str, seconds: int, words: str, contenders: str, last: int = 0) -> Part:
    dry = f"{_TINY} --intervals 2 --steps 2"
    return bench(name, seconds, f"bench.gpu.train --contenders {contenders} {words}", dry, last)


_FIRST = " ".join(f"tests/integration/{name}" for name in FIRST)
#: A run has five checkpoints. With 25 layers OPT-1.3B's state has 8 GB.
_FIVE, _8_GB = "--intervals 10 --steps 50 --rounds 3", "--model opt-1.3b --layers 25"
_OTHERS = "tests/integration -k gpu " + " ".join(f"--deselect=tests/integration/{n}" for n in FIRST)
PARTS = (
    # Sentences about the driver that PCcheck relies on, each with a check.
    Part("behaviours", 30, "tests/standin/behaviours.py --json {out} --limit-s {budget}"),
    bench("ways", 75, "tests.integration.gpu_ways",
          "--device cpu --mib 16 --pieces 40 --rounds 1"),
    Part("deaths", 80, "-m tests.integration.last_step_campaign --rounds 20 --json {out}",
         "--rounds 2"),
    bench("bandwidth", 70, "bench.gpu.bandwidth --rounds 3", _TINY),
    bench("restore 8 GB", 45, f"bench.gpu.bandwidth {_8_GB} --only memory", _TINY),
    tests("first tests", 45, _FIRST),
    probe("vmm", 30), probe("death", 30), probe("latency", 15), probe("queue", 15),
    # Whole processes: held in the driver, dumped by CRIU if .criu was carried along, made again.
    Part("process snapshots", 120, "-m tests.transparent.gpu --json {out} --limit-s {budget}",
         "--dry"),
    probe("handles", 30), probe("mps", 40), probe("locks", 12), probe("power", 10),
    bench("kinds", 110, "bench.gpu.kinds", "--device cpu --lanes 1"),
    tests("tests", 70, _OTHERS),
    probe("facts", 10), probe("page", 10), probe("overlap", 15), probe("host", 20),
)  # fmt: skip
_TABLES = ";".join(f"pull:{one}" for one in ("N=1", "N=2", "N=3", "M=1", "M=1.5", "p=1", "p=4"))
BENCHES = (
    train("gpt2", 130, _FIVE, "pull;push;expandable", last=10),
    train("8 GB", 230, f"{_8_GB} {_FIVE}", "pull;push;expandable", last=20),
    train("every step", 60, "--intervals 1 --steps 20 --rounds 3", "memory:M=3;last+step:M=3",
          last=8),
    # The copy takes longer than forward and backward: the only place where the modes differ.
    train("gate", 30, "--batch 2 --intervals 10 --rounds 2", "pull;push;device"),
    train("opt", 90, "--model opt-1.3b --intervals 10 --steps 20 --rounds 1",
          "DCP+thread;DCP+process"),
    # What holds the CPU that is a step ahead: no loss is read.
    train("calls", 40, "--intervals 1,5,10 --steps 20 --rounds 1 --look-every 1000",
          "pull;device;device:durable=100"),
    train(
        "rivals", 70, "--intervals 10 --steps 20 --rounds 1",
        "CheckFreq;torchsnapshot+async;DCP+thread;DCP+process;torch.save",
    ),
    train("figures 12 to 14", 70, "--intervals 4 --steps 12 --rounds 1", _TABLES),
    train("vgg16", 30, "--model vgg16 --intervals 10,25 --rounds 1", "pull;torch.save"),
    train("bert", 35, "--model bert-large --intervals 10,25 --rounds 1", "pull;torch.save"),
)  # fmt: skip
HALVES = {"check": (PARTS, 370), "bench": (BENCHES, 400)}


class Check:
    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.start_s = time.monotonic()
        self.output: Path = options.output
        self.output.mkdir(parents=True, exist_ok=True)
        self.logs = work / "logs"
        self.logs.mkdir()
        self.document: Document = self.facts() | {"ended": {}, "parts": {}}
        card = re.sub(r"\W+", "-", self.document["gpu"].lower().removeprefix("nvidia ")) or "none"
        date = datetime.date.today().isoformat()
        self.stem = f"gpu-{date}-{card}-{self.document['commit']}-{options.half}"

    def facts(self) -> Document:
        cpus = Path("/proc/cpuinfo").read_text().splitlines()
        names = ("torch", "numpy", "pyzmq", "msgpack", "transformers", "lightning", "accelerate")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            "gpu": "" if self.options.dry else asked_gpu(),
            "commit": commit(self.options.wheels),
            "cpu": next((line.split(":")[1].strip() for line in cpus if "model name" in line), "?"),
            "cpus": os.cpu_count(),
            "memory_gib": round(memory / 2**30, 1),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "versions": {name: version_of(name) or "missing" for name in names},
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "limit_s": self.options.limit_s,
            "dry": self.options.dry,
        }

    def left_s(self) -> float:
        return float(self.options.limit_s) - (time.monotonic() - self.start_s)

    def environment(self) -> dict[str, str]:
        path = [str(self.work / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        if not self.options.dry:
            return found | {"PCCHECK_TEST_GPU": "real"}
        sys.path.insert(0, str(ROOT))
        from tests.support import standin

        (self.work / "device").mkdir(mode=0o777, exist_ok=True)
        (self.work / "device").chmod(0o777)
        gpus = standin.environment(self.work / "device", dead="keep")  # as cards do
        return found | gpus | {"OMP_NUM_THREADS": "1"}

    def install(self) -> None:
        """From wheels/, what this Python lacks; PCcheck itself from there, or else built here."""
        wheels = {distribution(path): path for path in self.options.wheels.glob("*.whl")}
        wanted = [wheels[name] for name in missing() if name in wheels]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        pip += ["--no-index", "--no-deps", "--no-compile", "--target", str(self.work / "site")]
        ours = [wheels["pccheck"]] if "pccheck" in wheels else ["--no-build-isolation", ROOT]
        self.run("install", [*pip, *map(str, [*wanted, *ours])], 90)

    def part(self, part: Part) -> None:
        if self.left_s() < part.seconds:
            self.ended(part.name, f"skipped: {self.left_s():.0f} s were left", 0)
            return
        out = self.work / f"{part.name.replace(' ', '-')}.out"
        dry: str = part.dry if self.options.dry else ""
        words = dry[1:] if dry.startswith("=") else f"{part.command} {dry}"
        last_s = part.last or part.seconds * 3 // 10
        budget_s = 999 if self.options.dry else part.seconds - last_s
        places = {"out": out, "budget": budget_s, "directory": self.options.directory}
        # On CPUs that others use, too, small parts may take longer than large ones on a GPU.
        limit_s = self.left_s() if self.options.dry else part.seconds
        command = [word.format(**places) for word in words.split()]
        self.run(part.name, [sys.executable, *command], limit_s)
        if out.exists():
            self.document["parts"][part.name] = adopted(out)
            self.write()

    def run(self, name: str, command: list[str], limit_s: float) -> None:
        """After its limit a part gets Ctrl-C, so that it ends its daemons; then all processes that
        it has started are killed."""
        start_s = time.monotonic()
        log = self.logs / f"{name.replace(' ', '-')}.log"
        print(f"== {name}, at most {limit_s:.0f} s, of {self.left_s():.0f}", flush=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit_s)
                how = "ok" if code == 0 else f"failed: exit code {code}"
            except subprocess.TimeoutExpired:
                how = f"failed: it took more than {limit_s:.0f} s"
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if how != "ok":
            print(log.read_text(errors="replace")[-TAIL_CHARACTERS:], flush=True)
        self.ended(name, how, time.monotonic() - start_s)

    def ended(self, name: str, how: str, seconds: float) -> None:
        print(f"   {name}: {how}, {seconds:.1f} s", flush=True)
        self.document["ended"][name] = {"how": how, "seconds": round(seconds, 1)}
        self.write()

    def write(self) -> None:
        """All there is, at once: the machine may be taken away at any time."""
        names = [part.name for part in HALVES[self.options.half][0]]
        self.document["targets"] = targets.judged(self.document, names)
        path = self.output / f"{self.stem}.json"
        path.write_text(json.dumps(self.document, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(table(self.document)) + "\n")
        fresh = self.output / f".{self.stem}.new"
        with tarfile.open(fresh, "w:gz", compresslevel=1) as archive:
            for file in (path, path.with_suffix(".md"), *sorted(self.logs.iterdir())):
                archive.add(file, f"{self.stem}/{file.name}")
        fresh.replace(self.output / f"{self.stem}.tar.gz")


# -- what is here ----------------------------------------------------------------------------------


def asked_gpu() -> str:
    """The GPU's name; empty without one. In a process of its own: CUDA must not start in this one,
    and a driver may never answer."""
    command = [sys.executable, "bench/gpu/probe.py", "facts"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30,
                             check=False)  # fmt: skip
        return str(json.loads(ran.stdout)["steps"]["facts"].get("name", ""))
    return ""


def commit(wheels: Path) -> str:
    """Of this checkout, or as `make gpu-pack` noted it for a copy without git."""
    ran = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True,
                         text=True, check=False)  # fmt: skip
    noted = wheels / "COMMIT"
    return ran.stdout.strip() or (noted.read_text().strip() if noted.exists() else "unknown")


def sources() -> str:
    """A digest of what the wheel of PCcheck is made of."""
    found = hashlib.sha256()
    for folder in ("client", "native/pccheck_native", "native/python", "native/src", "pccheckd"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                found.update(path.read_bytes())
    return found.hexdigest()


def is_stale(wheels: Path) -> bool:
    """Whether the wheel of PCcheck there is of other sources than these."""
    noted = wheels / "SOURCES"
    return noted.exists() and noted.read_text().strip() != sources()


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing() -> list[str]:
    """Of CARRIED, what this Python lacks or has too old."""
    majors = {name: version_of(name).split(".")[0] for name in CARRIED}
    return [
        name for name, oldest in CARRIED.items()
        if not majors[name].isdigit() or int(majors[name]) < oldest
    ]  # fmt: skip


def distribution(wheel: Path) -> str:
    return wheel.name.split("-")[0].replace("_", "-").lower()


def pack(wheels: Path, python: str) -> int:
    """Fills `wheels` for a Python of that version on x86-64, and notes the commit."""
    shutil.rmtree(wheels, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (17, 26, 27, 28)]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux_2_12_x86_64"]
    subprocess.run(
        [*pip, "download", "-q", "-d", str(wheels), "--only-binary=:all:", "--no-deps",
         "--implementation=cp", f"--python-version={python}", *platforms,
         "-c", str(ROOT / "constraints.txt"), *CARRIED], check=True,
    )  # fmt: skip
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)],
        check=True,
    )  # fmt: skip
    (wheels / "COMMIT").write_text(commit(wheels) + "\n")
    (wheels / "SOURCES").write_text(sources() + "\n")
    size = sum(path.stat().st_size for path in wheels.iterdir())
    print(f"{wheels}: {len(list(wheels.iterdir()))} files, {size / 2**20:.0f} MiB")
    return 0


# -- what the parts have found ---------------------------------------------------------------------


def adopted(out: Path) -> Document:
    text = out.read_text()
    if not text.startswith("<"):
        found: Document = json.loads(text)
        return found
    suites = list(ElementTree.fromstring(text).iter("testsuite"))
    counted: Document = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    counted["wrong"] = [
        f"{case.get('classname')}.{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return counted


def table(document: Document) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        "# GPU check" + (" (dry: no GPU)" if document["dry"] else ""),
        "",
        f"{document['date'][:10]}, GPU {document['gpu'] or 'none'}, commit {document['commit']}; "
        f"{document['cpu']}, {document['cpus']} CPUs, {document['memory_gib']} GiB, kernel "
        f"{document['kernel']}; Python {document['python']}, {versions}.",
        "",
        "| part | ended | s |",
        "|---|---|---|",
    ]
    lines += [f"| {n} | {end['how']} | {end['seconds']} |" for n, end in document["ended"].items()]
    lines += ["", "| what must hold on a card | | found |", "|---|---|---|"]
    lines += [f"| {one['sentence']} | {one['verdict']} | {text(one['found'])} |"
              for one in document["targets"]]  # fmt: skip
    for name, found in document["parts"].items():
        lines += ["", f"## {name}", "", *shown(name, found)]
    return lines


def shown(name: str, found: Document) -> list[str]:
    if "tests" in found:
        wrong = found["failures"] + found["errors"]
        passed = found["tests"] - wrong - found["skipped"]
        return [f"{passed} passed, {wrong} failed, {found['skipped']} skipped.",
                *(f"- failed: {one}" for one in found["wrong"])]  # fmt: skip
    if "steps" in found:
        facts = found["steps"].get(name, {})
        return ["| | |", "|---|---|", *(f"| {key} | {text(fact)} |" for key, fact in facts.items())]
    if "beliefs" in found:
        beliefs = found["beliefs"].values()
        other = [one for one in beliefs if one["found"] != "holds"]
        return [f"{len(beliefs) - len(other)} of {len(beliefs)} hold.",
                *(f"- {one['found']}: {one['belief']} {one['why']}" for one in other)]  # fmt: skip
    lines: list[str] = found.get("table", ["It did not end; the JSON file has the rest."])
    return lines


def text(fact: object) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{key} {value}" for key, value in fact.items())
    return str(fact).replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("half", choices=[*HALVES, "pack"])
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    parser.add_argument("--for-python", default="3.12", help="of `pack`: the GPU machine's version")
    parser.add_argument("--limit-s", type=float, help="default 370 for check, 400 for bench")
    parser.add_argument("--directory", type=Path, default=ROOT, help="for checkpoints")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--no-install", action="store_true", help="use the PCcheck that is here")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.half == "pack":
        return pack(options.wheels, options.for_python)
    if not options.no_install and is_stale(options.wheels):
        parser.error(f"{options.wheels} has another PCcheck than this folder: make gpu-pack again")
    parts, limit_s = HALVES[options.half]
    options.limit_s = options.limit_s or limit_s
    work = Path(tempfile.mkdtemp(prefix="pcc-gpu-"))
    work.chmod(0o711)  # parts also run under other user ids
    # Started in the background, this would ignore Ctrl-C, and so would the parts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        check = Check(options, work)
        if not options.dry and not check.document["gpu"]:
            parser.error("there is no GPU here; --dry (make: DRY=1) tries this command without one")
        if not options.no_install:
            check.install()
        for part in parts:
            if not options.only or part.name in options.only:
                check.part(part)
        print("\n".join(table(check.document)))
        print(f"written: {check.output / check.stem}.tar.gz")
        ends = [end["how"] for end in check.document["ended"].values()]
        wrong = {targets.NO_FIGURE, targets.MISSED}
        missed = any(one["verdict"] in wrong for one in check.document["targets"])
        return int(missed or any(how.startswith("failed") for how in ends))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
