"""The paper's arithmetic: how many checkpoints in flight, and how often, a disk can take. Pure.

Symbols: m checkpoint bytes; N checkpoints in flight; p writers of each; M DRAM; t seconds of a
step; q allowed slowdown (1.03: three percent); T_S what the disk writes; T_G what a copy into DRAM
reaches; F flush and commit record; T_w(N) from the first byte to durable with N in flight.

    T_w(N) = max(N m / T_S, m / T_1) + F    all N share the disk, and one alone reaches T_1
    f* = ceil(T_w(N) / (N q t))             one every f* steps, so that the disk keeps up
"""

from __future__ import annotations

import math
from typing import NamedTuple

HIDDEN = 2 / 3  # of a step: forward and backward, during which a copy costs nothing
N_MIN, N_MAX = 2, 8
WORTH_IT = 1.05  # one more in flight has to save so much
KEEP_DEFAULT = 2
DRAM_MIN = 64 << 20  # some chunks


class Rates(NamedTuple):
    """What the disk and the memory do, and who says so."""

    write_bytes_per_s: float  # T_S
    one_bytes_per_s: float  # T_1, with `writers`
    flush_s: float  # F
    writers: int  # p
    copy_bytes_per_s: float  # T_G
    source: str


class Wish(NamedTuple):
    checkpoint_bytes: int  # m
    step_s: float  # t
    slowdown: float  # q
    dram_bytes: int | None  # M; None: as much as is of use
    keep: int = KEEP_DEFAULT
    slots: int | None = None


class Advice(NamedTuple):
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

    @property
    def limited_by(self) -> str:
        return "the disk" if self.disk_interval >= self.stall_interval else "the copy"


def persist_s(rates: Rates, checkpoint_bytes: int, in_flight: float) -> float:
    """T_w(N)."""
    shared = in_flight * checkpoint_bytes / rates.write_bytes_per_s
    return max(shared, checkpoint_bytes / rates.one_bytes_per_s) + rates.flush_s


def best_in_flight(rates: Rates, checkpoint_bytes: int) -> int:
    """The fewest, from two on, beyond which one more does not save five percent of T_w(N)/N. With
    one, a copy could not begin before the checkpoint before is durable."""
    for count in range(N_MIN, N_MAX):
        now = persist_s(rates, checkpoint_bytes, count) / count
        if now < WORTH_IT * persist_s(rates, checkpoint_bytes, count + 1) / (count + 1):
            return count
    return N_MAX


def advise(rates: Rates, wish: Wish) -> Advice:
    m, t, q = wish.checkpoint_bytes, wish.step_s, wish.slowdown
    count = best_in_flight(rates, m) if wish.slots is None else wish.slots - wish.keep
    dram = max(2 * m, DRAM_MIN) if wish.dram_bytes is None else wish.dram_bytes
    effective = min(float(count), 1 + dram / m)
    whole_s = persist_s(rates, m, effective)
    copy_s = copied_s(rates, m, dram)
    stall_s = max(0.0, copy_s - HIDDEN * t)
    disk = math.ceil(round(whole_s / (effective * q * t), 9))
    stall = 0
    if stall_s > 0:
        stall = math.ceil(round(stall_s / ((q - 1) * t), 9)) if q > 1 else disk
    interval = max(1, disk, stall)
    return Advice(
        count, effective, dram, whole_s, copy_s, stall_s, max(1, disk), stall, interval,
        1 + stall_s / (interval * t),
    )  # fmt: skip


def copied_s(rates: Rates, checkpoint_bytes: int, dram_bytes: int) -> float:
    """With less DRAM than a checkpoint, the rest of it is copied as fast as chunks are written."""
    first = min(checkpoint_bytes, dram_bytes)
    return first / rates.copy_bytes_per_s + (checkpoint_bytes - first) / rates.write_bytes_per_s
