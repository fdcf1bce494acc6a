"""`pccheckctl tune`: slots, DRAM, writers and interval for a training run, with the arithmetic.

The paper's symbols: m checkpoint bytes; N checkpoints in flight; p writers of each; M DRAM;
t seconds of a step; q allowed slowdown (1.03: three percent); T_S what the disk writes; T_1 what
one checkpoint alone reaches; T_G what a copy into DRAM reaches; F flush and commit record; T_w(N)
from the first byte to durable with N in flight.

    T_w(N) = max(N m / T_S, m / T_1) + F    N checkpoints share the disk; one alone reaches T_1
    f* = ceil(T_w(N) / (N q t))             one every f* steps, so that the disk keeps up

In memory only (durable_every=k) a checkpoint takes a copy, T_c = m/T_G, and one at a time is
written:

    f = ceil(max(T_c / t, (T_c - 2/3 t) / ((q - 1) t)))    k = ceil(T_w(1) / (q f t))    M = 3 m

With an MTBF, q is 1 in f*: a disk that just does not keep up makes every checkpoint late, which
costs more work at a failure than the shorter interval saves (bench.tune).
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from pccheck_native import _core, cgroups, layout
from pccheck_wire.errors import PccheckError, UsageError
from pccheck_wire.messages import STATES_IN_MEMORY
from pccheck_wire.units import MIB
from pccheckctl.arguments import SLOTS_MAX
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, number, part, rows, text, whole
from pccheckctl.output.files import write_text
from pccheckctl.source import choose, daemon, require_known

from . import bench, disk
from .goodput import Costs, best_interval, goodput

HIDDEN = 2 / 3  # of a step: forward and backward, during which a copy costs nothing
N_MIN, N_MAX = 2, 8
WORTH_IT = 1.05  # what one more in flight has to save
DRAM_MIN = 64 * MIB  # some chunks
COPY_PROBE_BYTES = 128 * MIB
FAR = 4  # times larger or smaller: fixed costs have another weight there
HISTORY_MIN = 3  # durable checkpoints that an estimate needs
WRITERS_DEFAULT = 2


class Rates(NamedTuple):
    """How fast disk and memory are, and where the figures come from."""

    write_bytes_per_s: float  # T_S
    one_bytes_per_s: float  # T_1, with `writers`
    flush_s: float  # F
    writers: int  # p
    copy_bytes_per_s: float  # T_G
    source: str
    storage: str = ""  # the directory, when it is known


class Workload(NamedTuple):
    checkpoint_bytes: int  # m
    step_s: float  # t
    slowdown: float  # q
    dram_bytes: int | None  # M; None: as much as is useful
    keep: int = 2
    slots: int | None = None
    mtbf_s: float | None = None  # None: failures do not count
    restart_s: float = 0.0

    @property
    def disk_slowdown(self) -> float:
        """q in f*."""
        return self.slowdown if self.mtbf_s is None else 1.0


class Tuning(NamedTuple):
    in_flight: int  # N
    effective: float  # min(N, 1 + M/m)
    dram_bytes: int
    persist_s: float  # T_w at the effective N
    copy_s: float  # until a snapshot is complete in DRAM
    stall_s: float  # how long the next update waits for that
    disk_interval: int  # f*, what the disk allows
    stall_interval: int  # what the waiting allows; 0 without any
    interval: int
    slowdown: float  # expected at that interval
    goodput: float | None  # at that interval; None without an MTBF


class InMemory(NamedTuple):
    """Checkpoints in memory only, of which every k-th goes to the disk."""

    interval: int  # f
    durable_every: int  # k; 1: the disk takes all that the copies allow
    dram_bytes: int
    lost_with_process: int  # steps, at most ...
    lost_with_node: int


def run(arguments: argparse.Namespace) -> int:
    if arguments.job:
        take_from_job(arguments)
    if arguments.checkpoint is None or arguments.step_time is None:
        raise UsageError(
            "tune needs --checkpoint SIZE and --step-time TIME",
            hint="or --job NAME, for a job that the daemon saves",
        )
    given = Workload(
        arguments.checkpoint, arguments.step_time, arguments.slowdown, arguments.dram,
        arguments.keep, arguments.slots, arguments.mtbf, arguments.restart,
    )  # fmt: skip
    check(given)
    rates = rates_of(arguments)
    advice = advise(rates, given)
    if arguments.output:
        write_text(arguments.output, as_toml(rates, given, advice), force=arguments.force)
    answer(arguments, document(rates, given, advice), lambda: as_text(rates, given, advice))
    return 0


def take_from_job(arguments: argparse.Namespace) -> None:
    """m and t, unless they are given, from the checkpoints of the daemon's memory: the largest
    rank, and the time between requests over the steps between them."""
    with daemon(arguments) as observer:
        found = rows(observer.trace(math.inf), "checkpoints")
        if all(text(one, "job") != arguments.job for one in found):
            require_known(observer, arguments.job)
    mine = [one for one in found if text(one, "job") == arguments.job]
    ranks: dict[tuple[int, int], list[Document]] = {}
    for one in mine:
        ranks.setdefault((whole(one, "uid"), whole(one, "rank")), []).append(one)
    steps_s = [
        (whole(late, "requested") - whole(early, "requested")) / 1e9 / steps
        for items in ranks.values()
        for early, late in itertools.pairwise(items)
        if (steps := whole(late, "step") - whole(early, "step")) > 0
    ]
    if len(steps_s) < HISTORY_MIN:
        raise PccheckError(
            f"the daemon has fewer than {HISTORY_MIN + 1} checkpoints of job {arguments.job!r} "
            "since it started: too few for an estimate",
            hint="give --checkpoint SIZE and --step-time TIME, or try again later",
            retryable=True,
        )
    arguments.checkpoint = arguments.checkpoint or max(whole(one, "payload_bytes") for one in mine)
    arguments.step_time = arguments.step_time or statistics.median(steps_s)


def check(given: Workload) -> None:
    """Raises UsageError for impossible values."""
    if given.checkpoint_bytes <= 0 or given.step_s <= 0:
        raise UsageError("--checkpoint and --step-time must be more than 0")
    if not 1 <= given.slowdown < math.inf:  # also NaN
        raise UsageError(
            f"--slowdown must be at least 1 (got {given.slowdown:g})",
            hint="1.03 allows three percent",
        )
    if given.mtbf_s is not None and given.mtbf_s <= 0:
        raise UsageError("--mtbf must be more than 0", hint="--mtbf 6h: a failure every six hours")
    if given.slots is not None and given.slots <= given.keep:
        raise UsageError(f"--slots must be more than --keep (got {given.slots} and {given.keep})")


# -- the arithmetic ----------------------------------------------------------------------------


def persist_s(rates: Rates, checkpoint_bytes: int, in_flight: float) -> float:
    """T_w(N)."""
    shared = in_flight * checkpoint_bytes / rates.write_bytes_per_s
    return max(shared, checkpoint_bytes / rates.one_bytes_per_s) + rates.flush_s


def best_in_flight(rates: Rates, checkpoint_bytes: int) -> int:
    """The fewest, from two on, beyond which one more does not save five percent of T_w(N)/N. With
    one, a copy could not begin before the previous checkpoint is durable."""
    for count in range(N_MIN, N_MAX):
        now = persist_s(rates, checkpoint_bytes, count) / count
        if now < WORTH_IT * persist_s(rates, checkpoint_bytes, count + 1) / (count + 1):
            return count
    return N_MAX


def advise(rates: Rates, given: Workload) -> Tuning:
    m, t, q = given.checkpoint_bytes, given.step_s, given.slowdown
    count = (given.slots or SLOTS_MAX) - given.keep
    if given.slots is None:
        count = min(count, best_in_flight(rates, m))
    dram = max(2 * m, DRAM_MIN) if given.dram_bytes is None else given.dram_bytes
    effective = min(float(count), 1 + dram / m)
    whole_s = persist_s(rates, m, effective)
    first = min(m, dram)  # the rest is copied as fast as chunks are written
    copy_s = first / rates.copy_bytes_per_s + (m - first) / rates.write_bytes_per_s
    stall_s = max(0.0, copy_s - HIDDEN * t)
    disk_interval = max(1, math.ceil(round(whole_s / (effective * given.disk_slowdown * t), 9)))
    stall = 0
    if stall_s > 0:
        stall = math.ceil(round(stall_s / ((q - 1) * t), 9)) if q > 1 else disk_interval
    interval, good = max(disk_interval, stall), None
    if given.mtbf_s is not None:
        costs = Costs(t, stall_s, whole_s, given.restart_s, given.mtbf_s)
        interval = best_interval(costs, interval)
        good = goodput(costs, interval)
    return Tuning(
        count, effective, dram, whole_s, copy_s, stall_s, disk_interval, stall, interval,
        1 + stall_s / (interval * t), good,
    )  # fmt: skip


def in_memory(rates: Rates, given: Workload) -> InMemory:
    m, t, q = given.checkpoint_bytes, given.step_s, given.slowdown
    copy_s, alone_s = m / rates.copy_bytes_per_s, persist_s(rates, m, 1)
    waits_s = max(0.0, copy_s - HIDDEN * t) / (q - 1) if q > 1 else 0.0
    interval = max(1, math.ceil(round(max(copy_s, waits_s) / t, 9)))
    every = max(1, math.ceil(round(alone_s / (q * interval * t), 9)))
    return InMemory(
        interval, every, STATES_IN_MEMORY * m, interval + math.ceil(copy_s / t),
        interval * every + math.ceil(alone_s / t),
    )  # fmt: skip


def stopping(rates: Rates, given: Workload) -> tuple[int, float]:
    """The best interval, and its goodput, of a save that stops training until it is durable."""
    assert given.mtbf_s is not None
    alone_s = persist_s(rates, given.checkpoint_bytes, 1)
    costs = Costs(given.step_s, alone_s, 0.0, given.restart_s, given.mtbf_s)
    interval = best_interval(costs)
    return interval, goodput(costs, interval)


# -- where the figures come from ---------------------------------------------------------------


def rates_of(arguments: argparse.Namespace) -> Rates:
    """As given, else as measured on the directory given, else as the daemon has seen them."""
    copy = arguments.copy_bandwidth or copy_rate()
    if arguments.bandwidth:
        return Rates(
            arguments.bandwidth, arguments.bandwidth, 0.0, WRITERS_DEFAULT, copy,
            "--bandwidth, without flushes", arguments.storage or "",
        )  # fmt: skip
    if arguments.storage:
        return measured(Path(arguments.storage).absolute(), copy, quiet=arguments.json)
    with choose(arguments) as chosen:
        status = chosen.status()
    if not part(status, "daemon"):  # PCCHECK_STORAGE, without a daemon
        place = Path(text(part(status, "storage"), "path"))
        return measured(place, copy, quiet=arguments.json)
    with daemon(arguments) as observer:
        status["checkpoints"] = rows(observer.trace(math.inf), "checkpoints")
    found = seen(status, arguments.checkpoint, copy, copy_given=bool(arguments.copy_bandwidth))
    if found is None:
        raise PccheckError(
            f"since the daemon started, fewer than {HISTORY_MIN} checkpoints of about that size "
            "have become durable: too few for an estimate",
            hint="measure the disk: --storage DIR; or give its bandwidth: --bandwidth 2GiB",
            retryable=True,
        )
    return found


def measured(place: Path, copy: float, *, quiet: bool) -> Rates:
    figures = bench.measure(place, size=None, chunk=bench.CHUNK_DEFAULT, quiet=quiet)
    one = figures.write_bytes_per_s[figures.writers]
    return Rates(
        figures.best_bytes_per_s, one, 2 * figures.flush_s, figures.writers, copy,
        f"measured now on {place}", str(place),
    )  # fmt: skip


def seen(status: Document, checkpoint_bytes: int, copy: float, *, copy_given: bool) -> Rates | None:
    """Rates of the daemon's recent checkpoints of about that size, which are those of a trace: in
    status those in memory only leave no room for others. None when they are too few."""
    found = [
        (whole(one, "payload_bytes"), one)
        for one in rows(status, "checkpoints")
        if text(one, "state") in ("durable", "global")
        and _between(one, "first_write", "written") > 0
        and 1 / FAR <= whole(one, "payload_bytes") / checkpoint_bytes <= FAR
    ]
    found.sort(key=lambda sized: abs(math.log(sized[0] / checkpoint_bytes)))
    near = found[: max(HISTORY_MIN, len(found) // 2)]
    if len(near) < HISTORY_MIN:
        return None
    median = statistics.median
    writing = median(nbytes / _between(one, "first_write", "written") for nbytes, one in near)
    flush = median(_between(one, "written", "durable") for _, one in near)
    copying = [
        nbytes / taken for nbytes, one in near if (taken := _between(one, "begin", "sealed")) > 0
    ]
    middle = round(median(nbytes for nbytes, _ in near))
    return Rates(
        writing, writing, flush, whole(part(status, "daemon"), "writers", WRITERS_DEFAULT),
        median(copying) if copying and not copy_given else copy,
        f"the daemon's last {len(near)} checkpoints, of about {render.size(middle)}",
        text(part(status, "storage"), "path"),
    )  # fmt: skip


def _between(one: Document, since: str, until: str) -> float:
    """Seconds between two of a checkpoint's times; 0 when it did not reach one."""
    began, ended = number(one, since) or 0, number(one, until) or 0
    return (ended - began) / 1e9 if began and ended > began else 0.0


