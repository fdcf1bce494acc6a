"""The checkpoint that all ranks of a job on several nodes would restore, as a source: its parts are
read from the nodes, also while the job does not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pccheck_native import catalog
from pccheck_native.group import Refused
from pccheck_native.identity import CheckpointId
from pccheck_native.nodes.homes import Homes
from pccheck_native.subset import Subset
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError, NoCheckpointError, UsageError
from pccheck_wire.messages import FarPart, Opened

from .cluster import Cluster
from .documents import Document
from .reading.errors import PartUnreachableError, lacking, recycled
from .reading.peers import PeerPayloads

_START = "start pccheckd with --listen on the nodes that do not answer, then try again"


class ClusterSource:
    """See `source.Source`. It has one checkpoint, with a part for every rank: of replicated state a
    rank whose part is lost gets that of another rank, as in `restore()`."""

    served = True

    def __init__(self, job: Document, step: int | None, note: Callable[[str], None]) -> None:
        """`note`: gets a sentence whenever a copy is given up, and for what is lost."""
        self.path = Path("the nodes of the job")
        self._job, self._step, self._note = job, step, note
        self._cluster: Cluster | None = None
        self._homes: Homes | None = None

    def held(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None, sizes: bool = False
    ) -> catalog.Catalog:
        """Raises NoCheckpointError, as `restore()` would."""
        self._cluster = cluster = Cluster(self._job)
        self._homes = homes = self._chosen(cluster)
        one = CheckpointId(
            cluster.uid, cluster.name, 0, 1, homes.checkpoint.name.step, 1, homes.world_size,
            homes.checkpoint.start,
        )  # fmt: skip  # sequence and incarnation differ on each node: 1 stands for them
        here = homes.copies().keys()
        lost = [number for number in range(homes.world_size) if number not in here]
        if lost and homes.replicated:
            numbers = ", ".join(map(str, lost[:8])) + ", ..." * (len(lost) > 8)
            self._note(
                f"what only ranks {numbers} had (generators, loaders) is lost with their node"
            )
        ranks = range(homes.world_size) if homes.replicated else sorted(here)
        return catalog.Catalog(
            [self._stored(one._replace(rank=n)) for n in ranks if rank in (None, n)], {}, [], []
        )

    def open(self, parts: Sequence[catalog.StoredCheckpoint]) -> OneCopyPayloads:
        return self._payloads(parts[0].id.rank)

    def verify(self, checkpoint: catalog.StoredCheckpoint, part: Subset | None) -> tuple[int, bool]:
        raise UsageError(
            "checkpoints of other nodes are not verified from here",
            hint="run pccheckctl verify on each node",
        )

    def _chosen(self, cluster: Cluster) -> Homes:
        """Where the parts are of what would be restored. Raises NoCheckpointError."""
        found, silent = cluster.restorable(self._step), cluster.silent()
        more = f" ({silent})" if silent else ""
        if found is not None and isinstance(found.answer, Refused):
            raise NoCheckpointError(
                found.answer.reason + more, hint=_START if silent else found.answer.hint
            )
        if found is None or found.homes is None:
            raise NoCheckpointError(
                f"no node of job {cluster.name!r} has a checkpoint{more}",
                hint=_START if silent else "see: pccheckctl list",
            )
        if silent:
            self._note(f"not all nodes of the job have answered: {silent}")
        return found.homes

    def _stored(self, one: CheckpointId) -> catalog.StoredCheckpoint:
        with contextlib.closing(self._payloads(one.rank)) as payloads:
            payload_bytes, tree_offset, tree_bytes, wall_ns = payloads.facts()
        return catalog.StoredCheckpoint(
            one, payload_bytes, tree_offset, tree_bytes, wall_ns, flags=0, slot=0,
            volume_path=self.path,
        )  # fmt: skip

    def _payloads(self, rank: int) -> OneCopyPayloads:
        assert self._cluster is not None and self._homes is not None
        return OneCopyPayloads(self._cluster, self._homes, rank, self._note)


class OneCopyPayloads:
    """See `source.Payloads`: of all parts, or of one copy of replicated state. The nodes may divide
    their copies in different ways, so parts of two copies are never read together."""

    reaches_gpus = False

    def __init__(
        self, cluster: Cluster, homes: Homes, rank: int, note: Callable[[str], None]
    ) -> None:
        """`rank`: whose state is read."""
        copies = homes.copies()
        self._rank, self._whose = rank, rank if rank in copies else min(copies)
        if homes.replicated:
            (at, _), *_ = copies[self._whose]
            copies = {part: copies[part] for part, _ in homes.homes[at].parts}
        places = {bytes.fromhex(one.node): one.place for one in cluster.nodes}
        far = [FarPart(part, *map(list, zip(*some, strict=True))) for part, some in copies.items()]
        name = homes.checkpoint.name
        self._step = name.step
        self._far = PeerPayloads(cluster.name, Opened(
            self._whose, 1, name.step, 1, homes.world_size, homes.checkpoint.start, bytes(16), 0, 0,
            0, nodes=[places[one.node] for one in homes.homes], far=far, name=[*name],
        ), note)  # fmt: skip

    def facts(self) -> tuple[int, int, int, int]:
        """The bytes of the payload, the tree's place and bytes, and when it became durable."""
        with self._errors():
            payload_bytes, tree_offset, tree_bytes, _ = self._far.facts(self._whose)
        return payload_bytes, tree_offset, tree_bytes, self._far.wall_ns

    def packed_tree(self, rank: int) -> bytearray:
        whose = self._of(rank)
        with self._errors():
            return self._far.packed_tree(whose)

    def tree(self, rank: int) -> tree.Tree:
        whose = self._of(rank)
        with self._errors():
            return self._far.tree(whose)

    def read_into(
        self, rank: int, offset: int, length: int, ranges: bytes, device_ranges: bytes = b""
    ) -> None:
        whose = self._of(rank)
        with self._errors():
            self._far.read_into(whose, offset, length, ranges, device_ranges)

    def close(self) -> None:
        self._far.close()

    def _of(self, rank: int) -> int:
        whose = self._whose if rank == self._rank else rank
        if whose not in self._far.ranks:
            raise lacking(rank, self._step)
        return whose

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """A job that runs may have replaced the checkpoint, and a node may have ended: the caller
        asks the nodes again."""
        try:
            yield
        except PartUnreachableError as error:
            if "damaged" in error.message:
                raise DamagedError(error.message, hint=error.hint) from error
            raise recycled(self._step, 1) from error
