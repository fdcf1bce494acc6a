"""What the other nodes of a job have, as far as this node knows: shown to `group.py` as ranks, so
that one rule decides for one node and for many. Pure: no I/O, no clock.

A start is *wide* if some of its ranks run on other nodes. Two facts about a checkpoint come from
there: it is *global* (every node has all its parts), or *given up* (some node will never have its
parts). `nodes/` learns facts and writes them here. A checkpoint without a fact that was offered to
the other nodes counts as being saved by their ranks, so it stays. What was never offered counts as
absent there: a rank without a slot gives it up, and waits for no message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pccheck_native.group import Agreement, Held, Rank
from pccheck_wire.ends import Why


class Elsewhere:
    """Owned by the membership of the job."""

    def __init__(self) -> None:
        #: By incarnation of a wide start: its ranks on this node.
        self.here: dict[int, frozenset[int]] = {}
        self.globals: set[int] = set()  #: sequences that all nodes have
        self.given_up: dict[int, Why] = {}  #: sequences that some node will never have, and why
        #: The sequence that a start of this node alone restores: no other node has to have it.
        self.alone = 0
        self.offered: set[int] = set()  #: sequences that this node has promised to keep
        self.kept: set[int] = set()  #: sequences that the nodes keep until newer ones are global
        self.old: set[int] = set()  #: sequences from before the newest restore of all ranks
        #: The newest wide start whose nodes have agreed on what it begins from. Until then none of
        #: its checkpoints begins, and nothing is given up or recycled.
        self.agreed = 0
        #: Whether a new checkpoint is promised to the other nodes; asked once for each sequence.
        self.offers: Callable[[int], bool] = lambda _: False
        #: A rank requests a checkpoint, and the nodes have not agreed.
        self.wanted: Callable[[], None] = lambda: None

    def keeps(self, agreed: Agreement) -> Agreement:
        """The decision of this node, in the order of the nodes: what all ranks went back to counts
        as newer than what they had saved before."""
        if not self.kept:
            return agreed
        given_up = agreed.given_up | (self.old - self.kept)
        return Agreement(min(self.kept), max(self.kept), given_up)

    def forget(self, there: Collection[int]) -> None:
        """Keeps what is known of the sequences that are still there."""
        self.globals &= set(there)
        self.offered &= set(there)
        self.given_up = {n: why for n, why in self.given_up.items() if n in there}

    def with_others(self, local: Mapping[int, Rank]) -> dict[int, Rank]:
        """The ranks of this node, and beside them those of the other nodes."""
        ranks = dict(local)
        if not self.here:
            return ranks
        held = {h for known in local.values() for h in known.held if h.incarnation in self.here}
        pending = {n: size for known in local.values() for n, size in known.pending.items()}
        pending |= {h.sequence: h.world_size for h in held}
        undecided = {
            n: size
            for n, size in pending.items()
            if n in self.offered and n not in self.globals and n not in self.given_up
        }
        shared = {h for h in held if h.sequence in {*self.globals, self.alone}}
        other = Rank(held=frozenset(shared), pending=undecided)
        world_size = max((h.world_size for h in held), default=0) or max(
            pending.values(), default=0
        )
        here_now = self.here.get(self.agreed)
        for rank in range(world_size):
            known = ranks.get(rank)
            if known is None:
                ranks[rank] = other
                continue
            if foreign := self._foreign(rank, shared):
                known = known._replace(held={*known.held, *foreign})
            if here_now is not None and rank not in here_now:  # it left a volume, and saves there
                known = known._replace(pending={**undecided, **known.pending})
            ranks[rank] = known
        return ranks

    def _foreign(self, rank: int, shared: Collection[Held]) -> set[Held]:
        """Of what all nodes have: the parts of this rank that lie on another node."""
        return {h for h in shared if rank not in self.here[h.incarnation]}
