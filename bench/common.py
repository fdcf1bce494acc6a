"""What the benches share: the state they save, fair conditions, clocks, result files."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import mmap
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

GIB = 1 << 30
MIB = 1 << 20
_HERE = Path(__file__).parent
#: Tests write elsewhere.
RESULTS = Path(os.environ.get("PCC_BENCH_RESULTS", _HERE / "results"))


class BenchError(Exception):
    """The bench cannot run here; the message has the fix."""


def exit_code(main: Callable[[], int]) -> int:
    """The exit code of `main`; 1, with a message, if the bench cannot run here."""
    try:
        return main()
    except BenchError as error:
        print(f"{program()}: {error}", file=sys.stderr)
        return 1


def program() -> str:
    """The bench that runs, as `python -m` takes it."""
    path = Path(sys.argv[0]).resolve().with_suffix("")
    inside = path.relative_to(_HERE) if path.is_relative_to(_HERE) else Path(path.name)
    return ".".join(["bench", *(part for part in inside.parts if part != "__main__")])


def arguments(
    description: str | None, *, sizes: Sequence[int] = (), rounds: int = 0
) -> argparse.ArgumentParser:
    """Takes --directory; --sizes and --rounds too if they have a default here."""
    made = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    if sizes:
        made.add_argument("--sizes", type=parse_sizes, default=sizes)
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    return made


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A new directory in it, with its whole path; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=directory) as made:
        yield Path(made).resolve()


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of some runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 3) -> str:
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} [{low}-{high}] n={self.runs}"


# -- the state ---------------------------------------------------------------------------------


class _Layer(nn.Module):
    """The parameters of one GPT-2 layer; nothing is computed with them here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Gpt2Like(nn.Module):
    """fp32 parameters with GPT-2's shapes; the embedding's rows make up the wanted size. A layer as
    wide as GPT-2's takes 81 MiB, with moments: smaller states have thinner ones."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        width = 64 if state_bytes < 64 * MIB else 768 if state_bytes <= 2 * GIB else 1024
        numbers = state_bytes // 12  # a parameter and two Adam moments, 4 bytes each
        layer = sum(p.numel() for p in _Layer(width).parameters())
        layers = max(1, int((numbers - 30_000 * width) // layer))
        rows = max(1, (numbers - layers * layer) // width)
        self.embedding = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))


def make_training_state(state_bytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW, moments included, about `state_bytes` of random fp32."""
    torch.manual_seed(1)
    model = Gpt2Like(state_bytes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.data.normal_()
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The same state as a flat dict, for formats that support nothing else."""
    flat = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        flat |= {f"optimizer.{index}.{key}": value for key, value in moments.items()}
    return flat


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# -- fair conditions ---------------------------------------------------------------------------


def warm_memory(count_bytes: int) -> None:
    """Touches free memory (as much as asked for, or most of it), so that no contender pays for
    pages that the host has taken back."""
    count_bytes = min(count_bytes, psutil.virtual_memory().available * 8 // 10)
    with mmap.mmap(-1, count_bytes) as room:
        page = b"\1" * (4 * MIB)
        for offset in range(0, count_bytes - len(page) + 1, len(page)):
            room[offset : offset + len(page)] = page


def settle() -> None:
    """Waits until no write of the previous contender is pending."""
    os.sync()
    time.sleep(0.2)


def sync_path(path: Path) -> None:
    """A file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_room(directory: Path, wanted_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < wanted_bytes:
        raise BenchError(
            f"{directory} has {free / GIB:.0f} GiB free, {wanted_bytes / GIB:.0f} GiB are needed; "
            "name another directory with --directory"
        )


def raw_disk(directory: Path, length: int) -> tuple[float, float]:
    """GB/s of direct writes, with a flush, and of direct reads: four threads, blocks of 4 MiB."""
    path, block = directory / "raw", 4 * MIB
    count = max(4, min(length, GIB) // block)
    with mmap.mmap(-1, block) as buffer:
        buffer[:] = os.urandom(block)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, count * block)
            rates = []
            for number in range(3):  # the first write also takes the file's blocks
                move = os.preadv if number == 2 else os.pwritev
                start_s = time.monotonic()
                with ThreadPoolExecutor(4) as threads:
                    offsets = range(0, count * block, block)
                    list(threads.map(lambda at, move=move: move(descriptor, [buffer], at), offsets))
                os.fsync(descriptor)
                rates.append(count * block / (time.monotonic() - start_s) / 1e9)
        finally:
            os.close(descriptor)
            path.unlink()
    return rates[1], rates[2]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, ended threads included, from its own CPU clock (see
    clock_getcpuclockid(3): the clock's number is made from the process id)."""
    return time.clock_gettime((~pid << 3) | 2)


# -- programs, files and pictures --------------------------------------------------------------


def build_rawwrite(directory: Path) -> Path:
    program = directory / "rawwrite"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run(
        [compiler, "-O2", "-o", str(program), str(_HERE / "rawwrite.c"), "-lpthread"], check=True
    )
    return program


def lay_out(path: Path, size_bytes: int) -> None:
    """A file whose every block has been written: overwriting it allocates nothing."""
    noise = os.urandom(MIB) * 16
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size_bytes, len(noise)):
            file.write(noise)
        os.fsync(file.fileno())
    drop_cache(path)


def drop_cache(path: Path) -> None:
    """Of a synced file, or of all files in a directory: the next read comes from the disk."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def machine() -> dict[str, object]:
    """Machine and versions, which a reader needs to judge the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    packages = ("torch", "numpy", "safetensors", "pyzmq", "msgpack", "uvloop", "pccheck")
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "memory_gib": round(memory / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "load_before": os.getloadavg(),
    }


def file_system(directory: Path) -> str:
    found = subprocess.run(
        ["findmnt", "-no", "FSTYPE", "-T", str(directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return " ".join(found.stdout.split()) or "unknown"


def write_results(name: str, document: dict[str, object], table: str) -> None:
    """`results/NAME-DATE.json` with every run, and `.md` for reading."""
    path = result_path(name, ".json")
    path.write_text(json.dumps(document, indent=1, default=_plain) + "\n")
    path.with_suffix(".md").write_text(table)
    print(f"{table}\nwritten: {path} and .md")


def result_path(name: str, suffix: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}-{datetime.date.today().isoformat()}{suffix}"


def require_pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise BenchError("matplotlib is missing: pip install 'pccheck[plot]'") from None


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(type(value).__name__)


def heading(title: str, facts: dict[str, object]) -> list[str]:
    versions = facts["versions"]
    assert isinstance(versions, dict)
    gpu = f", {facts['gpu']}" if "gpu" in facts else ""
    return [
        f"# {title}",
        "",
        f"{datetime.date.today().isoformat()}{gpu}, {facts['cpu']}, {facts['cpus']} CPUs, "
        f"{facts['memory_gib']} GiB, kernel {facts['kernel']}, {facts['file_system']}; "
        f"Python {facts['python']}, " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
        "",
        f"    {facts['command']}",
        "",
    ]


def parse_sizes(text: str) -> list[int]:
    """Bytes of each part of "512MiB,1GiB"."""
    units = {"MiB": MIB, "GiB": GIB}
    found = [re.fullmatch(r"(\d+)(MiB|GiB)", part) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError("sizes are written like 512MiB,1GiB,4GiB")
    return [int(part[1]) * units[part[2]] for part in found if part]


def facts_of(directory: Path) -> dict[str, object]:
    command = shlex.join(["python", "-m", program(), *sys.argv[1:]])
    return machine() | {"file_system": file_system(directory), "command": command}
