"""What agreement costs jobs of thousands of ranks: the very code of the nodes, in simulated time.

    python -m bench.scale [--ranks 100 1000 10000] [--checkpoints 20] [--seed 1]

Each node is a `NodeMember`, and decides with the functions of `pccheck_native/nodes/`; the carrier,
the clock and what the ranks save are simulated (bench/simulated.py). The store is a process that
carries out one operation after the other, as torch's does. All but the CPU times is the same in
every run. Nodes have eight ranks each, and come within COME_S seconds.

A start begins with an empty store. Then all ranks save at the same times, and each node has its
part durable when its disk, drawn from the seed, is done. A second start has the same store, and
restores. Writes bench/results/scale-DATE.{json,md}.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from bench import common
from bench.common import MIB, Spread
from bench.simulated import Clock, Counted, SimulatedCarrier, SimulatedStore, busy, simulate
from pccheck_native.group import Refused
from pccheck_native.nodes import facts
from pccheck_native.nodes.facts import FullName, Have, Promises, RankHas, Said, SaveName
from pccheck_native.nodes.lists import NodeHello, Promise, StartList
from pccheck_native.nodes.offers import HeldPart, Offer, StartAnswer, StartRecord, newest
from pccheckd.nodes.member import MemberPhase, NodeMember

RANKS_PER_NODE = 8
KEEP, SLOTS, FLIGHTS = 2, 5, 2
INTERVAL_S, WRITE_S = 10.0, 2.0
#: A node's part is durable so much later than WRITE_S, in the median.
LATE_S = 0.2
LAUNCH_S = 60.0
COME_S = 5.0  # the ranks of a start connect within this time
#: The rate of the Llama 3 report (arXiv 2407.21783, section 3.3.4): 419 interruptions in 54 days of
#: 16,384 GPUs.
INTERRUPTIONS_PER_RANK_H = 419 / (54 * 24 * 16384)


@dataclass
class Node:
    """A `NodeKeeper`: what the daemon of a node has of the job."""

    number: int
    world_size: int
    clock: Clock
    life: int = 0
    promised: Promise = field(default_factory=Promise)
    records: dict[bytes, StartRecord] = field(default_factory=dict)
    mine: Promises | None = None
    restored: FullName | None = None
    asked: SaveName | None = None
    durable: set[SaveName] = field(default_factory=set)
    flying: set[SaveName] = field(default_factory=set)
    global_s: dict[SaveName, float] = field(default_factory=dict)  # when this node heard of it

    is_live = True

    @property
    def id(self) -> bytes:
        return self.number.to_bytes(16, "big")

    @property
    def ranks(self) -> range:
        first = RANKS_PER_NODE * self.number
        return range(first, min(first + RANKS_PER_NODE, self.world_size))

    @property
    def host(self) -> str:
        return f"node{self.number}"

    def hello(self) -> NodeHello:
        nonces = {rank: (rank << 32 | self.life).to_bytes(16, "big") for rank in self.ranks}
        return NodeHello(
            self.id, self.host, f"run {self.life}", self.world_size, nonces, self.promised
        )

    def lives(self) -> StartList | None:
        return None

    def unanswered(self) -> StartList | None:
        return None

    async def promise(self, found: StartList) -> Refused | None:
        self.promised = found.promise
        self.records[found.start] = StartRecord(found)
        return None

    async def offer(self, found: StartList, round_: int) -> Offer:
        before = self.mine
        known = before.known if before is not None else ()
        parts = tuple(
            HeldPart(FullName(before.start, name), rank, bytes(16))
            for name in self.durable if before is not None
            for rank in self.ranks
        )  # fmt: skip
        return Offer(
            self.id, self.host, self.promised, records=newest(self.records.values()), known=known,
            parts=parts,
        )  # fmt: skip

    async def record(self, found: StartList, answer: StartAnswer, servers: object) -> None:
        self.records[found.start] = self.records[found.start].with_answer(answer).brief()
        self.mine = facts.begin(found.start, answer.restored, (), KEEP)
        self.restored, self.asked = answer.restored, None
        self.durable.clear()
        self.flying.clear()

    def have(self) -> Have | None:
        if self.mine is None:
            return None
        return facts.publish(self.mine, [RankHas(self.durable, self.flying, self.asked)])

    def heard(self, said: Said, lacks: object) -> None:
        assert self.mine is not None
        self.mine = facts.hear(self.mine, said, KEEP)
        for name in said.globals:
            self.global_s.setdefault(name, self.clock.time())
        kept = {one.name for one in self.mine.known} | self.mine.offered
        self.durable &= kept

    def ask(self, name: SaveName) -> None:
        """All ranks here request a checkpoint."""
        assert self.mine is not None
        self.asked = name
        self.flying.add(name)
        held = {FullName(self.mine.start, one) for one in self.durable | self.flying}
        self.mine = facts.offer(self.mine, held, facts.room(SLOTS, FLIGHTS, KEEP))

    def wrote(self, name: SaveName) -> None:
        self.flying.discard(name)
        self.durable.add(name)


async def job(clock: Clock, ranks: int, checkpoints: int, seed: int) -> dict[str, Any]:
    """A start that saves, and a second one with the same store, which restores."""
    store = SimulatedStore(clock)
    nodes = [Node(number, ranks, clock) for number in range(-(-ranks // RANKS_PER_NODE))]
    draw = random.Random(seed)
    async with started(clock, store, nodes, draw) as (members, begin_s, begin):
        before = store.counted()
        used_before = [clock.used_s[node.number] for node in nodes]
        names = [SaveName(0, 0, step, 0) for step in range(1, checkpoints + 1)]
        after_s = [await save(clock, name, nodes, members, draw) for name in names]
        cost = store.counted() - before
    used_s = [clock.used_s[node.number] - was for node, was in zip(nodes, used_before, strict=True)]
    for node in nodes:
        node.life += 1
    async with started(clock, store, nodes, draw) as (_, restore_s, restore):
        assert {node.restored.name for node in nodes if node.restored} == {names[-1]}
    return {
        "ranks": ranks, "nodes": len(nodes),
        "begin_s": begin_s, "begin": begin, "restore_s": restore_s, "restore": restore,
        "global_s": after_s,
        "save": cost.each(checkpoints),
        "decider_cpu_s": used_s[0] / checkpoints,
        "median_cpu_s": statistics.median(used_s) / checkpoints,
    }  # fmt: skip


@contextlib.asynccontextmanager
async def started(
    clock: Clock, store: SimulatedStore, nodes: list[Node], draw: random.Random
) -> AsyncIterator[tuple[list[NodeMember], float, Counted]]:
    """The members of a start that has begun; the seconds after the last had come, and what
    the store did."""
    began_s, before = clock.time(), store.counted()
    members = [NodeMember(SimulatedCarrier(store), "job", node) for node in nodes]

    async def come(member: NodeMember, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await member.run()

    tasks, after_s = [], [draw.uniform(0, COME_S) for _ in nodes]
    for node, member, one_s in zip(nodes, members, after_s, strict=True):
        with busy(node.number):
            tasks.append(asyncio.create_task(come(member, one_s)))
    began_s += max(after_s)
    while any(member.phase is not MemberPhase.RUNNING for member in members):
        refused = [member.refused for member in members if member.refused is not None]
        assert not refused, refused[0]
        await asyncio.sleep(0.01)
    yield members, clock.time() - began_s, store.counted() - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def save(
    clock: Clock, name: SaveName, nodes: list[Node], members: list[NodeMember], draw: random.Random
) -> float:
    """Seconds from durable on the slowest node to global on all."""
    began_s = clock.time()

    async def write(node: Node, member: NodeMember, late_s: float) -> None:
        with busy(node.number):
            node.ask(name)
            member.changed()
            await asyncio.sleep(WRITE_S + late_s)
            node.wrote(name)
            member.changed()

    lates = [LATE_S * draw.lognormvariate(0, 0.5) for _ in nodes]
    slowest_s = began_s + WRITE_S + max(lates)
    await asyncio.gather(*(map(write, nodes, members, lates)))
    while any(name not in node.global_s for node in nodes):
        await asyncio.sleep(0.001)
    took_s = max(node.global_s[name] for node in nodes) - slowest_s
    await asyncio.sleep(max(0.0, began_s + INTERVAL_S - clock.time()))
    return took_s


def goodput(found: dict[str, Any]) -> float:
    """The share of the time whose training counts, if a checkpoint is requested each INTERVAL_S."""
    between_s = 3600 / (INTERRUPTIONS_PER_RANK_H * found["ranks"])
    safe_s = WRITE_S + LATE_S + statistics.median(found["global_s"])
    lost_s = safe_s + INTERVAL_S / 2 + LAUNCH_S + found["restore_s"]
    return float(1 - lost_s / between_s)


def row(found: dict[str, Any]) -> str:
    counts = [
        f"{one.operations:,}, {one.keys:,}, {one.bytes / MIB:,.2f} MiB"
        for one in (found["begin"], found["save"], found["restore"])
    ]
    spread = Spread.of([1000 * one for one in found["global_s"]])
    return (
        f"| {found['ranks']:,} | {found['nodes']:,} | {found['begin_s']:.2f} s, {counts[0]} | "
        f"{spread.text(1)} ms, {counts[1]} | {found['restore_s']:.2f} s, {counts[2]} | "
        f"{1000 * found['decider_cpu_s']:.1f} ms, {1000 * found['median_cpu_s']:.2f} ms | "
        f"{100 * goodput(found):.2f} % |"
    )


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    facts = common.facts_of(options.directory)
    results = [
        simulate(functools.partial(
            job, ranks=ranks, checkpoints=options.checkpoints, seed=options.seed
        ))
        for ranks in options.ranks
    ]  # fmt: skip
    lines = common.heading("Agreement of many nodes, simulated", facts)
    lines += [
        f"{options.checkpoints} checkpoints, seed {options.seed}. Behind a time: "
        "operations of the store for all nodes, keys that it read for operations with many, and "
        "bytes. CPU is that of the agreement, for each checkpoint: of the node "
        "that decides, and of the median node, on this machine. Goodput: a checkpoint each "
        f"{INTERVAL_S:g} s, interruptions at the rate of the Llama 3 report, and {LAUNCH_S:g} s "
        "until the launcher has started the ranks again.", "",
        "| ranks | nodes | a first start begins | slowest durable to global on all nodes | "
        "a restart has agreed | CPU | goodput |",
        "|---|---|---|---|---|---|---|",
        *map(row, results),
    ]  # fmt: skip
    common.write_results("scale", facts | {"runs": results}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
