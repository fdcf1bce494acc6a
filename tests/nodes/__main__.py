"""Jobs on several hosts, with faults that no single host has; `make nodes-check`, as root.

python -m tests.nodes              # all
python -m tests.nodes worker
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from tests.nodes import openmpi
from tests.nodes.cluster import Cluster, Launch, Life, NodeDaemon, lives_in
from tests.nodes.slurm import OWN_DAEMON, SLURM, Slurm, training
from tests.support import hosts
from tests.support.hosts import Host
from tests.support.waiting import until

STEPS, KILLED = 40, 15
#: Slow enough to be struck in mid-run.
PACE_S = 0.1
#: Of a disk or a clock that is bad for a while: the state grows at this step of so many, and five
#: more follow.
GROWS, LONG, MORE = 20, 80, 5


def worker(hosts: int = 2, late: bool = False, **options: bool) -> str:
    """A worker is killed, and torchrun starts the ranks again, in place: the run goes on as if
    nothing had been, and what it saves from then on becomes global."""
    words = ["--steps", STEPS, "--die", f"1:{KILLED}", *(["--late"] if late else [])]
    with Cluster(hosts) as cluster:
        wanted = undisturbed(cluster)
        with cluster.launch(*words, restarts=3, **options) as run:
            lives = run.finish()
    compare(lives, wanted)
    before, after = lives[: run.ranks], lives[run.ranks :]
    (begin,) = {life.begin for life in after}
    assert {life.rank for life in after} == set(range(run.ranks)), after
    assert max(life.known for life in before) <= begin <= KILLED, lives
    assert {life.known for life in after} == {STEPS}
    return f"killed at step {KILLED}, began again at step {begin}"


def node(number: int, how: Callable[[Host], None]) -> str:
    """A host goes in mid-run, and the launcher ends what is left. Then all is started again, and
    goes on from what every rank was told is global, or a newer step."""
    with Cluster(2) as cluster:
        wanted, pace = undisturbed(cluster), ("--pace", PACE_S)
        with cluster.launch("--steps", STEPS, *pace) as run:
            run.reaches(KILLED)
            how(cluster.hosts[number])
        before = run.lives()
        cluster.restart(cluster.hosts[number])
        return f"killed after step {KILLED}, {goes_on(cluster, before, wanted, STEPS, *pace)}"


def daemon() -> str:
    """A daemon is killed and started again: the run goes on, and so does what becomes global."""
    with Cluster(2) as cluster:
        wanted = undisturbed(cluster)
        with cluster.launch("--steps", STEPS, "--pace", PACE_S) as run:
            run.reaches(KILLED)
            cluster.daemons[1].kill()
            cluster.daemons[1].start()
            lives = run.finish()
    compare(lives, wanted)
    assert {life.known for life in lives} == {STEPS} and len(lives) == run.ranks
    return f"{STEPS} steps, the last of them global"


def cable(spoil: Callable[[Host, Host], None], mend: Callable[[Host, Host], None]) -> str:
    """The cable of the second host is bad for a while: the run goes on without a restart."""
    with Cluster(2) as cluster:
        wanted = undisturbed(cluster)
        one, other = cluster.hosts
        with cluster.launch("--steps", STEPS, "--pace", PACE_S) as run:
            run.reaches(KILLED)
            before = one.retransmitted() + other.retransmitted()
            spoil(other, one)
            until(lambda: one.retransmitted() + other.retransmitted() > before + 5)
            mend(other, one)
            lives = run.finish()
    compare(lives, wanted)
    assert {life.known for life in lives} == {STEPS} and len(lives) == run.ranks
    return f"{STEPS} steps, all of them global"


def slow() -> str:
    """A bad cable all the time."""
    with Cluster(2) as cluster:
        wanted = undisturbed(cluster)
        cluster.hosts[1].spoil(delay_ms=(0, 10), loss=0.01, twice=0.02)
        with cluster.launch("--steps", STEPS) as run:
            lives = run.finish()
    compare(lives, wanted)
    assert {life.known for life in lives} == {STEPS} and len(lives) == run.ranks
    return f"{STEPS} steps, all of them global"


def disk(
    spoil: Callable[[Host], None], mend: Callable[[Host, NodeDaemon], None], why: str,
    *words: object, ends: bool = False,
) -> str:  # fmt: skip
    """The disk of the second host is bad for a while. The steps go on, and the new ones are global
    when the disk is well again. `ends`: the launch ends before that."""
    with Cluster(2) as cluster:
        wanted = undisturbed(cluster, LONG + MORE)
        host, daemon = cluster.hosts[1], cluster.daemons[1]
        with cluster.launch("--steps", LONG, "--pace", PACE_S, *words) as run:
            run.reaches(KILLED)
            spoil(host)
            run.reaches(GROWS + 5)
            said = stuck(cluster, run, why)
            if not ends:
                mend(host, daemon)
                run.finish()
        lives = run.lives()
        if ends:
            mend(host, daemon)
        else:
            assert {life.known for life in lives} == {LONG} and len(lives) == run.ranks
        return f"{said}; {goes_on(cluster, lives, wanted, LONG + MORE, *words)}"


def mount_again(host: Host, daemon: NodeDaemon) -> None:
    daemon.kill()
    host.mend_disk()
    daemon.start()


def clock() -> str:
    """The wall clock of the second host's daemon steps an hour forth and back."""
    with Cluster(2) as cluster:
        wanted = undisturbed(cluster, LONG + MORE)
        with cluster.launch("--steps", LONG, "--pace", PACE_S) as run:
            for number, ahead_s in enumerate((3600, 0, -3600, 0), 1):
                run.reaches(KILLED * number)
                cluster.daemons[1].set_clock(ahead_s)
            lives = run.finish()
        log = cluster.daemons[1].log.read_text()
        hours = {line[:13] for line in log.splitlines() if " step " in line}
        assert len(hours) >= 3, f"the clock did not step: {hours}"
        assert {life.known for life in lives} == {LONG} and len(lives) == run.ranks
        return goes_on(cluster, lives, wanted, LONG + MORE)


