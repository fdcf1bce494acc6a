"""Kills ranks of a group, its daemon, or all at once, and restarts the group in every way.

    python -m tests.integration.group_campaign --rounds 500 --seed 1 [--only ROUND]

A round draws a group (ranks, sizes, slots, pace) and a chain of starts. A start restores, passes
fresh=True, or forgets to restore. It may have another number of ranks, or be killed before all
ranks have connected. Drawn as well: what happens during the start, and what is killed at its end;
whether a rank looks or restores once more than the others, whether all ranks restore in mid-run,
and whether a rank trains later than the others.

Checked at every restore, against what the ranks have observed:

- All ranks restore the same step of one start, with the bytes of that start, rank and step.
- The step is not older than what all ranks had seen durable, or had seen copied if the daemon was
  not killed.
- A restore is never empty when the job has a checkpoint.
- A start with another number of ranks is refused, and the error names both numbers.
- A run that forgot to restore destroys no checkpoint.
- Ranks in lockstep keep getting common checkpoints.

"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pccheck_native import catalog
from pccheck_store.reading.files import FilePayloads
from pccheck_wire.errors import PccheckError
from tests.support.daemon import Daemon
from tests.support.members import (
    COPIED,
    DURABLE,
    GLOBAL,
    RANKS_MAX,
    Board,
    Client,
    Wire,
    stamp,
    tensor_of,
)
from tests.support.rank import payload_of
from tests.support.reads import read
from tests.support.trainer import RemoteError
from tests.support.waiting import PATIENCE, until

ANSWER_S = 120.0 * PATIENCE
PROGRESS_S = 120.0 * PATIENCE
DEATHS = ("all", "one", "both", "daemon, then all")


@dataclass
class Start:
    """One start of the group, as drawn."""

    how: str  # restore, fresh, forget
    world: int
    launch: str
    death: str
    connect: int = 0  # that many ranks connect and are killed; 0: all connect
    begins: bool = False  # one of them has requested a checkpoint by then
    globals: int = 0  # common checkpoints to wait for; 0: killed after `steps`
    steps: int = 0
    base: int = 0  # first step, less 1, of a start that does not restore
    event: str = ""
    who: int = 0
    when: int = 0
    pause_s: float = 0.0
    again: str = ""  # what rank `who` calls once more before it trains: restore, recover
    back: int = 0  # the step before which all ranks restore, rank `who` twice; 0: none
    look: int = 0  # the step before which rank `who` calls recover(); 0: none
    lead: int = 0  # so many steps are the others ahead of rank `who` when it begins to train

    def __str__(self) -> str:
        parts = [f"{self.how} {self.world}"]
        parts += [f"only {self.connect}{' begins' if self.begins else ''}"] if self.connect else []
        parts += [f"launch={self.launch or 'none'}"]
        parts += [f"{self.event}@{self.when} by {self.who}"] if self.event else []
        odd = {"again": self.again, "back": self.back, "look": self.look, "lead": self.lead}
        parts += [f"{what} {value} of {self.who}" for what, value in odd.items() if value]
        parts += [f"{self.globals} global" if self.globals else f"{self.steps} steps", self.death]
        return "[" + ", ".join(parts) + "]"


@dataclass
class Round:
    """A group and its starts, as drawn."""

    kind: str
    slots: int
    keep: int
    on_busy: str
    nbytes: list[int]
    interval_s: float
    bandwidth: str
    dram: str
    starts: list[Start]

    def __str__(self) -> str:
        sizes = "/".join(str(n // 1000) for n in self.nbytes)
        return (
            f"{self.kind} slots={self.slots} keep={self.keep} {self.on_busy} {sizes}kB "
            f"{self.bandwidth}/s {self.interval_s * 1e3:g}ms {' '.join(map(str, self.starts))}"
        )


def draw(seed: int, number: int) -> Round:
    """Draws a round; the same arguments give the same round."""
    rng = random.Random(f"{seed}/{number}")
    world = rng.choice([1, 2, 2, 2, 2, 3, 3, 4])
    keep = rng.randint(1, 2)
    kind = rng.choices(["wire", "client"], [5, 1])[0]
    unit = rng.choice([50_000, 100_000, 200_000])
    launches = rng.choice(["growing", "growing", "same", "none"])
    starts: list[Start] = []

    def add(how: str, world: int, **options: Any) -> Start:
        launch = {"growing": f"run-{len(starts)}", "same": "run-0", "none": ""}[launches]
        start = Start(how, world, launch, rng.choice(DEATHS), **options)
        start.pause_s = rng.random() * 0.05
        start.who, start.when = rng.randrange(world), rng.randint(1, 6)
        if rng.random() < 0.75:
            start.globals = rng.randint(1, 4)
        else:
            start.steps = rng.randint(1, 6)
        if how == "forget" and rng.random() < 0.5:
            start.base = 5000
        if not options:
            start.event = rng.choice(["", "", "", "skip", "fail", "renew", "daemon"])
            if start.event == "daemon":
                start.globals = max(1, start.globals)
        starts.append(start)
        return start

    add(rng.choice(["restore", "restore", "fresh"]), world)
    for _ in range(rng.randint(1, 2)):
        match rng.choice(["same", "same", "same", "forget", "fresh", "other", "partial"]):
            case "same":
                add("restore", world)
            case "forget":
                add("forget", world)
            case "fresh":
                add("fresh", world)
            case "other":
                other = rng.choice([n for n in range(1, RANKS_MAX + 1) if n != world])
                add("restore", other, connect=other).death = "all"
                if rng.random() < 0.4:
                    world = other
                    add("fresh", world)
            case "partial" if world > 1:
                connect = rng.randint(1, world - 1)
                partial = add("restore", world, connect=connect, begins=rng.random() < 0.4)
                partial.death = rng.choice(["all", "all", "both"])
    final = add("restore", world)
    final.event, final.globals, final.death = "", rng.choice([0, 1]), "all"
    odd = random.Random(f"{seed}/{number}/odd")
    for start in starts:
        draw_odd(odd, start)
    return Round(
        kind, rng.randint(3, 6), keep, rng.choice(["wait", "wait", "skip"]),
        [unit * rng.choice([1, 2, 4, 8]) for _ in range(RANKS_MAX)],
        rng.choice([0.0, 0.002, 0.005, 0.02]), rng.choice(["8MiB", "16MiB", "32MiB", "128MiB"]),
        rng.choice(["8MiB", "32MiB"]), starts,
    )  # fmt: skip


def draw_odd(rng: random.Random, start: Start) -> None:
    """Calls that not every rank makes, and ranks that are late."""
    if start.how == "restore":
        start.again = rng.choice(["", "", "restore", "recover"])
    if start.world == 1 or start.connect or start.event:
        return
    match rng.choice(["", "", "back", "look", "lead"]):
        case "back" if start.how == "restore":
            start.back = rng.randint(2, 4)
            start.globals = max(start.globals, 4)
        case "look":
            start.look = rng.randint(2, 4)
        case "lead":
            start.lead = rng.randint(2, 9)
            start.globals = max(start.globals, 2)


@dataclass
class Tally:
    """Counts of kills and of checked restores, and what was wrong."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    starts: collections.Counter[str] = field(default_factory=collections.Counter)
    judged: collections.Counter[str] = field(default_factory=collections.Counter)
    odd: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest_restore_s: float = 0.0
    slowest_step_s: float = 0.0
    slowest_global_s: float = 0.0
    violations: list[str] = field(default_factory=list)