def copy_rate() -> float:
    """Bytes per second of a plain copy in memory, here and now."""
    source, target = disk.noise(COPY_PROBE_BYTES), disk.noise(COPY_PROBE_BYTES)
    with memoryview(source) as given, memoryview(target) as taken:
        began = time.perf_counter()
        taken[:] = given
        return COPY_PROBE_BYTES / max(time.perf_counter() - began, 1e-9)


# -- output ------------------------------------------------------------------------------------


def storage_bytes(given: Workload, slots: int) -> int:
    """What the volume takes on the disk."""
    capacity = layout.capacity_for(given.checkpoint_bytes)
    try:
        return _core.volume_bytes_for(capacity, slots)
    except OSError as error:
        raise PccheckError(
            f"a volume cannot have {slots} slots of {render.size(capacity)}", hint="fewer --slots"
        ) from error


def document(rates: Rates, given: Workload, advice: Tuning) -> Document:
    """What `tune --json` prints."""
    slots = advice.in_flight + given.keep
    return {
        "schema": 1,
        "slots": slots,
        "keep": given.keep,
        "in_flight": advice.in_flight,
        "effective_in_flight": round(advice.effective, 2),
        "writers": rates.writers,
        "dram_bytes": advice.dram_bytes,
        "storage_bytes": storage_bytes(given, slots),
        "interval_steps": advice.interval,
        "disk_interval_steps": advice.disk_interval,
        "expected_slowdown": round(advice.slowdown, 4),
        "persist_s": round(advice.persist_s, 4),
        "copy_s": round(advice.copy_s, 4),
        "stall_s": round(advice.stall_s, 4),
        "goodput": None if advice.goodput is None else round(advice.goodput, 4),
        "in_memory": in_memory(rates, given)._asdict(),
        "rates": rates._asdict(),
    }


