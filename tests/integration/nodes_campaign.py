"""Kills ranks, daemons and the store of jobs on several nodes, and restarts them in every way.

    python -m tests.integration.nodes_campaign --rounds 300 --seed 1 [--elsewhere] [--only ROUND]

Each node is a daemon with a storage directory of its own; all of them are on this machine. A round
draws a job (nodes, ranks per node, slots kept, pace) and a chain of starts. A start restores, or
forgets to; its ranks wait for what they save, or go on; in mid-run all of them restore, or
go back to a step; then comes a fault. The last start of each round has none. With --elsewhere the
ranks of each start are shuffled among the nodes, which read parts from each other.

Checked against what the ranks were told:

- All ranks of a start restore one step, with the bytes of that step of one line of the job.
- It is not older than the newest step that a rank was told is global. Only a lost disk excuses
  that, and then the restore is refused, with names.
- A restore is never empty when a rank was told of a global checkpoint.
- Who waits for another node, or is refused, is told for which rank, host or store.
- In lockstep and without a fault, every requested step becomes global.
- After a fault that leaves the ranks alive, new checkpoints become global again.
- Each round ends with a restore of all ranks and five more global steps.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from pccheck_native.nodes.lists import listed
from tests.support.daemon import Daemon
from tests.support.noderank import STEPS_MAX, NodeRank, Together
from tests.support.torchstore import TorchStore
from tests.support.trainer import RemoteError
from tests.support.waiting import PATIENCE

ANSWER_S = 90.0 * PATIENCE
COUNTS = [20_000, 11]
NAMED = re.compile(r"\b(rank|ranks|host|node|nodes|store) \S")
#: Drawn as often as it says. The ranks live on after those of SPARING.
FAULTS = {
    "": 4, "one rank": 3, "a node's ranks": 2, "a daemon": 3, "a daemon, back late": 2,
    "a daemon and its ranks": 3, "a daemon's SIGTERM": 2, "the store stands": 2,
    "the store ends": 2, "the store is empty": 2, "all daemons": 1, "a node is absent": 2,
    "killed while restoring": 2, "zombies": 2, "a lost disk": 1,
}  # fmt: skip
SPARING = ("a daemon", "a daemon, back late", "a daemon's SIGTERM", "the store stands",
           "the store is empty", "all daemons")  # fmt: skip
MIDWAY = ("", "", "", "restore", "back")


@dataclass
class Start:
    """One start of the job, as drawn."""

    launch: str
    restores: bool
    lockstep: int  # steps that all ranks save and wait for
    midway: str  # after these: nothing, a restore of all ranks, or back to an older step
    fault: str
    who: int  # the rank or node that it hits
    pause_s: float
    places: list[int] = field(default_factory=list)  # the node of each rank

    def __str__(self) -> str:
        how = "" if self.restores else "forgets, "
        then = f"{self.midway}, " if self.midway else ""
        return f"[{self.launch}, {how}{self.lockstep} steps, {then}{self.fault or 'no fault'}]"


@dataclass
class Round:
    nodes: int
    per_node: int
    keep: int
    interval_s: float
    starts: list[Start]

    def __str__(self) -> str:
        shape = f"{self.nodes} nodes of {self.per_node}, keep {self.keep}"
        return f"{shape}, {self.interval_s * 1e3:g} ms: {' '.join(map(str, self.starts))}"


def draw(seed: int, number: int, *, elsewhere: bool) -> Round:
    """Draws a round; the same arguments give the same round."""
    rng = random.Random(f"{seed}/{number}")
    nodes, per_node = rng.choice([(2, 1), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2)])
    if elsewhere:
        nodes, per_node = rng.choice([(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)])
    drawn = Round(nodes, per_node, rng.randint(1, 2), rng.choice([0.004, 0.01, 0.02, 0.05]), [])
    same = rng.random() < 0.4
    for at in range(rng.randint(2, 3)):
        fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        midway = rng.choice(MIDWAY)
        launch = "run" if same else f"run-{at}"
        drawn.starts.append(Start(
            launch, at == 0 or rng.random() < 0.85, rng.randint(0, 4),
            midway if drawn.keep == 2 or midway != "back" else "restore", fault,
            rng.randrange(nodes * per_node), rng.random() * 0.3,
        ))  # fmt: skip
    drawn.starts.append(Start("run" if same else "run-last", True, 5, "", "", 0, 0.0))
    shuffled = random.Random(f"{seed}/{number}/places")
    for start in drawn.starts:
        start.places = [rank // per_node for rank in range(nodes * per_node)]
        if elsewhere:
            shuffled.shuffle(start.places)
    return drawn


@dataclass
class Tally:
    starts: int = 0
    restores: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    steps: int = 0  # requested in lockstep, and global
    slowest: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)

    def took(self, what: str, since_s: float) -> None:
        self.slowest[what] = max(self.slowest[what], int(1000 * (time.monotonic() - since_s)))


class WrongError(Exception):
    """What the oracle does not allow."""


class Player:
    """Plays one round."""

    def __init__(self, drawn: Round, nodes: list[Daemon], tally: Tally) -> None:
        self.drawn, self.nodes, self.tally = drawn, nodes, tally
        self.store = TorchStore()
        self.line = 0
        self.bound = 0  # the stamp that a restore must reach; 0: none
        self.lost = False  # a disk
        self.ranks: list[NodeRank] = []
        self.zombies: list[NodeRank] = []
        self.zombie_node = -1
        self.places: list[int] = []  # of the present start
        self.said: list[str] = []  # what ranks said that have ended

    def play(self) -> None:
        for at, start in enumerate(self.drawn.starts):
            self.tally.starts += 1
            try:
                self._start(start)
            except WrongError as error:
                raise WrongError(f"start {at}: {error}") from error
            finally:
                self._end_ranks()
        self.store.kill()

    def close(self) -> None:
        self._end_ranks()
        self._end_zombies()
        self.store.kill()

    # -- the ranks -----------------------------------------------------------------------------

    def _make(
        self, start: Start, *, without: int = -1, only: int = -1, fresh: bool = False
    ) -> None:  # fmt: skip
        """The processes of a start: of all nodes, of all but one, or of one."""
        per, world = self.drawn.per_node, self.drawn.per_node * self.drawn.nodes
        made = {}
        self.places = start.places
        locals_ = collections.Counter[int]()
        for rank in range(world):
            node = start.places[rank]
            local = locals_[node]
            locals_[node] += 1
            if node == without or only not in (-1, node):
                continue
            made[rank] = NodeRank(**self.store.environment(start.launch, per, local))
            made[rank].number = rank
            made[rank].post(
                "open", COUNTS, job="job", rank=rank, world_size=world, fresh=fresh,
                socket=str(self.nodes[node].socket),
            )  # fmt: skip
        self.ranks = sorted([*self.ranks, *made.values()], key=lambda one: one.number)
        for one in made.values():
            one.answer(ANSWER_S)

    def _end_ranks(self) -> None:
        """Kills all ranks but zombies."""
        self._end([rank for rank in self.ranks if rank not in self.zombies])
        self.ranks = []

    def _end_zombies(self) -> None:
        self._end(self.zombies)
        self.zombies = []

    def _end(self, ranks: list[NodeRank]) -> None:
        """Kills ranks, and takes over what they were told."""
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.listen()
            self.said += rank.said
            if rank.durable // STEPS_MAX == self.line:
                self.bound = max(self.bound, rank.durable)
            rank.__exit__()

    def _of_node(self, node: int) -> list[NodeRank]:
        return [rank for rank in self.ranks if self.places[rank.number] == node]

    def _all(self, command: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, or the errors."""
        for rank in self.ranks:
            rank.post(command, *arguments)
        found: list[Any] = []
        for rank in self.ranks:
            try:
                found.append(rank.answer(ANSWER_S))
            except RemoteError as error:
                found.append(error)
            except AssertionError as error:
                said = rank.said[-1:] or ["it was told nothing"]
                raise WrongError(f"{command} of rank hangs: {error}; {said}") from error
        return found

    # -- one start -----------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        self.tally.faults[start.fault or "none"] += 1
        if start.fault == "a node is absent":
            self._end_zombies()
            self.zombie_node = -1
            self._absent(start)
            return
        self._make_beside_zombies(start)
        if start.fault == "killed while restoring":
            self._kill_restoring(start)
            return
        if start.restores or self.lost:
            if not self._restore():
                self._begin_fresh(start)
        else:
            self.line += 1
            self._all("begin_line", self.line)
        for _ in range(start.lockstep):
            self._save()
        if start.midway:
            self._midway(start)
        if start.fault == "" and start.lockstep:
            return
        self._train(start)

    def _make_beside_zombies(self, start: Start) -> None:
        """The other nodes have new ranks first; those of the zombies' node follow."""
        if self.zombies:
            self._make(start, without=self.zombie_node)
            self._end_zombies()
        self._make(start, only=self.zombie_node)
        self.zombie_node = -1

    def _restore(self, step: int | None = None) -> bool:
        """All ranks restore; False: refused, because a disk is lost."""
        began_s = time.monotonic()
        found = self._all("restore_stamp", step)
        self.tally.took("restore", began_s)
        if any(isinstance(one, RemoteError) for one in found):
            self._refused(found)
            return False
        if len(set(found)) != 1:
            raise WrongError(f"ranks restored {found}")
        is_there, stamp, wrong = found[0]
        if wrong:
            raise WrongError(f"a rank restored {stamp}: {wrong}")
        if step is not None and stamp % STEPS_MAX != step:
            raise WrongError(f"restore(step={step}) restored {stamp}")
        if step is None and stamp < self.bound and not self.lost:
            what = stamp if is_there else "nothing"
            raise WrongError(f"ranks restored {what}, older than {self.bound}")
        self.tally.restores["restored" if is_there else "empty"] += 1
        self.bound, self.lost = stamp, False
        self.line += 1
        self._all("begin_line", self.line)
        return True

    def _refused(self, found: list[Any]) -> None:
        texts = [one.message if isinstance(one, RemoteError) else one for one in found]
        if not all(isinstance(one, RemoteError) for one in found):
            raise WrongError(f"only some ranks are refused: {texts}")
        if not self.lost:
            raise WrongError(f"the restore is refused: {texts}; bound {self.bound}")
        if len(set(texts)) != 1 or not NAMED.search(texts[0]):
            raise WrongError(f"a refusal names nobody, or differs: {texts}")
        self.tally.restores["refused"] += 1

    def _begin_fresh(self, start: Start) -> None:
        """After a refusal, without what the lost disk had."""
        self._end_ranks()
        self.bound, self.lost = 0, False
        self._make(start, fresh=True)
        self.line += 1
        self._all("begin_line", self.line)
        self._save()

    def _save(self) -> None:
        """All ranks save one step, and wait for it."""
        began_s = time.monotonic()
        found = self._all("save_step", ANSWER_S / 2)
        if any(isinstance(one, RemoteError) for one in found):
            raise WrongError(f"a save raised {found}")
        if {(state, why) for _, state, why in found} != {("global", "")}:
            raise WrongError(f"a step in lockstep is not global: {found}")
        if len({stamp for stamp, _, _ in found}) != 1:
            raise WrongError(f"ranks in lockstep are at {found}")
        self.tally.took("global step", began_s)
        self.tally.steps += 1
        self.bound = found[0][0]

    def _midway(self, start: Start) -> None:
        self.tally.faults[f"midway: {start.midway}"] += 1
        if start.midway == "back" and start.lockstep >= 2:
            self._restore(self.bound % STEPS_MAX - 1)
        else:
            self._restore()
        self._save()

    # -- faults --------------------------------------------------------------------------------

    def _train(self, start: Start) -> None:
        stop = self.nodes[0].root / f"stop-{self.tally.starts}"
        Together.make(f"{stop}.steps", len(self.ranks))
        for at, rank in enumerate(self.ranks):
            rank.post("train", self.drawn.interval_s * (1 + at % 3), str(stop), at)
        if start.pause_s < 0.25:  # else the fault comes before the first one is global
            self._progress("before the fault")
        time.sleep(start.pause_s)
        self._fault(start)
        if start.fault in SPARING or not start.fault:
            self._progress(f"after {start.fault or 'nothing'}")
        if start.fault == "":
            stop.touch()
            for rank in self.ranks:
                rank.answer(ANSWER_S)
        time.sleep(start.pause_s / 4)

    def _progress(self, when: str) -> None:
        """Until each rank was told of a global checkpoint that was asked for since now."""
        began_s = time.monotonic()
        for rank in self.ranks:
            rank.listen()
        newest = max(rank.durable for rank in self.ranks)
        while not all(rank.durable > newest for rank in self.ranks):
            for rank in self.ranks:
                rank.listen()
                if rank._ended:
                    raise WrongError(f"a rank ended its training: {rank._ended}")
            if time.monotonic() - began_s > ANSWER_S:
                told = [rank.durable for rank in self.ranks]
                seen = [daemon.status() for daemon in self.nodes]
                raise WrongError(f"no new global checkpoint {when}: {told}; {seen}")
            time.sleep(0.005)
        self.tally.took(f"progress {when}", began_s)

    def _fault(self, start: Start) -> None:
        node = start.places[start.who]
        daemon = self.nodes[node]
        match start.fault:
            case "one rank":
                self.ranks[start.who].kill()
            case "a node's ranks":
                for rank in self._of_node(node):
                    rank.kill()
            case "a daemon" | "a daemon, back late":
                daemon.kill()
                if start.fault == "a daemon, back late":
                    time.sleep(10 * start.pause_s)
                daemon.start()
            case "all daemons":
                for one in self.nodes:
                    one.kill()
                for one in self.nodes:
                    one.start()
            case "a daemon and its ranks":
                daemon.kill()
                for rank in self._of_node(node):
                    rank.kill()
                daemon.start()
            case "a daemon's SIGTERM":
                daemon.stop()
                daemon.start()
            case "the store stands":
                self.store.stop()
                time.sleep(5 * start.pause_s)
                self.store.go_on()
            case "the store ends":
                self.store.kill()
                time.sleep(start.pause_s)
                self._end_ranks()
                self.store = TorchStore()
            case "the store is empty":
                self.store.empty()
            case "zombies":  # they live on while the other nodes start again
                self.zombies, self.zombie_node = self._of_node(node), node
                self._end_ranks()
            case "a lost disk":
                self._end_ranks()
                daemon.kill()
                shutil.rmtree(daemon.storage)
                daemon.storage.mkdir()
                daemon.start()
                self.lost = True

    def _absent(self, start: Start) -> None:
        """A node never comes: the others wait, and are told for which ranks."""
        node = start.places[start.who]
        self._make(start, without=node)
        for rank in self.ranks:
            rank.post("restore_stamp")
        began_s = time.monotonic()
        lacking = {at for at, place in enumerate(start.places) if place == node}
        wanted = listed(sorted(lacking))
        # A hello of an earlier start of this launch may stand for some of them.
        while not all(any(_lacks(one) & lacking for one in rank.said) for rank in self.ranks):
            for rank in self.ranks:
                rank.listen()
                if rank._ended:
                    raise WrongError(f"a rank restored without {wanted}: {rank._ended}")
            if time.monotonic() - began_s > ANSWER_S:
                said = [rank.said[-2:] for rank in self.ranks]
                raise WrongError(f"nobody says that {wanted} did not come: {said}")
            time.sleep(0.01)

    def _kill_restoring(self, start: Start) -> None:
        for rank in self.ranks:
            rank.post("restore_stamp")
        time.sleep(start.pause_s)
        self.ranks[start.who].kill()
        time.sleep(start.pause_s)


