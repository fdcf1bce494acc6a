"""All nodes of a job, also while the job does not run: what each of them holds, what they would
restore together, and the payloads of that. Each node is asked through its peer server. The daemon
of this node has noted at the last start where these servers are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pccheck_native import catalog
from pccheck_native.group import Refused
from pccheck_native.identity import CheckpointId
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.holding import Holding, Restorable, restorable
from pccheck_native.nodes.homes import Homes
from pccheck_native.nodes.offers import Word
from pccheck_native.subset import Subset
from pccheck_wire.errors import NoCheckpointError, UsageError, one_owner
from pccheck_wire.messages import FarNode, FarPart, Opened

from .documents import Document, rows, text, texts
from .reading.peers import PeerPayloads
from .reading.streams import LeftError, holding

ASKED_AT_ONCE = 32
NAMED_MAX = 4


class ClusterNode(NamedTuple):
    """One node, as it has answered."""

    node: str  # its id, in hex
    here: bool
    place: FarNode
    holding: Holding | None
    why: str = ""  # it has not answered

    def document(self) -> Document:
        found = self.holding
        known = found.offer.known if found is not None else ()
        parts = [one for one in found.offer.parts if one.intact] if found is not None else []
        return {
            "host": self.place.host, "node": self.node, "here": self.here,
            "addresses": self.place.addresses, "answered": found is not None, "reason": self.why,
            "version": found.version if found is not None else None,
            "runs": found.is_live if found is not None else None,
            "ranks": sorted({one.part for one in parts}),
            "newest_step": _newest(found, (one.checkpoint for one in parts)),
            "global_step": _newest(found, known),
        }  # fmt: skip


class Cluster:
    """The nodes of the last start of a job."""

    def __init__(self, job: Document) -> None:
        """`job`: of the document that `Observer.servers` returns. Asks every node."""
        self.name = text(job, "job")
        self.uid = int(str(job["uid"]))
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            self.nodes = list(threads.map(self._ask, rows(job, "nodes")))

    def restorable(self, step: int | None = None) -> Restorable | None:
        """What a start of the nodes that have answered would restore; None: no node knows of a
        start."""
        found = [one.holding for one in self.nodes if one.holding is not None]
        return restorable(found, Word(step=step))

    def document(self) -> Document:
        """What `status --cluster --json` has of the job."""
        found = self.restorable()
        answer = found.answer if found is not None else None
        refused = {"message": answer.reason, "hint": answer.hint} \
            if isinstance(answer, Refused) else None  # fmt: skip
        restored = found.homes.checkpoint if found is not None and found.homes else None
        return {
            "uid": self.uid, "job": self.name,
            "world_size": found.world_size if found is not None else None,
            "step": restored.name.step if restored is not None else None,
            "start": restored.start.hex() if restored is not None else None,
            "refused": refused, "nodes": [one.document() for one in self.nodes],
        }  # fmt: skip

    def silent(self) -> str:
        """Which nodes have not answered, for the end of a sentence."""
        lines = [f"host {one.place.host}: {one.why}" for one in self.nodes if one.why]
        more = [f"and {len(lines) - NAMED_MAX} more"] if len(lines) > NAMED_MAX else []
        return "; ".join([*lines[:NAMED_MAX], *more])

    def _ask(self, row: Document) -> ClusterNode:
        place = FarNode(
            text(row, "host"), texts(row, "addresses"), bytes.fromhex(text(row, "fingerprint")),
            bytes.fromhex(text(row, "token")),
        )  # fmt: skip
        made = ClusterNode(text(row, "node"), row.get("here") is True, place, None)
        if not place.addresses:
            return made._replace(why="its pccheckd had no --listen")
        try:
            return made._replace(holding=holding(place, self.name))
        except LeftError as error:
            return made._replace(why=str(error))


def find(document: Document, job: str, *, uid: int | None = None) -> Document | None:
    """The job in the document of `Observer.servers`. Raises UsageError if several users have it."""
    mine = [
        one for one in rows(document, "jobs")
        if text(one, "job") == job and uid in (None, one.get("uid"))
    ]  # fmt: skip
    one_owner(job, (int(str(one["uid"])) for one in mine))
    return mine[0] if mine else None


class ClusterSource:
    """See `source.Source`: the checkpoint that all ranks of the job would restore, and no other
    one."""

    served = True

    def __init__(self, job: Document, step: int | None, note: Callable[[str], None]) -> None:
        """`note`: gets a sentence whenever a copy is given up, and for nodes without an answer."""
        self.path = Path("the nodes of the job")
        self._job, self._step, self._note = job, step, note
        self._opened: Opened | None = None

    def held(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None, sizes: bool = False
    ) -> catalog.Catalog:
        """Raises NoCheckpointError, as `restore()` would."""
        cluster = Cluster(self._job)
        found, silent = cluster.restorable(self._step), cluster.silent()
        if found is not None and isinstance(found.answer, Refused):
            raise NoCheckpointError(
                found.answer.reason + (f" ({silent})" if silent else ""), hint=found.answer.hint
            )
        if found is None or found.homes is None:
            raise NoCheckpointError(
                f"no node of job {cluster.name!r} has a checkpoint" + f" ({silent})" * bool(silent),
                hint="see: pccheckctl status --cluster",
            )
        if silent:
            self._note(f"not all nodes of the job have answered: {silent}")
        self._opened = _opened(cluster, found.homes)
        one = CheckpointId(
            cluster.uid, cluster.name, 0, 1, self._opened.step, 1, found.homes.world_size,
            found.homes.checkpoint.start,
        )  # fmt: skip
        payloads = PeerPayloads(cluster.name, self._opened, self._note)
        try:
            parts = [
                _stored(one._replace(rank=part), payloads, self.path)
                for part in payloads.ranks
                if rank in (None, part)
            ]
        finally:
            payloads.close()
        return catalog.Catalog(parts, {}, [], [])

    def open(self, parts: Sequence[catalog.StoredCheckpoint]) -> PeerPayloads:
        assert self._opened is not None
        return PeerPayloads(parts[0].id.job, self._opened, self._note)

    def verify(self, checkpoint: catalog.StoredCheckpoint, part: Subset | None) -> tuple[int, bool]:
        raise UsageError(
            "checkpoints of other nodes are not verified from here",
            hint="run pccheckctl verify on each node",
        )


def _opened(cluster: Cluster, homes: Homes) -> Opened:
    """All parts, each from any node that has it."""
    places = {bytes.fromhex(one.node): one.place for one in cluster.nodes}
    far = [
        FarPart(part, [at for at, _ in copies], [digest for _, digest in copies])
        for part, copies in homes.copies().items()
    ]
    name = homes.checkpoint.name
    return Opened(
        0, 1, name.step, 1, homes.world_size, homes.checkpoint.start, bytes(16), 0, 0, 0,
        nodes=[places[one.node] for one in homes.homes], far=far, name=[*name],
    )  # fmt: skip


def _stored(one: CheckpointId, payloads: PeerPayloads, path: Path) -> catalog.StoredCheckpoint:
    payload_bytes, tree_offset, tree_bytes, _ = payloads.facts(one.rank)
    return catalog.StoredCheckpoint(
        one, payload_bytes, tree_offset, tree_bytes, payloads.wall_ns, flags=0, slot=0,
        volume_path=path,
    )  # fmt: skip


def _newest(found: Holding | None, names: Iterable[FullName]) -> int | None:
    """The step of the newest one; starts are in the order of their promises."""
    if found is None:
        return None
    promises = defaultdict(
        lambda: (0, b""), {r.start: tuple(r.promise) for r in found.offer.records}
    )
    newest = max(names, key=lambda one: (promises[one.start], one.name), default=None)
    return newest.name.step if newest is not None else None
