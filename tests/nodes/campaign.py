"""Jobs on several hosts, struck by faults that a seed chooses, against an oracle.

A round is a job on two or three hosts, with one or two ranks on each. Up to three times a fault
strikes at a random step: of a worker, a daemon, a cable, a host or its power. In the end all is
well again, and the job makes five more steps. At no time

- do two ranks of one start begin at different steps,
- does a start begin below a step that a rank of an earlier start knew to be global,
- is a loss another one than in an undisturbed run;

and all ranks know the last step to be global.

    python -m tests.nodes.campaign [--rounds 300] [--seed 1] [--only SEED]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tests.nodes.cluster import Cluster, Launch
from tests.support import hosts
from tests.support.hosts import Host
from tests.support.waiting import until

#: Of each launch; of the last one; the time of a step.
STEPS, MORE, PACE_S = 30, 5, 0.02
STRIKES_MAX = 3

_undisturbed: dict[int, dict[int, dict[int, str]]] = {}  # ranks -> rank -> step -> loss


class Struck(Protocol):
    """What a fault needs."""

    chance: random.Random
    cluster: Cluster


@dataclass
class Round:
    """One job. `told` is the newest step that an ended start knew to be global."""

    chance: random.Random
    cluster: Cluster
    ranks: int  # of each host
    target: int = 0  # steps
    told: int = 0
    says: list[str] = field(default_factory=list)

    def losses(self) -> dict[int, dict[int, str]]:
        count = self.ranks * len(self.cluster.hosts)
        if count not in _undisturbed:
            words = ("--steps", STRIKES_MAX * STEPS + MORE, "--undisturbed")
            with self.cluster.launch(*words, job="undisturbed", ranks=self.ranks) as run:
                _undisturbed[count] = {life.rank: life.losses for life in run.finish()}
        return _undisturbed[count]

    def launch(self, steps: int, *words: object) -> Launch:
        """So many steps more than the launch before."""
        self.target += steps
        kind = self.chance.choice(
            ({"kept": True}, {"kept": False}, {"kept": False, "static": True})
        )
        late = ["--late"] if self.chance.random() < 0.3 else []
        self.says.append(f"launch {kind}{''.join(late)}")
        return self.cluster.launch(
            "--steps",
            self.target,
            "--pace",
            PACE_S,
            *words,
            *late,
            ranks=self.ranks,
            restarts=3,
            **kind,
        )

    def strike(self) -> None:
        """One launch with a fault; it ends well, or its launcher ends it."""
        fault = self.chance.choice([*FAULTS])
        step = self.target + self.chance.randrange(1, STEPS - 10)
        host = self.chance.choice(self.cluster.hosts)
        self.says.append(f"{fault} {host.name} at {step}")
        rank = self.chance.randrange(self.ranks * len(self.cluster.hosts))
        words = ["--die", f"{rank}:{step}"] if fault == "worker" else []
        with self.launch(STEPS, *words) as run:
            run.reaches(step)
            if FAULTS[fault](self, host, run):
                run.finish()
        if host.apart is None:
            self.cluster.restart(host)
        self.judge(run)

    def judge(self, run: Launch) -> None:
        wanted = self.losses()
        for lives in run.generations():
            begins = {life.begin for life in lives}
            assert len(begins) == 1, f"ranks began at {begins}"
            assert min(begins) >= self.told, f"began at {begins}, and {self.told} was global"
            for life in lives:
                assert all(wanted[life.rank][at] == loss for at, loss in life.losses.items()), life
            self.told = max(self.told, *(life.known for life in lives))

    def end(self) -> None:
        with self.launch(MORE) as run:
            lives = run.finish()
        self.judge(run)
        assert {life.known for life in lives} == {self.target}, lives


def _daemon(round_: Struck, host: Host, _: Launch) -> bool:
    daemon = round_.cluster.daemons[round_.cluster.hosts.index(host)]
    daemon.kill()
    daemon.start()
    return True


def _cable(spoil: Callable[[Host, Host], None], mend: Callable[[Host, Host], None]) -> _Fault:
    def strike(round_: Struck, host: Host, run: Launch) -> bool:
        other = round_.chance.choice([one for one in round_.cluster.hosts if one is not host])
        count = other.retransmitted() + host.retransmitted() + 3
        spoil(host, other)
        until(lambda: other.retransmitted() + host.retransmitted() > count or run.has_ended())
        mend(host, other)
        return True

    return strike


def _gone(how: Callable[[Host], None]) -> _Fault:
    def strike(_: Struck, host: Host, _run: Launch) -> bool:
        how(host)
        return False

    return strike


_Fault = Callable[[Struck, Host, Launch], bool]  #: returns whether the launch makes all its steps
FAULTS: Mapping[str, _Fault] = {
    "nothing": lambda *_: True,
    "worker": lambda *_: True,
    "daemon": _daemon,
    "cut": _cable(lambda host, _: host.cut(), lambda host, _: host.heal()),
    "mute": _cable(Host.mute, Host.unmute),
    "host": _gone(Host.kill),
    "power": _gone(Host.lose_power),
    "launcher": lambda *_: False,
}


def play(seed: int) -> list[str]:
    """One round. Raises AssertionError, after printing what it did."""
    chance = random.Random(seed)
    with Cluster(chance.choice((2, 2, 3))) as cluster:
        made = Round(chance, cluster, ranks=chance.choice((1, 1, 2)))
        try:
            for _ in range(chance.randrange(STRIKES_MAX + 1)):
                made.strike()
            made.end()
        except BaseException:
            print(
                f"--only {seed}: {made.says}, {len(cluster.hosts)} hosts, {made.ranks} ranks each"
            )
            for daemon in cluster.daemons:
                print(daemon.log.read_text()[-3000:])
            raise
    return made.says


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nodes.campaign", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the round with this seed")
    options = parser.parse_args()
    if why := hosts.missing():
        print(why)
        return 2
    seeds = range(options.seed, options.seed + options.rounds)
    seen: Counter[str] = Counter()
    for seed in seeds if options.only is None else [options.only]:
        says = play(seed)
        seen.update(said.split()[0] for said in says)
        print(f"round {seed}: {', '.join(says)}", flush=True)
    print(dict(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
