"""The contenders by the names that tables, pictures and flags use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.figures.contender import Contender, Library
from bench.figures.gemini import Gemini
from bench.figures.schemes import CheckFreq, Gpm
from bench.figures.service import Knobs, Service
from bench.figures.trainers import Trainer
from bench.rivals import KEPT, TORCHSNAPSHOT, UNSYNCED, Rivals

NONE, OURS = "none", "PCcheck"
#: Of the same name in the paper; the others are libraries, and our engine with their policy.
CHECKFREQ, GPM, GEMINI = "CheckFreq", "GPM", "Gemini"
OUR_CHECKFREQ, OUR_GPM = "our engine, CheckFreq's policy", "our engine, GPM's policy"
LIBRARIES = ("torch.save", "safetensors", "DCP save", KEPT, TORCHSNAPSHOT)
PAPER = (OURS, CHECKFREQ, GPM, GEMINI)
ALL = (*PAPER, OUR_CHECKFREQ, OUR_GPM, *LIBRARIES)
#: Leaves what a power cut loses, as most scripts do: not in the figures.
OTHERS = (UNSYNCED,)

_KNOBS = {OURS: Knobs(), OUR_CHECKFREQ: Knobs(in_flight=1), OUR_GPM: Knobs(1, blocking=True)}

Make = Callable[[Trainer, Path], Contender]


def available(rivals: Rivals) -> list[str]:
    """Libraries that are not installed are left out."""
    missing = {name for name in LIBRARIES if name not in rivals.save}
    return [name for name in ALL if name not in missing]


def maker(name: str, rivals: Rivals, link: float) -> Make:
    """`link`: bytes a second between machines."""
    if name in _KNOBS:
        return lambda trainer, directory: Service(trainer, directory, _KNOBS[name])
    if name == CHECKFREQ:
        return CheckFreq
    if name == GPM:
        return Gpm
    if name == GEMINI:
        return lambda trainer, directory: Gemini(trainer, directory, link)
    return lambda trainer, directory: Library(trainer, directory, rivals, name)