def stuck(cluster: Cluster, run: Launch, why: str) -> str:
    """`status` of the first host names the second one, and that of the second one says why."""
    first, second = cluster.daemons

    def waits_for() -> str:
        rows = first.status()["nodes"][0]["nodes"]
        return ", ".join(row["host"] for row in rows if row["waited_step"] is not None)

    assert until(waits_for) == cluster.hosts[1].name
    until(lambda: why in str(second.status()["warnings"]), lambda: str(second.status()["warnings"]))
    at, known = max(max(life.losses) for life in run.lives()), {x.known for x in run.lives()}
    run.reaches(at + 10)
    assert {life.known for life in run.lives()} == known
    return f"{max(known)} was the newest global one for ten steps"


def goes_on(
    cluster: Cluster, before: Sequence[Life], wanted: Sequence[Life], steps: int, *words: object
) -> str:
    """Another launch restores one step on all ranks, and makes the rest of the steps. The restored
    step is not older than any step that a rank knew to be global."""
    with cluster.launch("--steps", steps, *words) as run:
        after = run.finish()
    compare([*before, *after], wanted)
    (begin,) = {life.begin for life in after}
    told = max(life.known for life in before)
    assert told <= begin, f"{told} was global, and the run began at {begin}"
    assert {life.known for life in after} == {steps}
    return f"{told} was known, began again at step {begin}"


