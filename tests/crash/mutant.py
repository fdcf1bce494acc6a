"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break the protocol; `changes` are (old, new) texts in `source`.

    Where few histories convict it, `seed` names some that do, which are tried before the others.
    """

    name: str
    why: str
    program: str = "crash_enum"
    arguments: tuple[str, ...] = ()
    source: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    seed: str = ""
