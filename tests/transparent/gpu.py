"""What PCcheck believes of snapshots of processes with a GPU: every belief is a sentence and a
check, as in tests/standin/behaviours.py; a part of `make gpu-check`.

    python -m tests.transparent.gpu [--json FILE] [--only NAME]...     on a machine with a GPU
    python -m tests.transparent.gpu --dry                              on the stand-in

Those with CRIU need root, and a CRIU (--criu; else .criu, which `make transparent-check` fills).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pccheck_process import gpu
from pccheck_process.gpu import holding, inspecting, nvml
from pccheck_process.looking import Looked, look
from tests.support import criu, standin
from tests.support.daemon import Daemon
from tests.support.waiting import until
from tests.transparent import runs
from tests.transparent.cases import Case
from tests.transparent.ways import Ctl
from tests.transparent.who import Who

FLAGS = ("--dram", "2GiB", "--slots", "3", "--keep", "1")
HELD_ROUNDS = 3
_DRY = "PCCHECK_DRY_GPU"


class GpuWho(Who):
    """The user of this process, with the variables that say which GPU it is."""

    @property
    def environment(self) -> dict[str, str]:  # type: ignore[override]
        kept = {name: value for name, value in os.environ.items()
                if name.startswith(("PCCHECK_STANDIN_", "PCCHECK_TEST_GPU"))}  # fmt: skip
        return Who(self.uid).environment | kept


class NotHereError(Exception):
    """The belief cannot be tried here."""


@dataclass
class Trial:
    """What the checks share."""

    folder: Path
    case: Case
    program: Path | None  #: CRIU
    numbers: dict[str, Any] = field(default_factory=dict)
    who: Who = field(default_factory=GpuWho)
    lines: list[str] = field(default_factory=list)

    def criu(self) -> Path:
        if os.geteuid() != 0:
            raise NotHereError("not root")
        if self.program is None:
            raise NotHereError(f"no CRIU in {criu.FOLDER}")
        return self.program

    @contextlib.contextmanager
    def daemon(self) -> Iterator[Daemon]:
        with Daemon(*FLAGS).start() as daemon:
            daemon.open_to_everybody()
            yield daemon

    def wanted(self, daemon: Daemon) -> list[str]:
        """The lines of a loop that is let alone; it runs once."""
        if not self.lines:
            place = self.who.own(self.new("whole"))
            self.lines = runs.whole(self.case, place, daemon, self.who)
        return self.lines

    def new(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    @contextlib.contextmanager
    def target(self) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """The loop, some steps later; and its log."""
        place = self.new("target")
        log = place / "log"
        with (place / "err").open("wb") as errors:
            process = subprocess.Popen(
                self.case.command(sys.executable, log), env=self.who.environment, cwd=place,
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True,
            )  # fmt: skip
        try:
            lines = self.case.steps // 4
            until(lambda: _lines(log) >= lines or process.poll() is not None)
            assert process.poll() is None, (place / "err").read_text()[-2000:]
            yield process, log
        finally:
            process.kill()
            process.wait()


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _look(pid: int) -> Looked:
    return inspecting.inspect(look(pid, tree=True, root=os.geteuid() == 0))


# -- beliefs -------------------------------------------------------------------------------------


def nvml_tells_who_uses_a_gpu(trial: Trial) -> None:
    """NVML tells which GPU a process uses, and at least the bytes of its tensors."""
    with trial.target() as (process, _):
        found = [one.used_by[process.pid] for one in nvml.devices() if process.pid in one.used_by]
    assert len(found) == 1 and found[0] >= 3 * 4 * 512 * 512, found


def nothing_is_in_the_way(trial: Trial) -> None:
    """A torch loop on one GPU is not refused; its GPU memory counts for the image."""
    with trial.target() as (process, _):
        before = look(process.pid, tree=True, root=os.geteuid() == 0)
        found = inspecting.inspect(before)
    assert found.gpu and not found.refusals, found.refusals
    trial.numbers["gpu_bytes"] = found.image_bytes - before.image_bytes
    assert found.image_bytes > before.image_bytes


def a_held_process_has_no_gpu_open(trial: Trial) -> None:
    """A process that the driver has checkpointed has no /dev/nvidia* open or mapped."""
    with trial.target() as (process, _):
        looked = _look(process.pid)
        with holding.hold(looked) as held:
            assert held.facts, "it was not held"
            user = inspecting.user_of(inspecting.Proc(Path("/proc")), process.pid)
            assert user is not None and not user.devices, user
    trial.numbers["facts"] = held.facts


def a_held_process_goes_on(trial: Trial) -> None:
    """A loop that is held three times gives the same losses as one that never was."""
    with trial.daemon() as daemon:
        wanted = trial.wanted(daemon)
    times: list[list[float]] = []
    with trial.target() as (process, log):
        for _ in range(HELD_ROUNDS):
            looked, begin = _look(process.pid), time.monotonic()
            with holding.hold(looked) as held:
                assert held.facts, "it was not held"
                taken = time.monotonic()
            times.append([taken - begin, time.monotonic() - taken])
            lines = _lines(log)
            until(lambda lines=lines: _lines(log) > lines or process.poll() is not None)
        assert process.wait(runs.LIMIT_S) == 0
        assert log.read_text().splitlines() == wanted
    trial.numbers["held_s"] = [[round(one, 3) for one in pair] for pair in times]


def a_killed_snapshot_lets_it_go_on(trial: Trial) -> None:
    """When `pccheckctl snapshot` is killed while it holds a loop, the loop goes on as before."""
    program = trial.criu()
    with trial.daemon() as daemon:
        wanted = trial.wanted(daemon)
        command = [sys.executable, "-m", "pccheckctl", "--socket", str(daemon.socket), "snapshot"]
        with trial.target() as (process, log):
            asks = subprocess.Popen(
                [*command, str(process.pid)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=trial.who.environment | {"PCCHECK_CRIU": str(program)},
            )  # fmt: skip
            until(lambda: process.pid in gpu.held_now() or asks.poll() is not None)
            asks.kill()
            asks.wait()
            assert process.wait(runs.LIMIT_S) == 0, "the loop has not gone on"
            assert log.read_text().splitlines() == wanted
    until(lambda: not gpu.held_now())


def a_snapshot_ends_it_and_a_restore_brings_it_back(trial: Trial) -> None:
    """Snapshotted, ended and restored, a loop gives the same losses as one that never was."""
    _snapshotted(trial, goes_on=False)


def a_process_goes_on_after_its_snapshot(trial: Trial) -> None:
    """Snapshotted, gone on, killed and restored, a loop gives the same losses."""
    _snapshotted(trial, goes_on=True)


def _snapshotted(trial: Trial, *, goes_on: bool) -> None:
    program, place = trial.criu(), trial.who.own(trial.new("snapshot"))
    with trial.daemon() as daemon:
        wanted = trial.wanted(daemon)
        way = Ctl(trial.case, daemon, program, place, trial.who)
        step = trial.case.steps // 3
        found = runs.snapshotted(
            trial.case, place, daemon, trial.who, way, wanted, step, goes_on=goes_on
        )
    taken = found.taken
    assert taken is not None, found.refused
    trial.numbers["goes on" if goes_on else "ends"] = {
        "bytes": taken.bytes, "pause_s": round(taken.pause_s, 3),
        "durable_s": round(taken.durable_s, 3), "restore_s": round(found.restore_s, 3),
    }  # fmt: skip


BELIEFS: dict[str, Callable[[Trial], None]] = {
    one.__name__: one
    for one in (
        nvml_tells_who_uses_a_gpu,
        nothing_is_in_the_way,
        a_held_process_has_no_gpu_open,
        a_held_process_goes_on,
        a_killed_snapshot_lets_it_go_on,
        a_snapshot_ends_it_and_a_restore_brings_it_back,
        a_process_goes_on_after_its_snapshot,
    )
}


def find_out(trial: Trial, belief: Callable[[Trial], None]) -> tuple[str, str]:
    """("holds", "FALSE" or "skipped", why)"""
    try:
        belief(trial)
    except NotHereError as reason:
        return "skipped", str(reason)
    except Exception as error:
        return "FALSE", f"{type(error).__name__}: {error}"
    return "holds", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--only", action="append", choices=tuple(BELIEFS), metavar="NAME")
    parser.add_argument("--criu", type=Path, help="this program")
    parser.add_argument("--dry", action="store_true", help="on the stand-in")
    parser.add_argument("--limit-s", type=float, default=600.0, help="begin no check after that")
    options = parser.parse_args()
    if options.dry and _DRY not in os.environ:
        return _on_the_stand_in()
    found = options.criu or criu.FOLDER / "bin" / "criu"
    case = Case("gpu", "gpu", steps=150, pace=0.03)
    folder = Path(tempfile.mkdtemp(prefix="pcc-gpu-snapshots-"))
    folder.chmod(0o755)
    trial = Trial(folder, case, found.resolve() if found.exists() else None)
    results: dict[str, Any] = {}
    document = {"beliefs": results, "numbers": trial.numbers}
    until_s = time.monotonic() + options.limit_s
    try:
        for name in options.only or BELIEFS:
            sentence = " ".join((BELIEFS[name].__doc__ or "").split())
            late = time.monotonic() > until_s
            how, why = ("skipped", "no time left") if late else find_out(trial, BELIEFS[name])
            results[name] = {"belief": sentence, "found": how, "why": why}
            print(f"{how:8}{sentence}{f' -- {why}' if why else ''}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(trial.numbers))
    return int(any(one["found"] == "FALSE" for one in results.values()))


def _on_the_stand_in() -> int:
    """This program again: the loader reads its variables at the start."""
    with standin.device_memory() as directory:
        environment = standin.environment(directory, dead="keep", stages=True)
        return subprocess.run(
            [sys.executable, "-m", "tests.transparent.gpu", *sys.argv[1:]],
            env=os.environ | environment | {_DRY: "1"}, check=False,
        ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
