"""The contenders by the names that tables, pictures and flags use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.figures.contender import Contender, Library
from bench.figures.gemini import Gemini
from bench.figures.schemes import CheckFreq, Gpm
from bench.figures.service import Knobs, Service
from bench.figures.trainers import Trainer
from bench.rivals import KEPT, SHM, TORCHSNAPSHOT, UNSYNCED, Rivals

OURS = "PCcheck"
#: In memory only; the newest one is written whenever the disk is idle.
MEMORY = "PCcheck, in memory"
#: Of the same name in the paper; the others are libraries, and our engine with their policy.
CHECKFREQ, GPM, GEMINI = "CheckFreq", "GPM", "Gemini"
OUR_CHECKFREQ, OUR_GPM = "our engine, CheckFreq's policy", "our engine, GPM's policy"
LIBRARIES = ("torch.save", "safetensors", "DCP save", KEPT, TORCHSNAPSHOT)
#: In the order of tables and pictures.
ALL = (OURS, MEMORY, CHECKFREQ, GPM, GEMINI, OUR_CHECKFREQ, OUR_GPM, *LIBRARIES)
#: Not durable: a power cut loses the checkpoint, a dead process does not. Not in the figures that
#: are about the disk; the first, as in most scripts, in none.
OTHERS = (UNSYNCED, SHM)

_KNOBS = {
    OURS: Knobs(), MEMORY: Knobs(dram=3.0, durable_every="auto"),
    OUR_CHECKFREQ: Knobs(in_flight=1), OUR_GPM: Knobs(1, blocking=True),
}  # fmt: skip

Make = Callable[[Trainer, Path], Contender]


def available(rivals: Rivals) -> list[str]:
    """Libraries that are not installed are left out."""
    missing = {name for name in LIBRARIES if name not in rivals.save}
    return [name for name in ALL if name not in missing]


def maker(name: str, rivals: Rivals, link: float) -> Make:
    """`link`: bytes a second between machines."""
    if name in _KNOBS:
        return partial(Service, knobs=_KNOBS[name])
    if name == CHECKFREQ:
        return CheckFreq
    if name == GPM:
        return Gpm
    if name == GEMINI:
        return partial(Gemini, link=link)
    if name == SHM:
        return lambda trainer, _directory: Library(trainer, Path("/dev/shm"), rivals, name)
    return partial(Library, rivals=rivals, name=name)
