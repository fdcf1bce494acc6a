"""Which cells there are: all, the quick ones, and the smallest set that has every kind."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.common import MIB
from bench.figures.paper import MODELS, Model
from bench.figures.registry import ALL, CHECKFREQ, OURS
from bench.figures.service import Knobs
from bench.rivals import SHM, UNSYNCED

FIGURES = ("fig8", "fig9", "fig10", "fig11", "fig12", "fig13", "fig14", "cpu")
CPU = "gpt-cpu"


@dataclass(frozen=True, slots=True)
class Plan:
    figures: tuple[str, ...] = FIGURES
    rounds: int = 2
    models: tuple[str, ...] = tuple(MODELS)
    contenders: tuple[str, ...] = (*ALL, SHM)
    intervals: tuple[int, ...] = (1, 10, 25, 50, 100)
    cpu_intervals: tuple[int, ...] = (1, 5)
    payload_bytes: int = 16 * MIB
    bandwidth: int = 25_000_000
    width: int = 384
    layers: int = 8
    in_flight: tuple[int, ...] = (1, 2, 3, 4)
    in_flight_intervals: tuple[int, ...] = (10, 25, 50)
    engines: tuple[str, ...] = ("pwrite", "mmap", "pmem")
    writers: tuple[int, ...] = (1, 2, 4)
    dram: tuple[float, ...] = (1.0, 1.25, 1.5, 1.75, 2.0)
    chunks: tuple[int, ...] = (4, 8, 16)  # quarters of m are whole chunks
    #: Of Figure 11: on the disk with a limit, and on the disk as it is.
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = (
        (4 * MIB, 16 * MIB, 64 * MIB), (16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
    )  # fmt: skip
    #: Contenders that Figure 11 and real training may have.
    beyond_fig8: tuple[str, ...] = (*ALL, UNSYNCED)
    setting: str = ""

    def image_bytes(self) -> int:
        """For slots, or for a rival's files and the one that it writes; and for the file system."""
        largest = max(self.payload_bytes, *self.sizes[0])
        return 256 * MIB + (max(self.in_flight) + 5) * largest

    def model_groups(self) -> list[tuple[str, ...]]:
        """Models whose ratios differ by less than a twentieth are one experiment."""
        groups: list[list[str]] = []
        for name in sorted(self.models, key=lambda name: MODELS[name].ratio):
            if groups and MODELS[name].ratio < 1.05 * MODELS[groups[-1][0]].ratio:
                groups[-1].append(name)
            else:
                groups.append([name])
        return [tuple(group) for group in groups]


FULL = Plan()
QUICK = Plan(
    rounds=1, models=("vgg16", "opt-2.7b"), intervals=(1, 10, 50), cpu_intervals=(1,), width=192,
    layers=3, in_flight=(1, 2, 4), in_flight_intervals=(10, 25), writers=(1, 4), dram=(1.0, 2.0),
    chunks=(4, 16), sizes=((4 * MIB, 16 * MIB), (16 * MIB, 256 * MIB)),
)  # fmt: skip
SMALLEST = Plan(
    rounds=1, models=("vgg16",), intervals=(2,), cpu_intervals=(1,), width=64, layers=1,
    payload_bytes=2 * MIB, bandwidth=50_000_000, in_flight=(1,), in_flight_intervals=(2,),
    writers=(1,), dram=(2.0,), chunks=(4,), sizes=((MIB,), (MIB,)), beyond_fig8=(OURS, CHECKFREQ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One point of Figures 10, 12, 13 or 14."""

    figure: str
    setting: str
    knobs: Knobs
    intervals: tuple[int, ...] = field(default=())


def sensitivity(plan: Plan) -> list[Sensitivity]:
    """What the paper varies: the storage (here the engine that writes); N at several intervals; p
    for several N; M for several chunk sizes."""
    points = [
        Sensitivity("fig10", f"engine={name}", Knobs(engine=name), plan.in_flight_intervals)
        for name in plan.engines
    ]
    points += [
        Sensitivity("fig12", f"N={n}", Knobs(n, dram=max(2, n)), plan.in_flight_intervals)
        for n in plan.in_flight
    ]
    points += [
        Sensitivity("fig13", f"N={n} p={p}", Knobs(n, dram=max(2, n), writers=p), (10,))
        for n in plan.in_flight[:-1] or plan.in_flight
        for p in plan.writers
    ]
    points += [
        Sensitivity("fig14", f"M={m:g}m b=m/{c}", Knobs(dram=m, chunks=c), (15,))
        for c in plan.chunks
        for m in plan.dram
    ]
    return [
        point
        for point in points
        if point.figure in plan.figures and plan.setting in ("", point.setting)
    ]


#: The model of each figure, as in the artefact; but its Figure 13 has OPT-350M, whose numbers are
#: not known.
SENSITIVITY_MODEL = {"fig10": "vgg16", "fig12": "vgg16", "fig13": "opt-1.3b", "fig14": "opt-1.3b"}


def middle_model(group: tuple[str, ...]) -> Model:
    """The model that stands for its group."""
    return MODELS[group[len(group) // 2]]