def as_toml(rates: Rates, given: Workload, advice: Tuning) -> str:
    m, t = render.size(given.checkpoint_bytes), render.brief(given.step_s)
    return (
        f"# pccheckctl tune: {m} per checkpoint, steps of {t}; save every "
        f"{render.plural(advice.interval, 'step')}\n"
        f"slots = {advice.in_flight + given.keep}\nkeep = {given.keep}\nwriters = {rates.writers}\n"
        f'dram = "{-(-advice.dram_bytes // MIB)}MiB"\n'
    )


def as_text(rates: Rates, given: Workload, advice: Tuning) -> str:
    m, t = given.checkpoint_bytes, given.step_s
    size, brief, steps = render.size, render.brief, render.plural(advice.interval, "step")
    slots, place = advice.in_flight + given.keep, shlex.quote(rates.storage or "DIR")
    lost = advice.interval + math.ceil(advice.persist_s / t)
    limit = "the disk" if advice.disk_interval >= advice.stall_interval else "the copy"
    if advice.interval > max(advice.disk_interval, advice.stall_interval):
        limit = "--mtbf"
    lines = [
        f"save every {steps} ({brief(advice.interval * t * advice.slowdown)}), with",
        f"    pccheckd --storage {place} --slots {slots} --keep {given.keep} "
        f"--writers {rates.writers} --dram {-(-advice.dram_bytes // MIB)}MiB",
        "",
        f"in flight   {advice.in_flight} (N), and {given.keep} kept: {slots} slots",
        f"storage     {size(storage_bytes(given, slots))} per rank, twice that while a state "
        "outgrows its slots",
        f"DRAM        {size(advice.dram_bytes)} per rank",
        f"slowdown    {advice.slowdown:.3f} expected, {given.slowdown:g} allowed; {limit} sets the "
        "interval",
        f"lost work   at most {steps} when the trainer crashes, {lost} when the node does",
        *_failures(rates, given, advice),
        *_in_memory(in_memory(rates, given), given),
        "",
        *_arithmetic(rates, given, advice),
    ]
    if advice.effective < advice.in_flight:
        lines += [
            "",
            f"note: with {size(advice.dram_bytes)} of DRAM for {size(m)} a copy waits for writes: "
            f"about 1 + M/m = {1 + advice.dram_bytes / m:.2f} checkpoints are in flight, not "
            f"{advice.in_flight}; {size(2 * m)} would be enough",
        ]
    memory_bytes, bound = cgroups.memory_bytes()
    if advice.dram_bytes > memory_bytes:
        lines += ["", f"note: the DRAM exceeds {bound}, {size(memory_bytes)}: give --dram SIZE"]
    if given.slowdown == 1 and advice.stall_s > 0:
        lines += ["", "note: every interval slows training down: a copy takes longer than a step"]
    return "\n".join(lines)