def mpi() -> str:
    """Three launches with two ranks on each host: each launch continues from the last step of the
    one before, whether the client comes before the group of ranks or after it."""
    with Cluster(2) as cluster:
        wanted = undisturbed(cluster, ranks=2)
        texts = [
            openmpi.mpirun(cluster, 2, "--steps", steps, *words)
            for steps, words in ((KILLED, []), (GROWS, []), (STEPS, ["--late"]))
        ]
    lives = lives_in(*texts)
    compare(lives, wanted)
    assert [life.begin for life in lives] == [0] * 4 + [KILLED] * 4 + [GROWS] * 4, lives
    assert [life.known for life in lives] == [KILLED] * 4 + [GROWS] * 4 + [STEPS] * 4
    return f"{STEPS} steps in three launches, all of them global"


def slurm(*more: str) -> str:
    """A rank dies, and the next job gets the signal that comes before its time is over: each job
    continues on the nodes of the one before, and nothing is left in the queue."""
    steps = ("--steps", STEPS, "--pace", PACE_S, "--stop", "--die", f"1:{KILLED}")
    with Cluster(2) as cluster, Slurm(cluster) as queue:
        wanted = undisturbed(cluster, ranks=2)
        first = queue.submit(2, *training(*steps, "--folder", queue.root), more="\n".join(more))
        queue.reaches(GROWS, 4)
        queue.ask("scancel", "--signal=USR1", first + 1)
        states = queue.ends()
        lives = queue.lives()
    assert states == ["FAILED", "FAILED", "COMPLETED", "CANCELLED"], states
    compare(lives, wanted)
    begins = [life.begin for life in lives[::4]]
    assert [life.begin for life in lives] == [one for one in begins for _ in range(4)], lives
    assert 0 == begins[0] < begins[1] <= KILLED < GROWS <= begins[2], begins
    assert {life.known for life in lives[8:]} == {STEPS}
    return f"began again at steps {begins[1]} and {begins[2]}, all {STEPS} steps global"


def elsewhere() -> str:
    """Each launch numbers the hosts in another way: the ranks read their parts from each other."""
    with Cluster(3, "--listen", "eth0") as cluster:
        wanted = undisturbed(cluster)
        lives = list[Life]()
        for first, steps in enumerate((KILLED, GROWS, STEPS)):
            order = [(first + at) % 3 for at in range(3)]
            with cluster.launch("--steps", steps, static=True, order=order) as run:
                lives += run.finish()
                assert run.text().count("MiB from other nodes") == (3 if first else 0)
    compare(lives, wanted)
    assert [life.begin for life in lives] == [0] * 3 + [KILLED] * 3 + [GROWS] * 3, lives
    assert [life.known for life in lives] == [KILLED] * 3 + [GROWS] * 3 + [STEPS] * 3
    return f"{STEPS} steps in three launches, all of them global"


def links() -> str:
    """Four hosts, whose links take 200 Mbit/s, restore from each other at the same time."""
    mib, rate_mbit, count = 96, 200, 4
    flags = ("--listen", "eth0", "--slots", "2", "--keep", "1", "--dram", "64MiB")
    with Cluster(count, *flags, disk_bytes=1 << 30) as cluster:
        with cluster.launch("--steps", 2, "--mib", mib, static=True) as run:
            run.finish()
        for host in cluster.hosts:
            host.slow(f"{rate_mbit}mbit")
        with cluster.launch("--steps", 3, "--mib", mib, static=True, order=[1, 2, 3, 0]) as run:
            lives = run.finish()
            took = re.findall(r"([\d.]+) MiB from other nodes in ([\d.]+) s", run.text())
    assert {life.begin for life in lives} == {2}
    assert len(took) == count and all(float(size) > mib for size, _ in took), took
    slowest_s = max(float(seconds) for _, seconds in took)
    share = mib * 8 * 1.048576 / slowest_s / rate_mbit
    assert share >= 0.9, f"{share:.2f} of the links, {took}"
    return f"{count} x {mib} MiB in {slowest_s} s: {share:.2f} of the sum of the links"


