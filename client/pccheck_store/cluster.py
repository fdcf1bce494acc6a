"""All nodes of a job, also while the job does not run: what each of them holds, what they would
restore together, and whom they reach. Each node is asked through its peer server. The daemon of
this node has noted at the last start where these servers are."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pccheck_native.group import Refused
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.holding import Holding, Restorable, restorable
from pccheck_native.nodes.lists import Promise
from pccheck_native.nodes.offers import StartAnswer, Word
from pccheck_native.tls import LeftError
from pccheck_wire.messages import FarNode

from .documents import Document, rows, text, texts, whole
from .reading.streams import holding, reach

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
        self.uid = whole(job, "uid")
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
        restored = answer.restored if isinstance(answer, StartAnswer) else None
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
        place = _place(row)
        made = ClusterNode(text(row, "node"), row.get("here") is True, place, None)
        if not place.addresses:
            return made._replace(
                why="it had no peer server (no --listen, or see the log of pccheckd there)"
            )
        try:
            found = holding(place, self.name)
        except LeftError as error:
            here = "; pccheckd on this node needs --listen with that address" * made.here
            return made._replace(why=f"{error}{here}")
        if found.offer.node.hex() != made.node:
            return made._replace(why="another storage directory is there than at the last start")
        return made._replace(holding=found)


class TriedPairs(NamedTuple):
    """What every node of a job could reach."""

    pairs: int  # that were tried
    failed: list[tuple[str, str, str]]  # the host that reads, the other one, why not
    silent: list[tuple[str, str]]  # hosts that did not answer, and why


def pairs_of(job: Document) -> TriedPairs:
    """Lets every node of a job in the document of `Observer.servers` try all others."""
    nodes = rows(job, "nodes")
    hosts = {bytes.fromhex(text(one, "node")): text(one, "host") for one in nodes}
    tried = TriedPairs(0, [], [])

    def ask(row: Document) -> list[tuple[bytes, str]] | str:
        try:
            return reach(_place(row), text(job, "job"))
        except LeftError as error:
            return str(error)

    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        for row, found in zip(nodes, threads.map(ask, nodes), strict=True):
            host = text(row, "host")
            if isinstance(found, str):
                tried.silent.append((host, found))
                continue
            tried = tried._replace(pairs=tried.pairs + len(nodes) - 1)
            tried.failed.extend((host, hosts.get(node, node.hex()[:8]), why) for node, why in found)
    return tried


def _place(row: Document) -> FarNode:
    return FarNode(
        text(row, "host"), texts(row, "addresses"), bytes.fromhex(text(row, "fingerprint")),
        bytes.fromhex(text(row, "token")),
    )  # fmt: skip


def _newest(found: Holding | None, names: Iterable[FullName]) -> int | None:
    """The step of the newest one; starts are in the order of their promises."""
    if found is None:
        return None
    promises = {one.start: one.promise for one in found.offer.records}
    newest = max(
        names, key=lambda one: (promises.get(one.start, Promise()), one.name), default=None
    )
    return newest.name.step if newest is not None else None
