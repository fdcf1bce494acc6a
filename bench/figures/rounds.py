"""The rounds of a plan: contenders in turn, in an order that rotates, each beside its own steps
without checkpoints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from bench.common import MIB
from bench.figures import measure
from bench.figures.contender import Contender
from bench.figures.disk import Disk
from bench.figures.measure import DISK_BOUND, NOT_DISK_BOUND
from bench.figures.paper import DISK, LINK, MODELS, Model
from bench.figures.plan import CPU, SENSITIVITY_MODEL, Plan, middle_model, sensitivity
from bench.figures.registry import GEMINI, MEMORY, OTHERS, OURS, available, maker
from bench.figures.results import Cell, Results
from bench.figures.service import Service
from bench.figures.trainers import Gpt, Paced
from bench.rivals import Rivals

T = TypeVar("T")
BARE_STEPS = 20


def rotated(items: Sequence[T], turn: int) -> list[T]:
    turn %= max(1, len(items))
    return [*items[turn:], *items[:turn]]


@dataclass
class Bench:
    """One run of a plan. `slow` is the disk with the limit, `fast` is the disk as it is; without a
    limit both are the same."""

    plan: Plan
    slow: Disk
    fast: Disk
    results: Results = field(default_factory=Results)
    began: float = field(default_factory=time.monotonic)
    notes: dict[str, None] = field(default_factory=dict)  #: what a reader must know

    @property
    def bandwidth(self) -> float:
        """Of the slow disk: its limit, or what it takes."""
        return self.slow.limit or self.slow.direct

    @property
    def link(self) -> float:
        """As much faster than the disk as in the paper."""
        return self.bandwidth * LINK / DISK

    def run(self) -> Results:
        parts: dict[str, Callable[[int], None]] = {
            "fig8": self.slowdowns, "fig9": self.slowdowns, "fig11": self.sizes,
            "fig10": self.sensitivities, "fig12": self.sensitivities, "fig13": self.sensitivities,
            "fig14": self.sensitivities, "cpu": self.cpu,
        }  # fmt: skip
        wanted = dict.fromkeys(parts[name] for name in self.plan.figures)
        for turn in range(self.plan.rounds):
            for part in wanted:
                part(turn)
        return self.results

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", file=sys.stderr, flush=True)

    def _contenders(self, rivals: Rivals, turn: int) -> list[str]:
        here = {*available(rivals), *rivals.unsynced}
        return rotated([name for name in self.plan.contenders if name in here], turn)

    # -- Figure 8, and the loads for Figure 9 ------------------------------------------------------

    def slowdowns(self, turn: int) -> None:
        trainer = Paced(self.plan.payload_bytes, 1.0)
        with Rivals(trainer.state) as rivals:
            for group in self.plan.model_groups():
                self._pace(trainer, middle_model(group))
                for name in self._contenders(rivals, turn):
                    self._slowdown(trainer, rivals, group, name)

    def _pace(self, trainer: Paced, model: Model) -> None:
        trainer.step_s = model.scaled(trainer.payload_bytes, self.bandwidth)
        if trainer.step_s < 2 * trainer.update_s:
            note = (
                f"the figures for {model.name} do not have the paper's ratio: a step of "
                f"{1e3 * trainer.step_s:.2f} ms is too short to overwrite the state, which takes "
                f"{1e3 * trainer.update_s:.2f} ms. This disk is too fast; run as root, without "
                "--directory"
            )
            self.notes[note] = None
            self.say(note)

    def _slowdown(self, trainer: Paced, rivals: Rivals, group: tuple[str, ...], name: str) -> None:
        bare_s = measure.bare_step(trainer, BARE_STEPS)
        make = maker(name, rivals, self.link)
        with measure.running(make, trainer, self.slow.path) as contender:
            for every in self.plan.intervals:
                counts = self._counts(trainer, name, every)
                cost = measure.run(trainer, contender, every, counts, bare_s)
                for model in group:
                    self.results.add(Cell("fig8", model, name, every), cost)
                self.say(f"fig8 {'/'.join(group)} {name} f={every}: {cost.slowdown:.2f}")
            if "fig9" in self.plan.figures and group == self.plan.model_groups()[0]:
                self._load(trainer, contender, name)

    def _load(self, trainer: Paced, contender: Contender, name: str) -> None:
        found = {True: self.results.process_loads, False: self.results.loads}
        for process, loads in found.items():
            if process or name not in OTHERS:
                seconds = measure.load(trainer, contender, process=process)
                loads.setdefault(name, []).append(seconds)
                self.say(f"load {name}{', process' * process}: {seconds:.2f} s")

    def _counts(self, trainer: Paced, name: str, every: int) -> tuple[int, int]:
        written_s = trainer.payload_bytes / self.bandwidth
        if name == MEMORY:  # the disk takes some of them: as many as if it took all
            warm, counted = (
                math.ceil(writes * written_s / (every * trainer.step_s)) for writes in DISK_BOUND
            )
            return warm, counted
        is_disk_bound = every * trainer.step_s < 1.2 * written_s
        return DISK_BOUND if is_disk_bound else NOT_DISK_BOUND

    # -- Figure 11 ---------------------------------------------------------------------------------

    def sizes(self, turn: int) -> None:
        disks = {"limit": self.slow, "as it is": self.fast}
        for (place, disk), sizes in zip(disks.items(), self.plan.sizes, strict=True):
            if place == "limit" and not disk.limit:
                continue
            for size_bytes in sizes:
                setting = f"{size_bytes // MIB} MiB, {place}"
                if self.plan.setting in ("", setting):
                    self._size(turn, disk, size_bytes, setting)

    def _size(self, turn: int, disk: Disk, size_bytes: int, setting: str) -> None:
        trainer = Paced(size_bytes, 0.02)
        with Rivals(trainer.state) as rivals:
            for name in self._contenders(rivals, turn):
                if name not in self.plan.beyond_fig8 or name == MEMORY:
                    continue  # in memory only, it has no time to durable of its own
                if name == GEMINI and not disk.limit:
                    continue  # its link has no rate without a limit
                make = maker(name, rivals, self.link)
                with measure.running(make, trainer, disk.path) as contender:
                    seconds = measure.persist(trainer, contender, 2)
                cell = Cell("fig11", "any", name, setting=setting)
                self.results.seconds.setdefault(cell, []).extend(seconds)
                self.say(f"fig11 {setting} {name}: {min(seconds):.3f} s")

    # -- Figures 10 and 12 to 14 -------------------------------------------------------------------

    def sensitivities(self, turn: int) -> None:
        trainer = Paced(self.plan.payload_bytes, 1.0)
        for point in rotated(sensitivity(self.plan), turn):
            model = SENSITIVITY_MODEL[point.figure]
            self._pace(trainer, MODELS[model])
            bare_s = measure.bare_step(trainer, BARE_STEPS)
            make = partial(Service, knobs=point.knobs)
            with measure.running(make, trainer, self.slow.path) as contender:
                assert isinstance(contender, Service)
                if trouble := contender.other_engine():
                    self.notes[f"{point.figure} {point.setting}: not measured, {trouble}"] = None
                    continue
                for every in point.intervals:
                    counts = (2 * point.knobs.in_flight + 2, DISK_BOUND[1])
                    cost = measure.run(trainer, contender, every, counts, bare_s)
                    self.results.add(Cell(point.figure, model, OURS, every, point.setting), cost)
                    self.say(f"{point.figure} {point.setting} f={every}: {cost.slowdown:.2f}")

    # -- real training -----------------------------------------------------------------------------

    def cpu(self, turn: int) -> None:
        trainer = Gpt(self.plan.width, self.plan.layers)
        with Rivals(trainer.state) as rivals:
            for name in self._contenders(rivals, turn):
                if name in self.plan.beyond_fig8 and name != GEMINI:
                    self._cpu(trainer, rivals, name)

    def _cpu(self, trainer: Gpt, rivals: Rivals, name: str) -> None:
        make = maker(name, rivals, self.link)
        with measure.running(make, trainer, self.fast.path) as contender:
            for every in self.plan.cpu_intervals:
                counts = (2, max(3, 10 // every))
                bare_s = measure.bare_step(trainer, max(3, counts[1] * every // 3))
                cost = measure.run(trainer, contender, every, counts, bare_s)
                self.results.add(Cell("cpu", CPU, name, every), cost)
                self.say(f"cpu {name} f={every}: {cost.slowdown:.2f}")