@dataclass
class Run:
    """What the ranks of a start had observed when it ended."""

    number: int
    world: int
    base: int
    durable: list[int]  # indices that all ranks saw durable
    copied: list[int]  # indices that all ranks saw copied; empty if a daemon died later
    some_durable: bool
    some_asked: bool
    renewed: int = 0  # index at which a second client of a rank began, without a restore

    @property
    def newest(self) -> int:
        return max((*self.durable, *self.copied), default=0)


Bound = tuple[int, int, int]  # start, step, world


class Player:
    """Plays one round."""

    def __init__(self, label: str, drawn: Round, daemon: Daemon, tally: Tally) -> None:
        self.label = label
        self.drawn = drawn
        self.daemon = daemon
        self.tally = tally
        self.runs: list[Run] = []
        self.protected: list[Bound] = []
        self.unread = False  # a run may have checkpoints that are protected, also unseen ones
        self.violations: list[str] = []

    def play(self) -> None:
        for number, start in enumerate(self.drawn.starts, 1):
            self._start(number, start)
            if self.violations:
                return

    def wrong(self, what: str) -> None:
        self.violations.append(f"{self.label}: {what}")

    def bound(self) -> Bound | None:
        """A restore must return this step or a newer one."""
        for run in reversed(self.runs):
            if run.newest:
                return run.number, run.base + run.newest, run.world
        return None

    def protect(self) -> None:
        """Before a start that restores nothing: it must keep what the last run had. If a second
        client began in that run without a restore, it must keep what the run had before it."""
        for run in reversed(self.runs):
            if run.newest:
                seen = [*run.durable, *run.copied]
                kept = [n for n in seen if n < run.renewed] or seen
                durable = [n for n in kept if n in run.durable]
                self.protected += [
                    (run.number, run.base + max(steps), run.world)
                    for steps in (durable, kept)
                    if steps
                ]
                return

    # -- one start ---------------------------------------------------------------------------

    def _start(self, number: int, start: Start) -> None:
        board = Board(self.daemon.root / f"board-{number}", make=True)
        kind = Wire if self.drawn.kind == "wire" else Client
        self.tally.starts[self._name(start)] += 1
        with contextlib.ExitStack() as stack:
            count = start.connect or start.world
            ranks = [stack.enter_context(kind()) for _ in range(count)]
            for rank, member in enumerate(ranks):
                member.post("begin_start", {
                    "rank": rank, "world": start.world, "launch": start.launch, "how": start.how,
                    "board": str(self.daemon.root / f"board-{number}"), "start": number,
                    "log": str(self.daemon.root / f"rank-{number}-{rank}.log"),
                    "socket": str(self.daemon.socket), "nbytes": self.drawn.nbytes[rank],
                    "on_busy": self.drawn.on_busy,
                })  # fmt: skip
            for member in ranks:
                member.answer(ANSWER_S)
            base: int | None = start.base
            if start.how == "restore":
                base = self._restore(number, start, ranks)
            elif start.how == "fresh":
                self.protected, self.unread = [], False
            else:
                if not self.unread or self.drawn.slots >= 4:  # with 3, those of the first run
                    self.protect()
                self.unread |= any(run.some_asked for run in self.runs)
            if base is not None and not self.violations:
                self._train(number, start, ranks, board, base)

    def _name(self, start: Start) -> str:
        before = self.runs[-1].world if self.runs else start.world
        if start.connect and start.connect < start.world:
            return "before all had connected"
        if not self.runs:
            return f"first, {start.how}"
        return start.how if start.world == before else f"{start.how} with another world size"

    def _restore(self, number: int, start: Start, ranks: list[Any]) -> int | None:
        """The step to go on from; None when there is no going on."""
        since = time.monotonic()
        for member in ranks:
            member.post("restore_state")
        found = [member.answer(ANSWER_S) for member in ranks]
        if start.again and start.who < len(ranks):
            self.tally.odd[f"again: {start.again}"] += 1
            ranks[start.who].post("once_more", start.again)
            found.append(ranks[start.who].answer(ANSWER_S))
        took_s = time.monotonic() - since
        self.tally.slowest_restore_s = max(self.tally.slowest_restore_s, took_s)
        verdict, base = judge(self.bound(), self.runs, start.world, found)
        if verdict:
            self.wrong(f"start {number} {verdict}: {found}; bound {self.bound()}")
        elif base is None:
            self.tally.judged["refused"] += 1
        else:
            self.tally.judged["restored" if base else "empty"] += 1
            if len(ranks) == start.world:
                self.protected, self.unread = [], False
                for run in self.runs:
                    run.durable, run.copied = run.durable + run.copied, []
        return base

    def _train(
        self, number: int, start: Start, ranks: list[Any], board: Board, base: int
    ) -> None:  # fmt: skip
        alone = len(ranks) < start.world
        for what in ("back", "look", "lead"):
            self.tally.odd[what] += not alone and getattr(start, what) > 0
        spec: dict[str, Any] = {"interval_s": self.drawn.interval_s}
        if alone:
            spec["alone"] = int(start.begins)
        for rank, member in enumerate(ranks):
            mine = dict(spec)
            if start.event in ("skip", "fail", "renew") and start.who == rank:
                mine[start.event + "s"] = [start.when]
            if not alone:
                is_odd = start.who == rank
                mine |= {
                    "back": (start.back, 2 if is_odd else 1), "lead": start.lead,
                    "look": start.look if is_odd else 0, "late": start.lead if is_odd else 0,
                }  # fmt: skip
            member.post("train", base, **mine)
        died = False
        if alone:
            time.sleep(start.pause_s)
        elif start.globals:
            self._globals(start.globals, number, start, board, ranks)
            if start.event == "daemon" and not self.violations:
                died = True
                self.tally.kills["daemon, in training"] += 1
                self._kill_daemon(board, start.world)
                time.sleep(start.pause_s)
                self.daemon.start()
                self._globals(1, number, start, board, ranks, again=True)
        else:
            deadline = time.monotonic() + PROGRESS_S
            while board.at(start.world) < start.steps:
                _require_training(ranks)
                if time.monotonic() > deadline:
                    self.wrong(f"start {number} stands still at {board.at(start.world)}")
                    break
                time.sleep(0.001)
        self.tally.slowest_step_s = max(self.tally.slowest_step_s, board.longest_s(start.world))
        time.sleep(start.pause_s)
        self._kill(start, ranks)
        self._note(number, start, board, base, len(ranks), died)

    def _globals(
        self, count: int, number: int, start: Start, board: Board, ranks: list[Any],
        *, again: bool = False,
    ) -> None:  # fmt: skip
        """Until so many (more) common checkpoints were seen by all ranks."""
        since = time.monotonic()
        while True:
            first = board.connected_since(start.world) if again else 0
            last = board.at(start.world)
            common = GLOBAL if start.world > 1 else DURABLE
            there = [n for n in board.seen(common, start.world, last) if n >= first]
            if len(there) >= count and (first or not again):
                break
            _require_training(ranks)
            alive = all(member.process.is_alive() for member in ranks)
            if time.monotonic() - since > PROGRESS_S or not alive:
                self.wrong(
                    f"start {number} has {len(there)} common checkpoints "
                    f"{'since the daemon is back ' if again else ''}after "
                    f"{time.monotonic() - since:.0f} s, at {[board.came(r) for r in range(4)]}"
                )
                return
            time.sleep(0.001)
        self.tally.slowest_global_s = max(self.tally.slowest_global_s, time.monotonic() - since)

    def _kill(self, start: Start, ranks: list[Any]) -> None:
        self.tally.kills[start.death] += 1
        if start.death in ("both", "daemon, then all"):
            assert self.daemon.process is not None
            self.daemon.process.kill()
        if start.death == "one":
            ranks[start.who % len(ranks)].kill()
            time.sleep(start.pause_s * 4)
        if start.death == "daemon, then all":
            time.sleep(start.pause_s)
        for member in ranks:
            if member.process.is_alive():
                member.signal(9)
        for member in ranks:
            member.kill()
        if start.death in ("both", "daemon, then all"):
            self._kill_daemon()
            self.daemon.start()

    def _kill_daemon(self, *_: object) -> None:
        """What was copied may not be durable yet."""
        self.daemon.kill()
        for run in self.runs:
            run.copied = []
            durable = {run.base + n for n in run.durable}
            self.protected = [
                one for one in self.protected if one[0] != run.number or one[1] in durable
            ]

    def _note(
        self, number: int, start: Start, board: Board, base: int, count: int, died: bool
    ) -> None:  # fmt: skip
        last = max(board.came(rank) for rank in range(start.world))
        world = start.world
        spared = start.death in ("one", "all")
        first = board.connected_since(world) if died else 0
        copied = board.seen(COPIED, world, last) if spared else []
        if died and not first:
            copied = []
        self.runs.append(Run(
            number, world, base, board.seen(DURABLE, world, last),
            [n for n in copied if n >= first], board.seen_by_one(DURABLE, world, last),
            last > 0, start.when if start.event == "renew" else 0,
        ))  # fmt: skip
        self._reasons(number, start, count)
        for first, step, of in self.protected:  # what was copied may still be written
            what = f"start {number} lost step {step} of start {first}, which it had not restored"
            until(partial(self._there, first, step, number, of), lambda what=what: what)

    def _reasons(self, number: int, start: Start, count: int) -> None:
        for rank in range(count):
            for line in (self.daemon.root / f"rank-{number}-{rank}.log").read_text().splitlines():
                _, what, reason = line.split(" ", 2)
                self.tally.reasons[what if what == "AWAY" else f"{what} {reason}"[:110]] += 1
                if what == "STALLED":
                    self.wrong(f"start {number} rank {rank}: {line}")

    def _there(self, first: int, step: int, below: int, world: int) -> bool:
        """Whether all ranks hold a common checkpoint of (first, step) or a newer one of a start
        before `below`."""
        held: dict[int, dict[int, catalog.StoredCheckpoint]] = {}
        for one in catalog.scan(self.daemon.storage, job="job").checkpoints:
            held.setdefault(one.id.sequence, {})[one.id.rank] = one
        for ranks in held.values():
            if len(ranks) < world:
                continue
            for number in range(below - 1, first - 1, -1):
                if number == first and ranks[0].id.step < step:
                    continue
                if all(self._is(ranks[rank], number) for rank in range(world)):
                    return True
        return False

    def _is(self, one: catalog.StoredCheckpoint, number: int) -> bool:
        try:
            with contextlib.closing(FilePayloads([one])) as payloads:
                data = read(payloads, one.id.rank, 0, one.payload_bytes)
        except PccheckError:
            return False
        if self.drawn.kind == "wire":
            return data == payload_of(stamp(number, one.id.rank, one.id.step), len(data))
        wanted = tensor_of(number, one.id.rank, one.id.step, self.drawn.nbytes[one.id.rank])
        return bytes(wanted.numpy().tobytes()) in data


