"""`pccheckctl tune`: slots, DRAM, writers and interval for a training run, with the arithmetic."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

from pccheck_native import _core, layout
from pccheck_wire.errors import PccheckError, UsageError
from pccheck_wire.units import MIB

from . import bench, disk, render, tuning
from .output import Document, number, part, print_json, rows, say, text, whole

COPY_PROBE_BYTES = 128 * MIB
FAR = 4  # times larger or smaller: fixed costs weigh otherwise
HISTORY_MIN = 3  # checkpoints that have become durable, or there is too little to go by
WRITERS_DEFAULT = 2
_ENDED = ("durable", "global")


def run(arguments: argparse.Namespace) -> int:
    wish = tuning.Wish(
        arguments.checkpoint, arguments.step_time, arguments.slowdown, arguments.dram,
        arguments.keep, arguments.slots,
    )  # fmt: skip
    check(wish)
    rates = rates_of(arguments)
    advice = tuning.advise(rates, wish)
    if arguments.json:
        print_json(document(rates, wish, advice))
    else:
        say(as_text(rates, wish, advice))
    return 0


def check(wish: tuning.Wish) -> None:
    """Raises UsageError for what cannot be."""
    if wish.checkpoint_bytes <= 0 or wish.step_s <= 0:
        raise UsageError("--checkpoint and --step-time have to be more than nothing")
    if wish.slowdown < 1:
        raise UsageError(
            f"--slowdown: {wish.slowdown:g} would be faster than without checkpoints",
            hint="1.03 allows three percent",
        )
    if wish.keep < 1 or (wish.slots is not None and wish.slots <= wish.keep):
        raise UsageError("--slots has to be more than --keep, and --keep at least 1")


# -- figures -----------------------------------------------------------------------------------


def rates_of(arguments: argparse.Namespace) -> tuning.Rates:
    """As told, else as measured on the directory named, else as the daemon has seen them."""
    copy = arguments.copy_bandwidth or copy_rate()
    if arguments.bandwidth:
        return tuning.Rates(
            arguments.bandwidth, arguments.bandwidth, 0.0, WRITERS_DEFAULT, copy,
            "--bandwidth, flushes not counted",
        )  # fmt: skip
    if arguments.storage:
        return measured(Path(arguments.storage).absolute(), copy, quiet=arguments.json)
    from .source import choose

    with choose(arguments) as chosen:
        status = chosen.status()
    found = seen(status, arguments.checkpoint, copy, copy_given=bool(arguments.copy_bandwidth))
    if found is not None:
        return found
    if not part(status, "daemon"):  # PCCHECK_STORAGE, nobody serves it
        place = Path(text(part(status, "storage"), "path"))
        return measured(place, copy, quiet=arguments.json)
    raise PccheckError(
        f"the daemon has made fewer than {HISTORY_MIN} checkpoints durable since it started: too "
        "few to reckon with",
        hint="measure a disk: --storage DIR; or say what it does: --bandwidth 2GiB",
        retryable=True,
    )


def measured(place: Path, copy: float, *, quiet: bool) -> tuning.Rates:
    figures = bench.measure(place, size=None, chunk=bench.CHUNK_DEFAULT, quiet=quiet)
    one = figures.write_bytes_per_s[figures.writers]
    return tuning.Rates(
        figures.best_bytes_per_s, one, 2 * figures.flush_s, figures.writers, copy,
        f"measured now on {place}",
    )  # fmt: skip


def seen(
    status: Document, checkpoint_bytes: int, copy: float, *, copy_given: bool
) -> tuning.Rates | None:
    """From the daemon's recent checkpoints, those nearest in size; None when there are too few."""
    found = [
        one
        for rank in rows(status, "ranks")
        for one in rows(rank, "checkpoints")
        if text(one, "state") in _ENDED and _writing_s(one) > 0 and whole(one, "payload_bytes")
    ]
    found.sort(key=lambda one: abs(math.log(whole(one, "payload_bytes") / checkpoint_bytes)))
    near = found[: max(HISTORY_MIN, len(found) // 2)]
    if len(near) < HISTORY_MIN:
        return None
    writing = statistics.median(whole(one, "payload_bytes") / _writing_s(one) for one in near)
    flush = statistics.median(_between(one, "written", "durable") for one in near)
    copying = [
        whole(one, "payload_bytes") / taken
        for one in near
        if (taken := _between(one, "begin", "sealed")) > 0
    ]
    if copying and not copy_given:
        copy = statistics.median(copying)
    middle = round(statistics.median(whole(one, "payload_bytes") for one in near))
    ratio = max(middle, checkpoint_bytes) / min(middle, checkpoint_bytes)
    far = "; far from yours: --storage measures" if ratio > FAR else ""
    return tuning.Rates(
        writing, writing, max(0.0, flush), whole(part(status, "daemon"), "writers", 2), copy,
        f"the daemon's last {len(near)} checkpoints, of about {render.size(middle)}{far}",
    )  # fmt: skip


def _writing_s(one: Document) -> float:
    return _between(one, "first_write", "written")


def _between(one: Document, since: str, until: str) -> float:
    """Seconds between two of a checkpoint's times; 0 when it did not reach one."""
    times = part(one, "times")
    began, ended = number(times, since) or 0, number(times, until) or 0
    return (ended - began) / 1e9 if began and ended > began else 0.0


def copy_rate() -> float:
    """Bytes a second of a plain copy in memory, here and now."""
    source, target = disk.noise(COPY_PROBE_BYTES), disk.noise(COPY_PROBE_BYTES)
    with memoryview(source) as given, memoryview(target) as taken:
        began = time.perf_counter()
        taken[:] = given
        return COPY_PROBE_BYTES / max(time.perf_counter() - began, 1e-9)


# -- telling -----------------------------------------------------------------------------------


def storage_bytes(wish: tuning.Wish, slots: int) -> int:
    """What the volume takes on the disk."""
    capacity = layout.capacity_for(wish.checkpoint_bytes)
    try:
        return _core.volume_bytes_for(capacity, slots)
    except OSError as error:
        raise PccheckError(
            f"{slots} slots of {capacity} bytes are more than a volume has"
        ) from error


def document(rates: tuning.Rates, wish: tuning.Wish, advice: tuning.Advice) -> Document:
    """What `tune --json` prints."""
    slots = advice.in_flight + wish.keep
    return {
        "schema": 1,
        "slots": slots,
        "keep": wish.keep,
        "in_flight": advice.in_flight,
        "effective_in_flight": round(advice.effective, 2),
        "writers": rates.writers,
        "dram_bytes": advice.dram_bytes,
        "storage_bytes": storage_bytes(wish, slots),
        "interval_steps": advice.interval,
        "disk_interval_steps": advice.disk_interval,
        "expected_slowdown": round(advice.slowdown, 4),
        "persist_s": round(advice.persist_s, 4),
        "copy_s": round(advice.copy_s, 4),
        "stall_s": round(advice.stall_s, 4),
        "rates": rates._asdict(),
    }


def as_text(rates: tuning.Rates, wish: tuning.Wish, advice: tuning.Advice) -> str:
    m, t = wish.checkpoint_bytes, wish.step_s
    slots = advice.in_flight + wish.keep
    every = advice.interval * t * advice.slowdown
    lost = advice.interval + math.ceil(advice.persist_s / t)
    lines = [
        f"save every {render.plural(advice.interval, 'step')} ({render.brief(every)}), with",
        f"    pccheckd --slots {slots} --keep {wish.keep} --writers {rates.writers} "
        f"--dram {_flag(advice.dram_bytes)}",
        "",
        f"in flight   {advice.in_flight} (N), and {wish.keep} kept: {slots} slots",
        f"storage     {render.size(storage_bytes(wish, slots))} for each rank, twice that while a "
        "state outgrows its slots",
        f"DRAM        {render.size(advice.dram_bytes)} for each rank",
        f"slowdown    {advice.slowdown:.3f} expected, {wish.slowdown:g} allowed; "
        f"{advice.limited_by} sets the interval",
        f"lost        {render.plural(advice.interval, 'step')} at most when the trainer crashes, "
        f"{lost} with the node",
        "",
        *_arithmetic(rates, wish, advice),
    ]
    if advice.effective < advice.in_flight:
        lines += [
            "",
            f"note: with {render.size(advice.dram_bytes)} of DRAM for {render.size(m)} a copy "
            f"waits for writes: about 1 + M/m = {1 + advice.dram_bytes / m:.2f} checkpoints are in "
            f"flight, not {advice.in_flight}; {render.size(2 * m)} would do",
        ]
    if wish.slowdown == 1 and advice.stall_s > 0:
        lines += ["", "note: no interval slows nothing down: a copy takes longer than it can hide"]
    return "\n".join(lines)


def _flag(nbytes: int) -> str:
    return f"{-(-nbytes // MIB)}MiB"


def _arithmetic(rates: tuning.Rates, wish: tuning.Wish, advice: tuning.Advice) -> list[str]:
    m, n, q, t = wish.checkpoint_bytes, advice.effective, wish.slowdown, wish.step_s
    size, brief = render.size, render.brief
    shown = [
        f"m    = {size(m)}",
        f"t    = {brief(t)}, q = {q:g}",
        f"T_S  = {render.rate(rates.write_bytes_per_s)}: {rates.source}",
        f"T_G  = {render.rate(rates.copy_bytes_per_s)}, F = {brief(rates.flush_s)}, "
        f"p = {rates.writers}",
        f"N    = min({advice.in_flight}, 1 + M/m = 1 + {size(advice.dram_bytes)}/{size(m)}) "
        f"= {n:.2f}",
        f"T_w  = max(N m/T_S, m/T_1) + F = "
        f"max({brief(n * m / rates.write_bytes_per_s)}, {brief(m / rates.one_bytes_per_s)}) + "
        f"{brief(rates.flush_s)} = {brief(advice.persist_s)}",
        f"f*   = ceil(T_w/(N q t)) = ceil({advice.persist_s:.4g}/({n:.2f} x {q:g} x {t:.4g})) "
        f"= {advice.disk_interval}",
        f"copy = {brief(advice.copy_s)}, of which {brief(tuning.HIDDEN * t)} (forward and "
        f"backward, 2/3 of a step) cost nothing: the next update waits {brief(advice.stall_s)}",
    ]
    if advice.stall_interval and q > 1:
        shown.append(
            f"f    >= waiting/((q - 1) t) = {advice.stall_s:.4g}/({q - 1:.4g} x {t:.4g}): "
            f"{advice.stall_interval}"
        )
    return ["reckoned:", *(f"    {line}" for line in shown)]
