"""Jobs on four hosts whose ranks come up elsewhere at each start, against an oracle.

A round is a job with a rank on each host, whose state is either sharded (each rank has its own) or
replicated. Three times it starts, with its hosts in another order. Of a replicated job a start
may leave out a host, and a host may come with an empty disk. While the ranks read from each other,
a host may be slow, be cut off, end, or send other bytes than it has saved. Later, in mid-run, a
fault of `tests.nodes.campaign` strikes. In the end all is well again, and the four ranks make five
more steps. At no time

- do two ranks of one start begin at different steps,
- does a start begin below a step that a rank of an earlier start knew to be global,
- does a rank begin with other bytes than those of the step in one earlier start,
- does a start fail while all is well, or only slow, or another host has what one lacks,
- is a loss another one than in an undisturbed run, as long as the ranks are the same;

and all ranks know the last step to be global.

    python -m tests.nodes.travels [--rounds 200] [--seed 1] [--only SEED]
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field

from tests.nodes.campaign import FAULTS
from tests.nodes.cluster import Cluster, Launch
from tests.support import hosts
from tests.support.hosts import Host
from tests.support.waiting import until

HOSTS = 4
STARTS, STEPS, MORE, PACE_S = 3, 24, 5, 0.03
MIB = 4
SLOW = "12mbit"  # a part takes seconds
FLAGS = ("--listen", "eth0", "--slots", "2", "--keep", "1", "--dram", "32MiB")
#: While the ranks read; "" is nothing.
TROUBLES = ("", "", "slow", "cut", "ends", "lies")
#: Which hosts take part.
SHAPES = ("all", "all", "three", "an empty disk")
#: Every 64 KiB of the middle of a file another byte.
_LIE = """
import pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.pcc"):
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in range(size // 4, size - size // 4, 65536):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0xFF]))
"""

_undisturbed: dict[int, dict[int, str]] = {}  # rank -> step -> loss


@dataclass
class Travel:
    """One job. `told` is the newest step that an ended start knew to be global."""

    chance: random.Random
    cluster: Cluster
    replicated: bool
    target: int = 0  # steps
    told: int = 0
    #: Of each start: rank -> step -> what the rank then had.
    held: list[dict[int, dict[int, str]]] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    read_mib: float = 0
    #: All nodes of the last start know a global of it: so one of them may be missing now.
    settled: bool = False

    def losses(self) -> dict[int, dict[int, str]]:
        if not _undisturbed:
            words = ("--steps", STARTS * STEPS + MORE, "--undisturbed")
            with self.cluster.launch(*words, job="undisturbed") as run:
                _undisturbed.update({life.rank: life.losses for life in run.finish()})
        return _undisturbed

    def launch(self, order: list[int], *words: object) -> Launch:
        shared = ["--replicated"] if self.replicated else []
        return self.cluster.launch(
            "--steps", self.target, "--pace", PACE_S, "--mib", MIB, *shared, *words,
            order=order, kept=False, static=True,
        )  # fmt: skip

    def start(self) -> None:
        """One launch with its trouble and its fault; it ends well, or its launcher ends it."""
        draw, order = self.chance, [*range(HOSTS)]
        draw.shuffle(order)
        shape = draw.choice(SHAPES) if self.replicated and self.settled else "all"
        trouble = draw.choice(TROUBLES) if self.target else ""
        if trouble == "lies" and not self.replicated:
            trouble = ""  # no other host has it: refused, as test_travel.py tries
        fault = draw.choice([*FAULTS])
        self.target += STEPS
        empty = self.cluster.hosts[order[-1]]
        if shape == "three":
            order = order[:-1]
        elif shape == "an empty disk":
            self._empty(empty)
        victim = self.cluster.hosts[order[1]]  # the first one has the store
        self.says.append(f"{shape} {order}, {trouble or 'no trouble'}, {fault}")
        step, rank = self.target - draw.randrange(14, STEPS - 5), draw.randrange(len(order))
        words = ["--die", f"{rank}:{step}"] if fault == "worker" else []
        if trouble in ("slow", "cut"):
            victim.slow(SLOW)
        elif trouble == "lies":
            victim.run(sys.executable, "-c", _LIE, victim.disk)
        with self.launch(order, *words) as run:
            well = self._trouble(trouble, victim, run, step)
            if well and FAULTS[fault](self, self.cluster.hosts[order[rank]], run):
                # Nobody waits for a daemon that is late for the last step.
                run.finish() if fault == "nothing" else until(run.has_ended, run.text)
        newest = run.generations()[-1] if run.lives() else []
        self.settled = len(newest) == run.ranks and all(x.known > x.begin for x in newest)
        self._mend()
        self.judge(run)

    def _trouble(self, trouble: str, victim: Host, run: Launch, step: int) -> bool:
        """Returns whether the launch makes its steps after this."""
        if trouble in ("cut", "ends"):
            before = victim.counter("OutSegs")
            until(lambda: victim.counter("OutSegs") > before + 400 or run.has_ended(), run.text)
            if trouble == "ends":
                victim.kill()
            else:
                victim.cut()
            until(lambda: run.has_ended() or self._begun(run), run.text)
            return False
        if trouble == "slow":
            until(lambda: self._begun(run) or run.has_ended(), run.text)
            victim.slow("")
        run.reaches(step)
        return True

    def _begun(self, run: Launch) -> bool:
        return len(run.lives()) == run.ranks

    def _empty(self, host: Host) -> None:
        daemon = self.cluster.daemons[self.cluster.hosts.index(host)]
        daemon.kill()
        host.run("sh", "-c", f"rm -rf {host.disk}/storage/* {host.disk}/storage/.pcc*")
        daemon.start()

    def _mend(self) -> None:
        for host in self.cluster.hosts:
            if host.apart is None:
                self.cluster.restart(host)
            host.heal()

    def judge(self, run: Launch) -> None:
        for lives in run.generations():
            begins = {life.begin for life in lives}
            assert len(begins) == 1, f"ranks began at {begins}"
            (begin,) = begins
            assert begin >= self.told, f"began at {begin}, and {self.told} was global"
            now = {life.rank: life.held[begin] for life in lives if begin in life.held}
            assert not begin or any(self._is_of(start, begin, now) for start in self.held), (
                f"ranks began at step {begin} with {now}; {self.held}"
            )
            self.held.append({life.rank: life.held for life in lives})
            if not self.replicated:
                wanted = self.losses()
                for life in lives:
                    assert all(wanted[life.rank][at] == x for at, x in life.losses.items()), life
            self.told = max(self.told, *(life.known for life in lives))
        self.read_mib += sum(map(float, re.findall(r"([\d.]+) MiB from other nodes", run.text())))

    def _is_of(self, start: dict[int, dict[int, str]], step: int, now: dict[int, str]) -> bool:
        """Whether the ranks have now what that start had at this step."""
        if self.replicated:
            return set(now.values()) <= {held.get(step) for held in start.values()}
        return all(rank in start and start[rank].get(step) == one for rank, one in now.items())

    def end(self) -> None:
        order = [*range(HOSTS)]
        self.chance.shuffle(order)
        self.target += MORE
        self.says.append(f"all {order}")
        with self.launch(order) as run:
            lives = run.finish()
        self.judge(run)
        assert {life.known for life in lives} == {self.target}, lives


def play(seed: int) -> Travel:
    """One round. Raises AssertionError, after printing what it did."""
    chance = random.Random(seed)
    with Cluster(HOSTS, *FLAGS, disk_bytes=1 << 28) as cluster:
        made = Travel(chance, cluster, replicated=chance.random() < 0.6)
        try:
            made.losses()
            for _ in range(STARTS):
                made.start()
            made.end()
        except BaseException:
            print(f"--only {seed}: {made.says}, replicated: {made.replicated}")
            for daemon in cluster.daemons:
                print(daemon.log.read_text()[-3000:])
            raise
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nodes.travels", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the round with this seed")
    options = parser.parse_args()
    if why := hosts.missing():
        print(why)
        return 2
    seeds = range(options.seed, options.seed + options.rounds)
    seen: Counter[str] = Counter()
    read_mib = 0.0
    for seed in seeds if options.only is None else [options.only]:
        made = play(seed)
        for said in made.says:
            seen.update(re.sub(r" \[.*?\]", "", said).split(", "))
        read_mib += made.read_mib
        kind = "replicated" if made.replicated else "sharded"
        print(f"round {seed}, {kind}: {'; '.join(made.says)}", flush=True)
    print(f"{dict(seen)}, {read_mib:.0f} MiB from other nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