def _lacks(said: str) -> set[int]:
    """The first rank that has not connected, as restore() says."""
    return {int(rank) for rank in re.findall(r"ranks? (\d+)[^;]* not connected", said)}


def play(seed: int, number: int, tally: Tally, *, elsewhere: bool) -> None:
    """One round; prints the logs when it ends in a violation."""
    drawn = draw(seed, number, elsewhere=elsewhere)
    began_s = time.monotonic()
    flags = (
        "--chunk", "128KiB", "--block-bytes", "64KiB", "--engine", "pwrite", "--scrub-rate", "0",
        "--keep", str(drawn.keep), "--dram", "8MiB",
        *(["--listen", "127.0.0.1"] if elsewhere else []),
    )  # fmt: skip
    wrong = ""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Daemon(*flags)).start() for _ in range(drawn.nodes)]
        player = Player(drawn, nodes, tally)
        stack.callback(player.close)
        try:
            player.play()
        except (WrongError, AssertionError, RemoteError, EOFError, OSError) as error:
            wrong = f"round {number}: {type(error).__name__}: {error}"
        if wrong:
            tally.violations.append(wrong)
            print(f"VIOLATION {wrong}\n{player.said[-8:]}", file=sys.stderr)
            for at, daemon in enumerate(nodes):
                print(f"--- node {at}\n{daemon.log.read_text()[-5000:]}", file=sys.stderr)
    took_s = time.monotonic() - began_s
    print(f"round {number} ({took_s:.1f} s): {drawn}{' VIOLATION' if wrong else ''}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--only", type=int, help="this round of the seed")
    options = parser.parse_args()
    tally = Tally()
    rounds = range(options.rounds) if options.only is None else [options.only]
    for number in rounds:
        play(options.seed, number, tally, elsewhere=options.elsewhere)
    print(
        f"seed {options.seed}: {len(rounds)} rounds, {tally.starts} starts, {tally.steps} global "
        f"steps in lockstep, {len(tally.violations)} violations"
    )
    for title in ("faults", "restores"):
        print(title)
        for name, count in sorted(getattr(tally, title).items()):
            print(f"  {name:40} {count}")
    print("slowest")
    for name, took_ms in sorted(tally.slowest.items()):
        print(f"  {name:40} {took_ms} ms")
    for violation in tally.violations:
        print("VIOLATION", violation)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
