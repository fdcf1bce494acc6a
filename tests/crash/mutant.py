"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break the protocol: in `source` the text `new` takes the place of `old`.

    Where few histories convict it, `seed` names some that do, which are tried before the others.
    """

    name: str
    why: str
    program: str = "crash_enum"
    arguments: tuple[str, ...] = ()
    source: str = ""
    old: str = ""
    new: str = ""
    also: tuple[tuple[str, str], ...] = ()  # more of these
    seed: str = ""