def _in_memory(found: InMemory, given: Workload) -> list[str]:
    if found.durable_every == 1:
        limit = "the disk takes every step" if found.interval == 1 else "the copy sets the interval"
        return [f"in memory   no gain (durable_every): {limit}"]
    steps, dram = render.plural(found.interval, "step"), render.size(found.dram_bytes)
    lines = [
        f"in memory   every {steps}, and one of {found.durable_every} on the disk: "
        f'durable_every={found.durable_every}, or "auto";',
        f"            lost work at most {render.plural(found.lost_with_process, 'step')} when a "
        f"process dies, {found.lost_with_node} when the node does;",
        f"            needs DRAM for {STATES_IN_MEMORY} states of each rank: {dram}",
    ]
    if given.dram_bytes is not None and given.dram_bytes < found.dram_bytes:
        lines[-1] += f", and --dram gives {render.size(given.dram_bytes)}"
    return lines


def _failures(rates: Rates, given: Workload, advice: Tuning) -> list[str]:
    if given.mtbf_s is None or advice.goodput is None:
        return []
    steps, good = stopping(rates, given)
    return [
        f"goodput     {advice.goodput:.4f} with a failure every {render.duration(given.mtbf_s)}; "
        f"{good:.4f} with a save that stops training,",
        f"            whose best interval is {render.plural(steps, 'step')} (Young/Daly)",
    ]


