"""Snapshots of processes that know nothing of them, with one fault in each round.

    python -m tests.integration.process_campaign --rounds 200 --seed 1 [--only ROUND]

With the real CRIU, daemon and commands. A program that counts in a file is snapshotted up to three
times; command, daemon, CRIU (only while it streams pages) or the program itself is killed or
stopped at some phase, or the disk fails. Checked in every round: the program counts on in order,
nobody holds it, or it has ended and a durable snapshot has everything that it ever wrote; every
durable snapshot is restored and counts on; what a restore cuts off a file is in another file; no
process and no private directory is left. Prints counts per fault and phase.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pccheck_native import _core
from pccheck_process.facts import Facts
from pccheck_process.index import unpack
from pccheck_store.directory import Storage
from pccheck_wire.errors import PccheckError
from tests.support import criu, procmarks, selfchecking
from tests.support.counting import Commands, Counter, state_of
from tests.support.daemon import Daemon
from tests.support.procmarks import SOON_S, soon

#: What a command is sent.
SIGNALS = {
    "command killed": signal.SIGKILL, "command stopped": signal.SIGSTOP,
    "command terminated": signal.SIGTERM, "command interrupted": signal.SIGINT,
}  # fmt: skip
#: What the shim of the daemon does.
DISK = {
    "disk full": ("enospc:data:1", "enospc:data:3", "enospc:data:7"),
    "disk fails once": ("eio:data:1", "eio:data:4", "eio:flush:1", "eio:record-a:1",
                        "late:record-a:1"),
    "disk dies": ("dead:data:1", "dead:data:5", "last:record-a:1"),
    "daemon killed at a point": ("kill:data:1", "kill:data:6", "kill:flush:1", "kill:record-a:1",
                                 "kill:record-b:1"),
}  # fmt: skip
RESTORES = ("restore killed", "criu of a restore killed")
#: What goes wrong, in turn.
ROTATION = (
    *SIGNALS, "daemon killed", "criu killed", "target killed", "target ended", "second snapshot",
    *DISK, *RESTORES, "command killed", "command stopped", "daemon killed", "restore killed",
    "none",
)  # fmt: skip
#: Phase of a snapshot -> how much later, at most, the fault comes.
PHASES = {"asked": 0.3, "admitted": 0.1, "frozen": 0.2, "hook": 0.3, "durable": 0.015}
#: The same of a restore: the private directory is there, CRIU is, a process with its pid is.
RESTORE_PHASES = {"asked": 0.3, "criu": 0.2, "made": 0.15}
STALL_S = 2
_MOVES = 5


@dataclass(frozen=True)
class ProcessPlan:
    """What happens in a round; drawn from seed and number alone."""

    kind: str
    mode: str
    fault: str
    phase: str
    later_s: float
    leaves: tuple[bool, ...]  #: for each snapshot, whether the program goes on
    struck: int  #: which of them meets the fault
    dram: str
    shim: str
    own_pids: bool
    by_step: bool

    @classmethod
    def drawn(cls, seed: int, number: int) -> ProcessPlan:
        rng = random.Random(f"{seed}/{number}")
        fault = ROTATION[number % len(ROTATION)]
        phases = RESTORE_PHASES if fault in RESTORES else PHASES
        phase = rng.choice([*phases])
        leaves = [rng.random() < 0.8 for _ in range(rng.randint(1, 3))]
        struck = rng.randrange(len(leaves))
        leaves[:struck] = [True] * struck
        kind = rng.choices([*selfchecking.KINDS], (4, 4, 3, 3, 1))[0]
        dram, shim = rng.choice(["16MiB", "256MiB"]), f"slow:data:{rng.choice([0, 5000, 30000])}"
        if fault == "criu killed":
            phase, kind, dram, shim = "frozen", "large", "16MiB", "slow:data:30000"
        elif fault not in RESTORES and phase != "asked":
            leaves[struck] = rng.random() < 0.3 and phase != "durable"
            if phase == "hook" and rng.random() < 0.7:  # the image is copied long before its record
                dram, shim = "256MiB", "slow:data:60000"
        return cls(
            kind=kind, mode=rng.choice(selfchecking.MODES), fault=fault, phase=phase,
            later_s=rng.random() ** 2 * phases[phase], leaves=(*leaves,), struck=struck, dram=dram,
            shim=rng.choice(DISK[fault]) if fault in DISK else shim,
            own_pids=fault != "criu of a restore killed" and rng.random() < 0.5,
            by_step=rng.random() < 0.3,
        )  # fmt: skip


@dataclass
class ProcessTally:
    """Counts, and what was wrong."""

    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    seen: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)


class AskedCommand:
    """A `pccheckctl` that runs; what it says is in files."""

    def __init__(self, commands: Commands, folder: Path, words: list[object]) -> None:
        self.words = " ".join(map(str, words))
        number = len([*folder.glob("said-*")])
        self._out, self._err = folder / f"said-{number}", folder / f"errors-{number}"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                commands.line(*words), env=commands.environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self.pid = self.process.pid

    def runs(self) -> bool:
        return self.process.poll() is None

    def ended(self) -> int:
        """Its exit code. It has never more to say than a sentence."""
        soon(lambda: not self.runs(), lambda: f"{self} does not end", SOON_S * 2)
        assert "Traceback" not in self.errors, str(self)
        return int(self.process.returncode)

    @property
    def errors(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def document(self) -> Any:
        return json.loads(self._out.read_text())

    def __str__(self) -> str:
        return f"{self.words} (status {self.process.poll()}): {self.errors.strip()}"


class SnapshotRound:
    """One daemon, one program, one fault."""

    def __init__(self, plan: ProcessPlan, tally: ProcessTally, daemon: Daemon) -> None:
        self.plan, self.seen, self.daemon = plan, tally.seen, daemon
        self.faults = tally.faults
        self.mark, self.private = str(daemon.root), daemon.root / "private"
        for place in (self.private, daemon.root / "target"):
            place.mkdir()
        self.commands = Commands(daemon)
        self.commands.environment |= {procmarks.MARK: self.mark, "TMPDIR": str(self.private)}
        if plan.fault == "command stopped":
            self.commands.environment["PCC_SNAPSHOT_STALL_S"] = str(STALL_S)
        self.counter: Counter | None = None
        self.acknowledged: list[int] = []
        self.killed = False  #: the program, by us
        self.said: list[AskedCommand] = []

    # -- taking ------------------------------------------------------------------------------------

    def play(self) -> None:
        plan, variable = self.plan, f"{procmarks.MARK}={self.mark}"
        root = self.daemon.root / "target"
        self.counter = selfchecking.counter(root, plan.kind, plan.mode, variable)
        for at, leave in enumerate(plan.leaves):
            if plan.fault not in RESTORES and at == plan.struck:
                self._struck(leave)
            else:
                command = self._asked(leave)
                self._judged(command, command.ended(), required=at < plan.struck)
            self._free()
            if self._target.process.poll() is not None:
                break
        self._restore_all()
        self._nothing_left()

    @property
    def _target(self) -> Counter:
        assert self.counter is not None
        return self.counter

    def _ask(self, *words: object) -> AskedCommand:
        self.said.append(AskedCommand(self.commands, self.daemon.root, [*words]))
        return self.said[-1]

    def _asked(self, leave: bool) -> AskedCommand:
        words = ["--leave-running"] if leave else []
        words += ["--tree"] if self.plan.kind == "tree" else []
        return self._ask("snapshot", self._target.pid, "--name", "job", "--json", *words)

    def _judged(self, command: AskedCommand, code: int, *, required: bool = False) -> None:
        """Counts how a snapshot ended."""
        if code == 0:
            self.acknowledged.append(command.document["step"])
        self.seen["snapshots durable" if code == 0 else "snapshots refused or failed"] += 1
        assert code == 0 or not required, f"failed without a fault: {command}"

    def _struck(self, leave: bool) -> None:
        """A snapshot that meets the fault."""
        plan = self.plan
        self.daemon.armed.touch()
        command = self._asked(leave)
        if plan.fault in DISK or plan.fault == "none":
            self._count(plan.shim if plan.fault in DISK else "none")
        elif self._reached(command):
            time.sleep(plan.later_s)  # not synchronisation: the moment of the fault is the test
            now = self._phase(command)
            self._count(f"{plan.fault}, {now}" if self._strike(command) else "came too late")
        else:
            self._count("came too late")
        self._judged(command, command.ended())
        self.daemon.armed.unlink()

    def _count(self, what: str) -> None:
        self.faults[what] += 1

    def _reached(self, command: AskedCommand) -> bool:
        """Waits for the phase; False when the command has ended before."""
        holds: Callable[[], object] = {
            "asked": lambda: any(self.private.iterdir()),
            "admitted": lambda: procmarks.criu_of(command.pid),
            "frozen": lambda: procmarks.tracer_of(self._target.pid),
            "hook": lambda: procmarks.at_hook(command.pid),
            "durable": lambda: max(self._steps(), default=0) > self._newest,
        }[self.plan.phase]
        soon(lambda: holds() or not command.runs(), lambda: f"never {self.plan.phase}: {command}")
        return command.runs()

    def _phase(self, command: AskedCommand) -> str:
        """Where it is; later than planned, maybe."""
        criu_pid = procmarks.criu_of(command.pid)
        if max(self._steps(), default=0) > self._newest:
            return "durable" if criu_pid else "after criu"
        if procmarks.at_hook(command.pid):
            return "hook"
        if procmarks.tracer_of(self._target.pid):
            return "frozen"
        return "admitted" if criu_pid else "without criu"

    @property
    def _newest(self) -> int:
        return max(self.acknowledged, default=0)

    def _steps(self) -> list[int]:
        """Of durable snapshots, as the files say."""
        try:
            held = Storage(self.daemon.storage).held(job="job").checkpoints
        except PccheckError:
            return []
        return [one.id.step for one in held if one.flags & _core.SLOT_IMAGE]

    def _strike(self, command: AskedCommand) -> bool:
        """False when the command has ended before."""
        fault = self.plan.fault
        if not command.runs():
            return False
        if fault == "command stopped":
            self._stop(command)
        elif fault in SIGNALS:
            command.process.send_signal(SIGNALS[fault])
        elif fault == "daemon killed":
            self.daemon.kill()
        elif fault == "criu killed":
            return self._kill_criu(command)
        elif fault == "second snapshot":
            second = self._asked(leave=self.plan.leaves[self.plan.struck])
            self._judged(second, second.ended())
        else:
            number = signal.SIGKILL if fault == "target killed" else signal.SIGTERM
            self.killed = self._target.process.poll() is None
            self._target.process.send_signal(number)
        return True

    def _stop(self, command: AskedCommand) -> None:
        """The watchdog ends it, or nothing stands still."""
        command.process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(STALL_S + 10)
            self.seen["ended by the watchdog"] += 1
        if command.runs():
            self._free()
            command.process.send_signal(signal.SIGCONT)

    def _kill_criu(self, command: AskedCommand) -> bool:
        while command.runs():
            criu_pid = procmarks.criu_of(command.pid)
            if criu_pid and procmarks.kill_in_pages(criu_pid):
                return True
            time.sleep(0.002)
        return False

    # -- the program -------------------------------------------------------------------------------

    def _free(self) -> None:
        """Nobody holds the program and it counts on, or it has ended."""
        pid, process = self._target.pid, self._target.process
        self._without_criu()
        self._revived()
        soon(
            lambda: (
                process.poll() is not None
                or (state_of(pid) in ("R", "S") and not procmarks.tracer_of(pid))
            ),
            lambda: f"the target is {state_of(pid)}, traced by {procmarks.tracer_of(pid)}",
        )
        if self.killed and self.plan.fault == "target ended":
            soon(lambda: process.poll() is not None, lambda: "the target did not end by SIGTERM")
        if process.poll() is None:
            self._moves(3)
        self._in_order()

    def _without_criu(self) -> None:
        """Of a command that was killed, CRIU is there for a while."""
        soon(
            lambda: not self._orphans(),
            lambda: f"criu is left: {procmarks.described(self._orphans())}",
        )

    def _orphans(self) -> set[int]:
        """Each CRIU without its command."""
        held = {procmarks.criu_of(one.pid) for one in self.said if one.runs()}
        return {*filter(procmarks.is_criu, procmarks.marked(self.mark))} - held

    def _revived(self) -> None:
        """The daemon is there again, and has died of nothing but the fault."""
        process = self.daemon.process
        assert process is not None
        if process.poll() is not None:
            assert self.plan.fault.startswith("daemon"), "the daemon has ended"
            self.daemon.shim = ""
            self.daemon.start()

    def _moves(self, by: int) -> None:
        before = len(self._target.numbers)
        soon(
            lambda: len(self._target.numbers) >= before + by,
            lambda: (
                f"it does not count on: {self._target.numbers[-3:]}, "
                + procmarks.described(procmarks.marked(self.mark))
            ),
        )

    def _in_order(self) -> None:
        numbers = self._target.numbers
        wrong = [at for at, number in enumerate(numbers, 1) if at != number]
        assert not wrong, f"counted {numbers[max(0, wrong[0] - 3) : wrong[0] + 3]}"

    # -- restoring ---------------------------------------------------------------------------------

    def _listed(self) -> list[int]:
        """The steps of all durable snapshots, the newest first."""
        done = self.commands.run("list", "--json")
        assert done.returncode == 0, done.stderr
        steps = sorted(
            (one["step"] for one in json.loads(done.stdout)["checkpoints"]), reverse=True
        )
        assert max(steps, default=0) >= self._newest, f"{steps} are left of {self.acknowledged}"
        if steps:
            verified = self.commands.run("verify", "job")
            assert verified.returncode == 0, verified.stdout + verified.stderr
            assert "0 damaged" in verified.stdout, verified.stdout
        return steps

    def _restore_all(self) -> None:
        steps, ended = self._listed(), self._target.process.poll() is not None
        wrote = len(self._log()) if ended and not self.killed else 0
        assert steps or not wrote, "the target has ended, and there is no snapshot"
        self.seen["targets that went on"] += not ended
        if steps and self.plan.fault in RESTORES:
            self._end_target()
            self._restore_struck(steps[0])
        for at, step in enumerate(steps):
            own_pids = self.plan.own_pids and not at
            if own_pids and self._target.process.poll() is None:
                self._target.process.send_signal(signal.SIGSTOP)  # both would count in one file
            else:
                self._end_target()
            words: list[object] = ["--step", step] if at or self.plan.by_step else []
            if own_pids:
                words += ["--own-pids", *self._forced()]
            held = self._restored(step, *words)
            assert at or held >= wrote, f"{held} of {wrote} bytes are in the snapshot"
        self._end_target()

    def _forced(self) -> list[str]:
        """What a restore needs beside the program itself, which writes to the same file."""
        if self._target.process.poll() is not None:
            return []
        refused = self._ask("restore-process", "job", "--own-pids")
        assert refused.ended() == 1, str(refused)
        assert "writes to" in refused.errors, str(refused)
        self.seen["restores refused beside the target"] += 1
        return ["--force"]

    def _end_target(self) -> None:
        """With its children."""
        if self._target.process.poll() is None:
            self._target.process.kill()
            self._target.process.wait()
        self._nobody_left()

    def _restored(self, step: int, *words: object) -> int:
        """A restore that counts on, and ends by a signal. Returns what the file had at its
        snapshot, in bytes."""
        before, kept = self._log(), self._kept()
        command = self._ask("restore-process", "job", *words)
        told = f"goes on from step {step}"
        soon(lambda: told in command.errors or not command.runs(), command.__str__)
        assert command.runs(), f"not restored: {command}"
        if not self._ends_by_the_image(command):
            self._moves(_MOVES)
            assert not self._tracers()
            command.process.send_signal(signal.SIGTERM)
        code = command.ended()
        assert code == 128 + signal.SIGTERM, str(command)
        if self._target.process.poll() is not None:
            self._nobody_left()
        self._in_order()
        self.seen["restores"] += 1
        return self._nothing_lost(before, kept, step)

    def _ends_by_the_image(self, command: AskedCommand) -> bool:
        """The signal of this round may have come before the freeze was complete: it is in the image
        then, and the restored program ends by it, too."""
        if self.plan.fault != "target ended":
            return False
        before = len(self._target.numbers)
        soon(
            lambda: len(self._target.numbers) >= before + _MOVES or not command.runs(),
            command.__str__,
        )
        self.seen["restores that ended by a signal in the image"] += not command.runs()
        return not command.runs()

    def _tracers(self) -> dict[int, int]:
        found = {pid: procmarks.tracer_of(pid) for pid in procmarks.marked(self.mark)}
        return {pid: tracer for pid, tracer in found.items() if tracer}

    def _log(self) -> bytes:
        return self._target.log.read_bytes()

    def _kept(self) -> set[Path]:
        return {*self._target.log.parent.glob("log.pccheck-*")}

    def _nothing_lost(
        self, before: bytes, kept: set[Path], step: int, *, killed: bool = False
    ) -> int:
        """Every byte that was in the file is there, or in the file beside it; how many are. One
        that was killed may have copied a part, and have cut nothing."""
        after, fresh, size = self._log(), self._kept() - kept, self._size_at(step)
        ends = [path.read_bytes() for path in fresh]
        if killed and ends != [before[size:]]:
            assert after.startswith(before), f"{fresh} has not all that was cut off"
            return len(before)
        assert ends == ([before[size:]] if before[size:] else []), f"{fresh} has other bytes"
        assert after.startswith(before[:size]), "the file has other bytes"
        return size

    def _size_at(self, step: int) -> int:
        """Of the program's file, in a snapshot."""
        storage = Storage(self.daemon.storage)
        (one,) = (one for one in storage.held(job="job").checkpoints if one.id.step == step)
        with contextlib.closing(storage.open([one])) as payloads:
            index = unpack(payloads.packed_tree(one.id.rank), one.payload_bytes)
        written = Facts.of_plain(index.facts).written
        sizes = {file.size_bytes for file in written if file.path == str(self._target.log)}
        if not sizes:  # the program was ending, and had closed the file
            assert self.plan.fault == "target ended", "the file is not in the snapshot"
            return len(self._log())
        (size,) = sizes
        return size

    def _restore_struck(self, step: int) -> None:
        """It, or its CRIU, is killed: the process is whole, or none is there."""
        before, kept, plan = self._log(), self._kept(), self.plan
        command = self._ask("restore-process", "job", *(["--own-pids"] if plan.own_pids else []))
        holds: Callable[[], object] = {
            "asked": lambda: any(self.private.iterdir()),
            "criu": lambda: procmarks.criu_of(command.pid),
            "made": lambda: state_of(self._target.pid),
        }[plan.phase]
        soon(lambda: holds() or "goes on" in command.errors or not command.runs(), command.__str__)
        time.sleep(plan.later_s)  # not synchronisation: the moment of the fault is the test
        hit = self._kill_restore(command)
        self._count(f"{plan.fault}, {plan.phase}" if hit else "came too late")
        if hit and plan.fault != "restore killed":
            self._after_criu(command, before, kept)
        self._whole_or_none()
        self._in_order()
        self._nothing_lost(before, kept, step, killed=True)
        self._private_gone()

    def _kill_restore(self, command: AskedCommand) -> bool:
        if self.plan.fault == "restore killed":
            command.process.kill()
            return command.ended() == -signal.SIGKILL
        while command.runs() and "goes on" not in command.errors:
            if pid := procmarks.criu_of(command.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def _after_criu(self, command: AskedCommand, before: bytes, kept: set[Path]) -> None:
        """Of a CRIU that is killed only the error is left."""
        soon(lambda: "goes on" in command.errors or not command.runs(), command.__str__)
        if command.runs():
            self._count("restored all the same")
            return
        assert command.ended() == 1, str(command)
        assert not procmarks.marked(self.mark), procmarks.described(procmarks.marked(self.mark))
        assert self._log() == before, "the files were not put back"
        assert self._kept() == kept

    def _whole_or_none(self) -> None:
        """What is left of a restore counts on, or has gone soon. Ends it."""

        def runs() -> bool:
            before = len(self._target.numbers)
            time.sleep(0.2)
            return len(self._target.numbers) > before

        soon(
            lambda: not procmarks.marked(self.mark) or runs(),
            lambda: f"half-made: {procmarks.described(procmarks.marked(self.mark))}", 20,
        )  # fmt: skip
        self.seen["went on without its restore"] += bool(procmarks.marked(self.mark))
        self.clear()
        self._nobody_left()

    # -- the end -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Ends everything that the round has started, but not its daemon."""
        for pid in procmarks.marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in [*(one.process for one in self.said), *self._processes()]:
            process.wait(SOON_S)

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [self.counter.process] if self.counter is not None else []

    def _nobody_left(self) -> None:
        soon(
            lambda: not procmarks.marked(self.mark),
            lambda: f"left: {procmarks.described(procmarks.marked(self.mark))}", 20,
        )  # fmt: skip

    def _private_gone(self) -> None:
        soon(
            lambda: not any(self.private.iterdir()),
            lambda: f"left in the temporary directory: {[*self.private.iterdir()]}", 20,
        )  # fmt: skip

    def _nothing_left(self) -> None:
        self._nobody_left()
        self._private_gone()
        self._revived()
        assert "Traceback" not in self.daemon.log.read_text(), "an error of the daemon"

    def told(self) -> str:
        """What a reader of a violation needs."""
        lines = [f"  {self.plan}", *(f"  {one}" for one in self.said)]
        if self.counter is not None:
            numbers = self.counter.output.read_text()[-500:]
            lines.append(f"  acknowledged {self.acknowledged}; output of the target: {numbers!r}")
        return "\n".join([*lines, *self.daemon.log.read_text().splitlines()[-8:]])


def play(number: int, seed: int, tally: ProcessTally) -> None:
    plan = ProcessPlan.drawn(seed, number)
    flags = ("--chunk", "1MiB", "--dram", plan.dram)
    with Daemon(*flags, shim=plan.shim) as daemon:
        daemon.start()
        played = SnapshotRound(plan, tally, daemon)
        try:
            played.play()
        except (AssertionError, PccheckError, subprocess.TimeoutExpired) as error:
            again = f"python -m {__spec__.name} --seed {seed} --only {number}"
            tally.violations.append(f"round {number}: {error}\n{played.told()}\n  again: {again}")
            print("VIOLATION", tally.violations[-1], flush=True)
        finally:
            played.clear()


def report(tally: ProcessTally, rounds: int, seed: int) -> None:
    seen, wrong = tally.seen, len(tally.violations)
    print(f"seed {seed}: {rounds} rounds, {seen.pop('snapshots durable', 0)} snapshots durable, "
          f"{seen.pop('snapshots refused or failed', 0)} refused or failed, "
          f"{seen.pop('restores', 0)} restores, {wrong} violations")  # fmt: skip
    for counts in (seen, tally.faults):
        for name, count in sorted(counts.items()):
            print(f"  {name:36} {count}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="ROUND")
    options = parser.parse_args()
    if why := criu.missing() or ("" if os.geteuid() == 0 else "needs root"):
        print(f"process_campaign: skipped: {why}")
        return 0
    if platform.machine() != "x86_64":
        print("process_campaign: skipped: it knows the system calls of x86-64 only")
        return 0
    tally, chosen = ProcessTally(), range(options.rounds)
    for number in chosen if options.only is None else [options.only]:
        play(number, options.seed, tally)
        if (number + 1) % 20 == 0:
            print(f"{number + 1} rounds, {len(tally.violations)} violations", flush=True)
    report(tally, options.rounds if options.only is None else 1, options.seed)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
