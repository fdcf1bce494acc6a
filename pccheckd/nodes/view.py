"""What one node has seen of the others, for people: who was heard when, and who is waited for. No
decision depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from pccheck_native.nodes.facts import Have, Said, SaveName


class Waited(NamedTuple):
    """A checkpoint that other nodes have, and that is not global because of this one."""

    name: SaveName
    since_s: float


class NodesView:
    """Owned by the member. Members are numbered as in its list; times are those of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.haves: list[Have | None] = []
        self.heard_s: dict[int, float] = {}  #: by member: when something of it was new
        self.globals = 0  #: checkpoints that became global since the start has begun
        self.said = Said()
        self._offered_s: dict[SaveName, float] = {}  # by somebody, and not global: since when

    def answered(self, members: Collection[int]) -> None:
        """Members that have offered what they hold, to the beginning of the start."""
        for at in members:
            self.heard_s.setdefault(at, self._clock())

    def saw(self, haves: Sequence[Have | None]) -> None:
        """What the members have published."""
        before = [*self.haves, *[None] * len(haves)]
        self.haves = list(haves)
        now_s = self._clock()
        for at, have in enumerate(haves):
            if have is not None and have != before[at]:
                self.heard_s[at] = now_s
        offered = {name for have in haves if have is not None for name in have.offered}
        self._offered_s = {name: self._offered_s.get(name, now_s) for name in offered}
        self.heard(self.said)

    def heard(self, said: Said) -> None:
        """The facts."""
        self.globals += len(set(said.globals) - set(self.said.globals))
        self.said = said
        newest = max(said.globals, default=None)
        for name in [*self._offered_s]:
            if name in said.given_up or (newest is not None and name <= newest):
                del self._offered_s[name]

    def waited_for(self, at: int) -> Waited | None:
        """The oldest checkpoint that waits for this member."""
        have = self.haves[at] if at < len(self.haves) else None
        return self._oldest_without(have.offered if have is not None else ())

    def not_begun(self, at: int) -> Waited | None:
        """The oldest one that this member has not even begun to save."""
        have = self.haves[at] if at < len(self.haves) else None
        return self._oldest_without((*have.offered, *have.there) if have is not None else ())

    def _oldest_without(self, names: Collection[SaveName]) -> Waited | None:
        late = [(name, since_s) for name, since_s in self._offered_s.items() if name not in names]
        return Waited(*min(late)) if late else None