def cut_while_reading() -> str:
    """A host is cut off while its part is read: the ranks hear why; later they get all of it."""
    mib = 48
    flags = ("--listen", "eth0", "--slots", "2", "--keep", "1", "--dram", "64MiB")
    with Cluster(2, *flags, disk_bytes=1 << 29) as cluster:
        with cluster.launch("--steps", 2, "--mib", mib, static=True) as run:
            run.finish()
        slow = cluster.hosts[0]
        slow.slow("20mbit")
        with cluster.launch("--steps", 3, "--mib", mib, static=True, order=[1, 0]) as run:
            before = slow.counter("OutSegs")
            until(lambda: slow.counter("OutSegs") > before + 1000, run.text)
            slow.cut()
            until(run.has_ended, run.text)
            assert "the part of rank 0 of step 2 cannot be read from another node" in run.text()
        slow.heal()
        slow.slow("")
        with cluster.launch("--steps", 3, "--mib", mib, static=True, order=[1, 0]) as run:
            lives = run.finish()
    assert {life.begin for life in lives} == {2} and {life.known for life in lives} == {3}
    return "refused with the host, and restored when the link was back"


def undisturbed(cluster: Cluster, steps: int = STEPS, ranks: int = 1) -> list[Life]:
    words = ("--steps", steps, "--undisturbed")
    with cluster.launch(*words, job="undisturbed", ranks=ranks) as run:
        return run.finish()


def compare(lives: Sequence[Life], wanted: Sequence[Life]) -> None:
    """Every life made the steps of an undisturbed run, bit for bit; together they made all."""
    losses = {life.rank: life.losses for life in wanted}
    for life in lives:
        wrong = {step for step, loss in life.losses.items() if loss != losses[life.rank][step]}
        assert not wrong, f"rank {life.rank} from step {life.begin}: other losses at {wrong}"
    for rank, steps in losses.items():
        assert {step for life in lives if life.rank == rank for step in life.losses} == set(steps)


#: No room for the larger volume of a state that has grown.
FULL_DISK = (Host.fill, lambda host, _: host.empty(), "0 B free", "--grow", GROWS)
DEAD_DISK = (Host.break_disk, mount_again, "Input/output error")

SCENARIOS: Mapping[str, Callable[[], str]] = {
    "worker": lambda: worker(command=True),
    "worker-late": lambda: worker(late=True),
    "worker-new-store": lambda: worker(kept=False, command=True),
    "worker-static": lambda: worker(kept=False, static=True),
    "worker-of-four": lambda: worker(hosts=4),
    "daemon": daemon,
    "first-node": lambda: node(0, Host.kill),  # with torch's store
    "second-node": lambda: node(1, Host.kill),
    "power": lambda: node(1, Host.lose_power),
    "cut": lambda: cable(lambda host, _: host.cut(), lambda host, _: host.heal()),
    "cut-one-way": lambda: cable(Host.mute, Host.unmute),
    "cut-other-way": lambda: cable(
        lambda host, other: other.mute(host), lambda host, other: other.unmute(host)
    ),
    "slow": slow,
    "full-disk": lambda: disk(*FULL_DISK),
    "full-disk-restart": lambda: disk(*FULL_DISK, ends=True),
    "dead-disk": lambda: disk(*DEAD_DISK),
    "dead-disk-restart": lambda: disk(*DEAD_DISK, ends=True),
    "clock": clock,
    "elsewhere": elsewhere,
    "links": links,
    "cut-while-reading": cut_while_reading,
    **({"mpirun": mpi} if openmpi.MPI else {}),
    **({"slurm": slurm, "slurm-own-daemon": lambda: slurm(OWN_DAEMON)} if SLURM else {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nodes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(SCENARIOS)}; all without any")
    chosen = parser.parse_args().scenario or [*SCENARIOS]
    if unknown := set(chosen) - set(SCENARIOS):
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}")
    if why := hosts.missing():
        print(why)
        return 2
    for name in chosen:
        print(f"{name}: {SCENARIOS[name]()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
