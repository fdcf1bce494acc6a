"""A checkpoint of which this node lacks parts, for a rank that restores it here: the parts of other
nodes, which the rank's process reads itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pccheck_native.catalog import StoredCheckpoint
from pccheck_native.group import count_ranks
from pccheck_native.nodes.homes import Homes
from pccheck_wire.errors import DamagedError, NoCheckpointError
from pccheck_wire.messages import FarNode, FarPart, Opened, Part


class Away(NamedTuple):
    """The checkpoint. P3 and P8: a rank gets its own part of it, or an error."""

    homes: Homes
    sequence: int  # that this node gave it
    node: bytes  # this one

    def opened(
        self, rank: int, world_size: int, here: Iterable[StoredCheckpoint], warnings: list[str],
        *, any_world_size: bool,
    ) -> Opened:  # fmt: skip
        """What a rank reads. `here`: the parts that this node has, by rank. Raises
        NoCheckpointError for another number of ranks, DamagedError."""
        homes, name = self.homes, self.homes.checkpoint.name
        if homes.world_size != world_size and not any_world_size:
            raise NoCheckpointError(
                f"step {name.step} was saved by {count_ranks(homes.world_size)}, and this start "
                f"has {count_ranks(world_size)}",
                hint=f"start the job with {count_ranks(homes.world_size)}, or use fresh=True",
            )
        here = [] if homes.replicated else list(here)  # a copy is whole on one node, or useless
        parts = {
            one.id.rank: Part(one.id.rank, one.payload_bytes, one.tree_offset, one.tree_bytes)
            for one in here
        }
        far = self._far(parts.keys())
        ranks = sorted({*parts, *(one.rank for one in far)})
        # A rank that did not exist then takes the state of another one, and so does a rank whose
        # copy was lost. A part of its own is nobody else's.
        may_take = homes.replicated or rank >= homes.world_size
        if rank not in ranks and not (ranks and may_take):
            raise DamagedError(
                f"step {name.step} cannot be restored on rank {rank}: its part is damaged or gone",
                hint="restart all ranks: the error then names what can be restored",
            )
        whose = rank if rank in ranks else ranks[0]
        own = parts.get(whose, Part(whose, 0, 0, 0))
        return Opened(
            whose, self.sequence, name.step, 0, homes.world_size, homes.checkpoint.start, bytes(16),
            payload_bytes=own.payload_bytes, tree_offset=own.tree_offset,
            tree_bytes=own.tree_bytes, parts=list(parts.values()), warnings=warnings,
            nodes=[
                FarNode(one.host, list(one.peer.addresses), one.peer.fingerprint, one.peer.token)
                for one in homes.homes
            ],
            wall_ns=max((one.wall_ns for one in here), default=0), far=far, name=[*name],
            copies=self._copies(whose),
        )  # fmt: skip

    def _copies(self, whose: int) -> list[list[int]]:
        """The ranks of each copy of replicated state elsewhere, that of `whose` first."""
        if not self.homes.replicated:
            return []
        elsewhere = (home for home in self.homes.homes if home.node != self.node)
        copies = [[part for part, _ in home.parts] for home in elsewhere]
        return sorted(copies, key=lambda ranks: whose not in ranks)

    def _far(self, here: Collection[int]) -> list[FarPart]:
        homes, found = self.homes.homes, list[FarPart]()
        for part, every in self.homes.copies().items():
            copies = [(at, digest) for at, digest in every if homes[at].node != self.node]
            if copies and part not in here:
                found.append(FarPart(part, *map(list, zip(*copies, strict=True))))
        return found