def _arithmetic(rates: Rates, given: Workload, advice: Tuning) -> list[str]:
    m, n, q, t = given.checkpoint_bytes, advice.effective, given.slowdown, given.step_s
    size, brief, of_disk = render.size, render.brief, given.disk_slowdown
    shared, alone = brief(n * m / rates.write_bytes_per_s), brief(m / rates.one_bytes_per_s)
    shown = [
        f"m    = {size(m)}",
        f"t    = {brief(t)}, q = {q:g}",
        f"T_S  = {render.rate(rates.write_bytes_per_s)}: {rates.source}",
        f"T_G  = {render.rate(rates.copy_bytes_per_s)}, F = {brief(rates.flush_s)}, "
        f"p = {rates.writers}",
        f"N    = min({advice.in_flight}, 1 + M/m = 1 + {size(advice.dram_bytes)}/{size(m)}) "
        f"= {n:.2f}",
        f"T_w  = max(N m/T_S, m/T_1) + F = max({shared}, {alone}) + {brief(rates.flush_s)} "
        f"= {brief(advice.persist_s)}",
        f"f*   = ceil(T_w/(N q t)) = ceil({advice.persist_s:.4g}/({n:.2f} x {of_disk:g} x "
        f"{t:.4g})) = {advice.disk_interval}",
        f"copy = {brief(advice.copy_s)}; forward and backward (2/3 of a step) hide "
        f"{brief(HIDDEN * t)} of it: the next update waits {brief(advice.stall_s)}",
    ]
    if advice.stall_interval and q > 1:
        shown.append(
            f"f    >= waiting/((q - 1) t) = {advice.stall_s:.4g}/({q - 1:.4g} x {t:.4g}): "
            f"{advice.stall_interval}"
        )
    return ["computed from:", *(f"    {line}" for line in shown)]
