"""A job on several nodes, as people see it: `status`, metrics and warnings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from pccheck_native.nodes.facts import SaveName
from pccheck_native.nodes.lists import ListMember, listed
from pccheck_wire.basics import size_text
from pccheckd import VERSION

from .member import MemberPhase, NodeMember
from .view import Waited
from .wide import WideJob

#: So long the nodes may agree, or the store be silent, before somebody is told.
PATIENCE_S = 10.0

#: So long a node may not have begun to save what others have. Its ranks make the same steps.
BEHIND_S = 60.0

TORCH_STORE = "the process with the store (torchrun's agent, or rank 0)"

Document = dict[str, object]


class NodeRow(NamedTuple):
    """One node of the job."""

    host: str
    node: str  # the first digits of its random id
    ranks: tuple[int, ...]
    here: bool
    heard_s: float | None  # seconds since something of it was new; None: nothing was heard
    offered: SaveName | None  # the newest that it has on all its ranks
    known: SaveName | None  # the newest that it knows to be global
    waited: Waited | None  # what waits for it
    version: str  # of its daemon; "": not known since this daemon has restarted

    @property
    def waited_s(self) -> float:
        """For how long a checkpoint that other nodes have has waited for this node."""
        return time.monotonic() - self.waited.since_s if self.waited is not None else 0.0

    def document(self) -> Document:
        names = ("host", "node", "ranks", "here", "heard_s", "version")
        return {
            **{name: getattr(self, name) for name in names},
            "offered_step": self.offered.step if self.offered else None,
            "global_step": self.known.step if self.known else None,
            "waited_step": self.waited.name.step if self.waited else None,
            "waited_s": round(self.waited_s, 4),
        }


def rows(wide: WideJob) -> list[NodeRow]:
    """A row for each node, as far as this one knows them. Empty without a live process here."""
    member, start = wide.member, wide.start
    if member is None or start is None:
        return []
    if member.list is None:
        return [_row(wide, member, at, one) for at, one in enumerate(_calling(wide, member))]
    return [_row(wide, member, at, one) for at, one in enumerate(member.list.members)]


def _calling(wide: WideJob, member: NodeMember) -> Iterator[ListMember]:
    """The nodes of the launch that have said hello, this one first."""
    mine = wide.hello()
    newest = {wide.node: mine}
    for one in member.hellos:
        if one and one.kind == mine.kind:
            newest[one.node] = one
    for one in newest.values():
        yield ListMember(one.node, one.host, tuple(sorted(one.nonces)), ())


def _row(wide: WideJob, member: NodeMember, at: int, one: ListMember) -> NodeRow:
    view, here = member.view, one.node == wide.node
    have = view.haves[at] if at < len(view.haves) else None
    heard_s = view.heard_s.get(at)
    heard = None if heard_s is None else round(time.monotonic() - heard_s, 4)
    offered = max(have.offered, default=None) if have else None
    known = max(have.known, default=None) if have else None
    if here and (mine := wide.promising.mine) is not None:
        known = mine.newest
        offered = max(mine.offered, default=known)
    return NodeRow(
        one.host, one.node.hex()[:8], one.ranks, here, 0.0 if here else heard,
        max(filter(None, (offered, known)), default=None), known, view.waited_for(at),
        VERSION if here else _version(member, one.node),
    )  # fmt: skip


def _version(member: NodeMember, node: bytes) -> str:
    """As the newest hello of a node says."""
    said = [one.version for one in member.hellos if one is not None and one.node == node]
    return said[-1] if said else ""


def document(wide: WideJob) -> Document | None:
    """The job in the status document; None without a live process here."""
    member, start = wide.member, wide.start
    if member is None or start is None:
        return None
    running, globals_ = member.patient.operations - member.began_with, member.view.globals
    refused = member.refused
    return {
        "uid": wide.job.uid,
        "job": wide.job.name,
        "phase": member.phase.value,
        "refused": refused and {"message": refused.reason, "hint": refused.hint},
        "waits_for": member.missing,
        "waits_s": round(wide.waits_s, 4),
        "silent_s": round(silent_s(wide), 4),
        "silent_reason": member.patient.silent,
        "operations": member.patient.operations,
        "globals": globals_,
        "operations_per_global": round(running / globals_, 2) if globals_ else None,
        "nodes": [row.document() for row in rows(wide)],
    }


def silent_s(wide: WideJob) -> float:
    """For how long the store has not answered this node, which has live processes; 0.0: it does."""
    member = wide.member
    return member.patient.silent_s if member is not None and wide.start is not None else 0.0


def troubles(wide: WideJob) -> Iterator[str]:
    """What is wrong between the nodes, and what to do."""
    member = wide.member
    if member is None or wide.start is None:
        return
    if member.phase is MemberPhase.REFUSED and member.refused is not None:
        hint = f"; {member.refused.hint}" if member.refused.hint else ""
        yield f"this start is refused: {member.refused.reason}{hint}"
    elif (quiet_s := silent_s(wide)) > PATIENCE_S:
        why = member.patient.silent or "no answer"
        store, check = "the store of the job", TORCH_STORE
        if wide.carrier is not wide.voice:
            store, check = "etcd (--coordinator)", "etcd"
        yield (
            f"{store} has not answered for {quiet_s:.0f} s ({why}): this node still saves "
            f"checkpoints, but none becomes global; check that {check} runs, and that this node "
            "reaches it"
        )
    elif (waits_s := wide.waits_s) > PATIENCE_S:
        who = member.missing or "the other nodes were asked"
        yield (
            f"its nodes have not agreed for {waits_s:.0f} s, and no checkpoint is saved ({who}): "
            "start the ranks that are missing; if they run, see pccheckctl status on their nodes"
        )
    yield from _behind(member)


def _behind(member: NodeMember) -> Iterator[str]:
    """Nodes whose daemon has ended, or whose ranks save less. The member that decides knows."""
    if member.list is None or member.at:
        return
    for at, one in enumerate(member.list.members):
        late = member.view.not_begun(at)
        if late is not None and (late_s := time.monotonic() - late.since_s) > BEHIND_S:
            yield (
                f"host {one.host} ({listed(one.ranks)}) has not begun to save step "
                f"{late.name.step}, which other nodes have saved {late_s:.0f} s ago: without it "
                "no newer checkpoint becomes global; see pccheckctl status there, and its log"
            )


def notices(wide: WideJob) -> Iterator[str]:
    """Information; nothing is wrong."""
    if wide.start is not None and (text := wide.why_closed):
        yield text
    for tenant in wide.moved:
        size = size_text(sum(item.info.volume_bytes for item in tenant.volumes.open))
        yield (
            f"rank {tenant.key.rank} runs on another node now: its volume here ({size}) is deleted "
            f"when {tenant.engine.config.keep} newer checkpoints are global"
        )