def _require_training(ranks: list[Any]) -> None:
    """Raises the error of a rank that has ended."""
    for member in ranks:
        if member.has_answered:
            member.answer(ANSWER_S)
            raise AssertionError("a rank has ended its training")


def judge(
    bound: Bound | None, runs: list[Run], world: int, found: list[tuple[Any, ...]]
) -> tuple[str, int | None]:
    """Returns what is wrong with the restore ("" when it is right), and the step from which the
    ranks continue: 0 when the job has no checkpoint, None when the restore was refused."""
    kinds = {one[0] for one in found}
    if len(kinds) > 1:
        return "differs by rank", None
    last_world = {run.world for run in runs if run.number >= (bound[0] if bound else 0)}
    kind = kinds.pop()
    if kind == "error":
        (names, said) = {one[1] for one in found}, found[0][2]
        if names != {"NoCheckpointError"}:
            return "raised", None
        if bound is None:
            return ("" if any(run.some_asked for run in runs) else "refused over nothing"), None
        if last_world == {world}:
            return "refused", None
        if last_world == {bound[2]} and not all(f"{n} rank" in said for n in (bound[2], world)):
            return "refused without the numbers", None
        return "", None
    if kind == "empty":
        if bound is not None or any(run.some_durable for run in runs):
            return "empty over something", None
        return "", 0
    steps = {(one[1], one[2]) for one in found}
    if len(steps) > 1:
        return "differs by rank", None
    if any(one[3] for one in found):
        return "has the wrong content", None
    ((number, step),) = steps
    if bound is not None and (number, step) < bound[:2]:
        return "is too old", None
    if next((run.world for run in runs if run.number == number), None) != world:
        return "is of another world size", None
    return "", step


