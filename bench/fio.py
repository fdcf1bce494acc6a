"""The limit: the best direct sequential transfer that fio or a plain C program reaches on a file.

One sweep over the whole grid picks the best settings; those few then run in every round, with the
contenders between them, so that both use the same disk at the same time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.common import GIB, MIB, BenchError, settle

BLOCKS_BYTES = (1 * MIB, 4 * MIB, 16 * MIB)
DEPTHS = (1, 2, 4, 8, 16, 32)
ENGINES = ("io_uring", "libaio")
#: (threads, bytes of a buffer, kind of memory) of the plain C program.
RAW = (
    (2, 16 * MIB, "buffers"),
    (2, 4 * MIB, "buffers"),
    (1, 16 * MIB, "buffers"),
    (2, 16 * MIB, "memfd"),
)
#: The same for reads whose bytes are then copied to their place.
COPIED = ((2, 4 * MIB), (2, 16 * MIB), (4, 4 * MIB), (4, 16 * MIB))
FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to move the file: of fio, or of the plain C program when `engine` is "rawwrite"."""

    engine: str
    block_bytes: int
    depth: int  # threads for psync and rawwrite
    memory: str = "buffers"

    @property
    def name(self) -> str:
        source = "" if self.memory == "buffers" else f", {self.memory}"
        return f"{self.engine} {self.block_bytes // MIB} MiB x {self.depth}{source}"


def require_fio() -> str:
    found = shutil.which("fio")
    if not found:
        raise BenchError("fio is needed to measure the limit (Debian: apt-get install fio)")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def grid() -> list[Setting]:
    queued = [Setting(e, b, d) for e in ENGINES for b in BLOCKS_BYTES for d in DEPTHS]
    threads = [Setting("psync", b, d) for b in BLOCKS_BYTES for d in (1, 2)]
    return queued + threads + [Setting("rawwrite", b, t, memory) for t, b, memory in RAW]


class Limit:
    """Measures settings on one laid-out file."""

    def __init__(self, file: Path, size_bytes: int, rawwrite: Path) -> None:
        self.file = file
        self.size_bytes = size_bytes
        self.rawwrite = rawwrite
        self.unavailable: dict[str, str] = {}

    def seconds(self, setting: Setting, *, write: bool) -> float:
        """Time of one sequential pass, the final flush of a write included."""
        if setting.engine == "rawwrite":
            return self._raw_seconds(setting, write=write)
        return self._fio_seconds(setting, write=write)

    def copied_seconds(self) -> float:
        """The best time of the plain C program for one pass that reads and copies the bytes."""
        settings = [Setting("rawwrite", block, threads, "copied") for threads, block in COPIED]
        return min(self._raw_seconds(setting, write=False) for setting in settings)

    def _raw_seconds(self, setting: Setting, *, write: bool) -> float:
        words = [
            str(self.rawwrite), "write" if write else "read", str(self.file),
            str(self.size_bytes), str(setting.depth), str(setting.block_bytes), setting.memory,
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(done.stderr.strip())
        return float(done.stdout)

    def _fio_seconds(self, setting: Setting, *, write: bool) -> float:
        jobs = setting.depth if setting.engine == "psync" else 1
        words = [
            "fio", "--name=limit", f"--filename={self.file}", "--direct=1", "--thread=1",
            f"--rw={'write' if write else 'read'}", f"--bs={setting.block_bytes}",
            f"--ioengine={setting.engine}", "--invalidate=0", "--output-format=json",
            f"--numjobs={jobs}", f"--size={self.size_bytes // jobs}", "--group_reporting=1",
        ]  # fmt: skip
        if jobs > 1:
            words += [f"--offset_increment={self.size_bytes // jobs}"]
        else:
            words += [f"--iodepth={setting.depth}"]
        if write:
            words += ["--overwrite=1", "--end_fsync=1", "--refill_buffers=0"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"fio {setting.name}: {(done.stderr or done.stdout).strip()[-300:]}")
        side = json.loads(done.stdout)["jobs"][0]["write" if write else "read"]
        # bw_bytes is bytes over the slowest job's time; runtime has whole milliseconds only.
        return float(self.size_bytes / side["bw_bytes"])

    def finalists(self, *, write: bool) -> tuple[list[Setting], list[dict[str, object]]]:
        """The best settings of fio and of the plain C program in one sweep, always with the memfd
        one among them; and the whole sweep."""
        sweep: list[dict[str, object]] = []
        times: dict[Setting, float] = {}
        for setting in grid():
            if setting.engine in self.unavailable:
                continue
            try:
                times[setting] = self.seconds(setting, write=write)
            except BenchError as error:
                self.unavailable[setting.engine] = str(error)
                continue
            speed = self.size_bytes / times[setting]
            sweep.append({"setting": setting.name, "seconds": times[setting], "bytes_per_s": speed})
            print(f"  {setting.name:32} {speed / GIB:6.2f} GiB/s", flush=True)
        settle()
        fastest = sorted(times, key=times.__getitem__)
        fio = [s for s in fastest if s.engine != "rawwrite"][:FINALISTS]
        raw = [s for s in fastest if s.engine == "rawwrite" and s.memory == "buffers"][:FINALISTS]
        return fio + raw + [s for s in fastest if s.memory == "memfd"], sweep