def play(seed: int, number: int, tally: Tally) -> None:
    """One round; prints the logs when it ends in a violation."""
    drawn = draw(seed, number)
    since = time.monotonic()
    flags = (
        "--chunk", "128KiB", "--block-bytes", "64KiB", "--engine", "pwrite", "--scrub-rate", "0",
        "--slots", str(drawn.slots), "--keep", str(drawn.keep), "--dram", drawn.dram,
        "--max-bandwidth", drawn.bandwidth,
    )  # fmt: skip
    with Daemon(*flags) as daemon:
        daemon.start()
        player = Player(f"round {number}", drawn, daemon, tally)
        try:
            player.play()
        except (AssertionError, RemoteError, EOFError) as error:
            player.wrong(f"{type(error).__name__}: {error}")
        if player.violations:
            for one in catalog.scan(daemon.storage, job="job").checkpoints:
                held = f"rank {one.id.rank} has step {one.id.step}, run {one.id.incarnation}"
                print(held, file=sys.stderr)
            for path in [daemon.log, *sorted(daemon.root.glob("rank-*.log"))]:
                print(f"--- {path.name}\n{path.read_text()[-4000:]}", file=sys.stderr)
    tally.violations += player.violations
    print(
        f"round {number} ({time.monotonic() - since:.1f} s): {drawn}"
        f"{' VIOLATION' if player.violations else ''}", flush=True,
    )  # fmt: skip


def run(rounds: int, seed: int) -> Tally:
    """`rounds` rounds."""
    tally = Tally()
    for number in range(rounds):
        play(seed, number, tally)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this round of the seed")
    options = parser.parse_args()
    if options.only is None:
        tally = run(options.rounds, options.seed)
    else:
        tally = Tally()
        play(options.seed, options.only, tally)
    print(
        f"seed {options.seed}: {sum(tally.starts.values())} starts, "
        f"{sum(tally.judged.values())} restores judged, {len(tally.violations)} violations; "
        f"slowest restore {tally.slowest_restore_s:.1f} s, step {tally.slowest_step_s:.1f} s, "
        f"common checkpoint {tally.slowest_global_s:.1f} s"
    )
    for title in ("kills", "starts", "odd", "judged", "reasons"):
        print(title)
        for name, count in sorted(getattr(tally, title).items()):
            print(f"  {name:40} {count}")
    for violation in tally.violations:
        print("VIOLATION", violation)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
