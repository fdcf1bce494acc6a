"""What the ranks of a start restore. Pure: no I/O, no clock.

One member decides with the offers of all members, writes the answer where only the first writer
succeeds, and every member takes what is written there. An answer that an offer repeats is the
answer: a rank may have restored it before the store, or the decider, was lost.

**Which start continues.** A start counts when its answer is recorded on some node. The top is the
start that no other one has seen. If two have not seen each other (a fork), the branch with a
checkpoint of its own continues; two such branches are refused. If not most of the top's members are
here, a newer start may have begun without this one, which is refused. (Half of the members are
enough, if the first one is among them.) As long as the top has no known global, this holds for the
starts before it, too. A start is also refused if another one may have begun with shards of nodes
here, of which none was a member.

**Which checkpoint of it.** Of its newest round, c: the newest that this start can restore. It need
not have been global: survivors use what they hold. m: the newest that every member here holds. g:
the newest known global. When m or g is newer than c, somebody may have been told that it is global:
refused. What a member here lacks, and what is newer than all that it holds, was never global.
Without c: what that round restored. Without that: nothing, if all members of the top are here and
no node holds a shard. A top that began with fresh=True hides nothing then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pccheck_native.group import Refused
from pccheck_native.nodes.disks import Disks, Lack
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.lists import Missing, StartList, joined, listed
from pccheck_native.nodes.offers import (
    NEWEST,
    SEEN_MAX,
    WARNING_MAX,
    WARNINGS_MAX,
    Offer,
    StartAnswer,
    StartRecord,
    Word,
)

ID_SHOWN = 12  # hex digits of a start's id that a user types
STEPS_SHOWN = 8
FRESH = "fresh=True begins without a checkpoint"


def absent(
    offers: Collection[Offer], found: StartList, waits_s: float, round_: int = 0
) -> Missing | None:
    """Which members have not offered; None: all have, and the round can be decided."""
    wanted = found.promise, round_
    came = {offer.node for offer in offers if (offer.promise, offer.round) == wanted}
    lacking = [member for member in found.members if member.node not in came]
    if not lacking:
        return None
    names = joined([f"{found.name(one)} ({listed(one.ranks)})" for one in lacking])
    return Missing(
        f"{names} offered nothing for {waits_s:.0f} s: no rank there has called restore() or "
        "checkpoint(), or its daemon cannot be reached",
        "call restore() on all ranks; check that daemon (`pccheckctl doctor` on its node)",
    )


def decide(
    offers: Sequence[Offer], found: StartList, round_: int = 0, *, travel: bool = False
) -> StartAnswer | Refused:
    """The answer to a start, in a round of it. `travel`: nodes can read shards of other nodes.
    Raises ValueError if a member has not offered."""
    if absent(offers, found, 0, round_):
        raise ValueError("all members of a start must have offered")
    again = {
        answer
        for offer in offers
        for answer in offer.answers
        if (answer.start, answer.round) == (found.start, round_)
    }
    if len(again) == 1:
        return again.pop()
    if again:
        return Refused(
            f"nodes remember {len(again)} answers to one start ({_steps(again)})",
            "start the job again",
        )
    nodes = {member.node for member in found.members}
    members = [offer for offer in offers if offer.node in nodes]
    word = _one_word(members, found)
    if isinstance(word, Refused):
        return word
    return _Decision(Disks(offers, found, travel=travel), found, round_, word).make()


class _Decision:
    """One start, one round."""

    def __init__(self, disks: Disks, found: StartList, round_: int, word: Word) -> None:
        self._disks, self._found, self._round, self._word = disks, found, round_, word
        self._warnings: list[str] = []
        self._without: set[bytes] = set()
        self._hides_nothing: set[bytes] = set()  # starts that began fresh and saved nothing

    def make(self) -> StartAnswer | Refused:
        if self._word.fresh:
            return self._answer(None)
        if refused := self._leave_out():
            return refused
        while True:
            top = self._top()
            if top is None:
                return self._answer(None)
            if isinstance(top, Refused):
                return top
            refusals = map(self._most_are_here, self._not_replaced(top))
            if refused := next(filter(None, refusals), None):
                return refused
            chosen = self._of_step(top) if self._word.step is not None else self._of_top(top)
            if top.start not in self._hides_nothing:
                return chosen if isinstance(chosen, Refused) else self._answer(chosen)

    def _answer(self, restored: FullName | None) -> StartAnswer:
        own = self._found.start
        seen: dict[bytes, None] = {}
        records = self._disks.records.values()
        for record in sorted(records, key=lambda one: one.promise, reverse=True):
            seen |= dict.fromkeys((record.start, *record.seen))
        seen.pop(own, None)
        if self._round:
            seen = dict.fromkeys(self._disks.records[own].seen)
        older = tuple(seen)[:SEEN_MAX]
        warnings = tuple(one[:WARNING_MAX] for one in self._warnings[:WARNINGS_MAX])
        return StartAnswer(own, self._round, restored, older, self._word, warnings)

    # -- which start -------------------------------------------------------------------------

    def _leave_out(self) -> Refused | None:
        """The nodes that the user's word leaves out."""
        lists = [record.who for record in self._disks.records.values()]
        for name in self._word.without:
            nodes = {
                member.node
                for saved in lists
                for member in saved.members
                if name == member.host or (len(name) >= 8 and member.node.hex().startswith(name))
            }
            # A node with a new disk has a new id; one that has dropped the job remembers nothing.
            away = {node for node in nodes if not self._disks.remembers(node)}
            if not nodes:
                # Nothing needs that node any more, or the refusal that follows names the right one.
                hosts = {member.host for saved in lists for member in saved.members}
                self._warnings.append(
                    f"without={name!r} names no node of this job; its nodes are "
                    f"{joined(sorted(hosts)) or 'not known'}"
                )
            elif not away:
                return Refused(
                    f"without={name!r} names a node that is here",
                    "leave it out, or start the job without that node",
                )
            self._without |= away
        return None

    def _top(self) -> StartRecord | Refused | None:
        """The start that goes on; None: there is none, and no checkpoint."""
        records, own = self._disks.records, self._found.start
        if self._round:
            if own not in records or not records[own].born:
                raise ValueError("a round follows the first answer of its start")
            return records[own]
        pool = self._pool()
        if not pool:
            if self._disks.holds_any or self._disks.known:
                return Refused(
                    f"there are checkpoints ({self._seen_steps()}), and no node here has the "
                    "record of a start that saved or restored them",
                    f"start the job with the nodes that ran it before; {FRESH}",
                )
            return None
        if refused := self._may_have_begun(pool):
            return refused
        tops = [one for one in pool if not any(one.start in other.seen for other in pool)] or pool
        if self._word.start and self._word.start != NEWEST:
            # torchrun may start the job again with the same word: the start behind it continues.
            again = [one for one in tops if one.word.start == self._word.start]
            return again[0] if len(tops) == len(again) == 1 else self._named(pool)
        branches = [one for one in tops if self._has_own(one)] or self._newest_restored(tops)
        if len(branches) == 1:
            return branches[0]
        return self._fork(branches)

    def _pool(self) -> list[StartRecord]:
        """The starts that count."""
        hidden = {self._found.start, *self._hides_nothing}
        records = self._disks.records.values()
        return [one for one in records if one.born and one.start not in hidden]

    def _may_have_begun(self, pool: Sequence[StartRecord]) -> Refused | None:
        """A start that got no answer on any node here. If one of its members is here, the start
        never becomes complete: that member has promised to this one, which has a higher number. If
        none is, the nodes here only gave it their shards, and cannot know."""
        seen = {start for one in pool for start in one.seen}
        for record in self._disks.records.values():
            members = [one for one in record.who.members if one.node not in self._without]
            if record.born or record.start in {self._found.start, *seen} or not members:
                continue
            if not any(one.node in self._disks.hosts for one in members):
                names = joined([record.who.name(one) for one in members])
                gave = joined(self._disks.promised_to(record.start))
                return Refused(
                    f"a start began on {names}, to which {gave} gave checkpoints, and it may have "
                    "continued: none of its nodes is here",
                    f"start the job on {names} too; if they will not come back, "
                    f"restore(without={_typed_hosts([one.host for one in members])}) "
                    "continues without the checkpoints that only these nodes have",
                )
        return None

    def _named(self, pool: Sequence[StartRecord]) -> StartRecord | Refused:
        found = [one for one in pool if one.start.hex().startswith(self._word.start.lower())]
        if len(found) == 1:
            return found[0]
        known = joined([f"{_id(one)} ({self._steps_of(one)})" for one in pool[:STEPS_SHOWN]])
        what = "no start" if not found else f"{len(found)} starts"
        return Refused(
            f"start={self._word.start!r} names {what} of this job",
            f"the nodes here know {known}",
        )

    def _has_own(self, record: StartRecord) -> bool:
        """It has saved what somebody may go on from: the user must not lose it unasked."""
        names = (FullName(record.start, name) for name in self._disks.names(record.start))
        return any(
            one in self._disks.known or not self._disks.lacks(one, travel=True) for one in names
        )

    def _newest_restored(self, tops: list[StartRecord]) -> list[StartRecord]:
        """Of starts that saved nothing: the one that restored the newest checkpoint."""
        best = [
            one
            for one in tops
            if not any(self._is_newer(other.restored[-1][1], one.restored[-1][1]) for other in tops)
        ]
        if len({one.restored[-1][1] for one in best}) == 1:
            return [max(best, key=lambda one: one.promise)]
        return best

    def _is_newer(self, one: FullName | None, other: FullName | None) -> bool:
        if one is None or other is None:
            return one is not None and other is None
        if one.start == other.start:
            return one.name > other.name
        record = self._disks.records.get(one.start)
        return record is not None and other.start in record.seen

    def _fork(self, branches: Sequence[StartRecord]) -> StartRecord | Refused:
        by_number = sorted(branches, key=lambda one: one.promise)
        texts = [
            f"{_id(one)} ({joined([f'host {member.host}' for member in one.who.members[:4]])}: "
            f"{self._steps_of(one)})"
            for one in by_number
        ]
        apart = f"the starts {joined(texts)} ran apart, and neither knew of the other"
        if self._word.start == NEWEST:
            newest = by_number[-1]
            self._warnings.append(f"{apart}: going on from {_id(newest)}, as start='newest' says")
            return newest
        words = " or ".join(f"restore(start={_id(one)!r})" for one in by_number)
        return Refused(
            apart, f"choose the one that goes on: {words}; what the other saved is given up then"
        )

    def _not_replaced(self, top: StartRecord) -> list[StartRecord]:
        """The top, and the starts before it back to one that has a known global: that one began on
        all its nodes. Of another one a node may be left that a newer start has displaced."""
        chain = [top, *(one for one in self._pool() if one.start in top.seen)]
        began = {one.start for one in self._disks.known}
        older = {start for one in chain if one.start in began for start in one.seen}
        return [one for one in chain if one.start not in older]

    def _most_are_here(self, top: StartRecord) -> Refused | None:
        members = [one for one in top.who.members if one.node not in self._without]
        there = self._disks.here(top)
        here = [one for one in members if one in there]
        away = [one for one in members if one not in there]
        first = bool(members) and members[0] in here
        if 2 * len(here) > len(members) or (2 * len(here) == len(members) and first) or not members:
            return None
        names = [top.who.name(one) for one in away]
        if all(one.node in self._disks.hosts for one in away):
            return Refused(
                f"{joined(names)} ran this job last, and the job is not there any more: it was "
                "dropped there, or its files were removed",
                "pccheckctl drop on the other nodes, too, lets the job begin anew; "
                f"{_go_on_without([one.host for one in away])}",
            )
        other = [f"host {one.host}" for one in away if self._disks.has_other_storage(one, top.who)]
        counts = f" (another storage directory makes {joined(other)} another node)"
        return Refused(
            f"{len(here)} of the {len(members)} nodes that ran this job last are here, and "
            f"{joined(names)} {'is' if len(away) == 1 else 'are'} not{counts if other else ''}: "
            "they may have continued without these nodes",
            f"start the job on {joined(names)} too; if "
            f"{'it' if len(away) == 1 else 'they'} will not come back, "
            f"{_go_on_without([one.host for one in away])}",
        )

    # -- which checkpoint --------------------------------------------------------------------

    def _of_top(self, top: StartRecord) -> FullName | Refused | None:
        """A round is like a start: what it saved is newer than what it restored."""
        last, _ = top.restored[-1]
        names = [name for name in self._disks.names(top.start) if name.base >= last]
        own = [FullName(top.start, name) for name in names]
        whole = next((one for one in own if not self._disks.lacks(one)), None)
        here = self._disks.here(top)
        for one in own:
            if one == whole:
                return whole
            by_all = bool(here) and all(self._disks.has_own(one, member) for member in here)
            counts = one in self._disks.known or by_all
            if counts and (refused := self._must_not_lose(top, one, whole)):
                return refused
        return self._restored_by(top)

    def _must_not_lose(
        self, top: StartRecord, one: FullName, whole: FullName | None
    ) -> Refused | None:
        """It is, or may be, global, and this start cannot restore it."""
        lacks, older = self._disks.lacks(one), whole or self._newest_before(top)
        what = "is" if one in self._disks.known else "may be"
        text = (
            f"step {one.name.step} {what} global, and cannot be restored: {self._disks.why(lacks)}"
        )
        if all(lack.kind == "damaged" or lack.node in self._without for lack in lacks):
            self._warnings.append(f"{text}; going on from an older checkpoint")
            return None
        return Refused(text, _way_out(self._disks, lacks, older, self._word))

    def _newest_before(self, top: StartRecord) -> FullName | None:
        """Of the starts before the top: the newest that can be restored."""
        found = [
            one
            for one in self._disks.checkpoints
            if one.start in top.seen and not self._disks.lacks(one)
        ]
        newest = [one for one in found if not any(self._is_newer(two, one) for two in found)]
        return newest[0] if len(newest) == 1 else None

    def _restored_by(self, top: StartRecord) -> FullName | Refused | None:
        """What the top restored, when nothing that it saved then can be restored."""
        own = self._disks.names(top.start)
        _, restored = top.restored[-1]
        if restored is not None:
            if lacks := self._disks.lacks(restored):
                return Refused(
                    f"the job continued from step {restored.name.step}, and that cannot be "
                    f"restored: {self._disks.why(lacks)}",
                    _way_out(self._disks, lacks, self._newest_before(top), self._word),
                )
            return restored
        away = [one for one in top.who.members if one not in self._disks.here(top)]
        if [one for one in away if one.node not in self._without]:
            return Refused(
                "no checkpoint can be restored, and not all nodes that ran this job last are here: "
                f"{joined([top.who.name(one) for one in away])} may have one",
                f"start the job on these nodes too; {_go_on_without([one.host for one in away])}; "
                f"{FRESH}",
            )
        is_last = self._round or self._word.start or len(self._pool()) == 1
        # One node alone may have begun from anything: it has a record since it saved.
        if (top.word.fresh or len(top.who.members) == 1) and not is_last:
            how = "began with fresh=True and " if top.word.fresh else ""
            self._hides_nothing.add(top.start)
            self._warnings.append(
                f"the start {_id(top)} {how}left no checkpoint that all ranks have: going on from "
                f"the start before it; {FRESH}{' again' if top.word.fresh else ''}"
            )
            return None
        if self._disks.holds_any:
            lacks = self._disks.lacks(FullName(top.start, own[0])) if own else []
            why = f": {self._disks.why(lacks)}" if lacks else ""
            return Refused(
                f"there are checkpoints ({self._seen_steps()}), and none can be restored{why}",
                _way_out(self._disks, lacks, None, self._word),
            )
        return None

    def _of_step(self, top: StartRecord) -> FullName | Refused:
        """The checkpoint of the step that the user named: of the top, else of the newest start."""
        step = self._word.step
        every = [one for one in self._disks.checkpoints if one.name.step == step]
        found = [one for one in every if not self._disks.lacks(one)]
        if own := [one for one in found if one.start == top.start]:
            return max(own)
        older = [one for one in found if one.start in top.seen]
        newest = [one for one in older if not any(self._is_newer(two, one) for two in older)]
        if len(newest) == 1:
            return newest[0]
        if newest:
            starts = joined([one.start.hex()[:ID_SHOWN] for one in sorted(newest)])
            return Refused(
                f"the starts {starts} ran apart, and each has saved step {step}",
                "name the start too: restore(step=..., start=...)",
            )
        lacks = self._disks.lacks(every[0]) if every else []
        why = f": {self._disks.why(lacks)}" if lacks else ""
        return Refused(
            f"step {step} cannot be restored on all nodes{why}",
            f"the nodes here hold {self._seen_steps()}",
        )

    # -- words -------------------------------------------------------------------------------

    def _seen_steps(self) -> str:
        return _steps_of(one.name.step for one in self._disks.checkpoints)

    def _steps_of(self, record: StartRecord) -> str:
        return _steps_of(name.step for name in self._disks.names(record.start))


def _one_word(members: Sequence[Offer], found: StartList) -> Word | Refused:
    """What the users of all members said; nodes that one of them leaves out are left out."""
    first = members[0]
    for other in members:
        if other.word._replace(without=()) != first.word._replace(without=()):
            return Refused(
                f"host {first.host} wants restore({_typed(first.word)}), and host {other.host} "
                f"wants restore({_typed(other.word)})",
                "give restore() the same arguments, and every client the same fresh=, on all ranks",
            )
    without = {name for one in members for name in one.word.without}
    return first.word._replace(without=tuple(sorted(without)))


def _typed(word: Word) -> str:
    said = {"step": word.step, "start": word.start or None, "fresh": word.fresh or None}
    return ", ".join(f"{key}={value!r}" for key, value in said.items() if value is not None)


def _typed_hosts(hosts: Sequence[str]) -> str:
    if len(hosts) > STEPS_SHOWN:
        return "[...]"
    return repr(hosts[0]) if len(hosts) == 1 else repr([*hosts])


def _go_on_without(hosts: Sequence[str]) -> str:
    return (
        f"restore(without={_typed_hosts(hosts)}) continues without the checkpoints that only the "
        "missing nodes have"
    )


def _hosts(lacks: Sequence[Lack], kind: str) -> list[str]:
    """The host names of what lacks in that way."""
    found = {lack.host.removeprefix("host ").split(" (")[0] for lack in lacks if lack.kind == kind}
    return sorted(found)


def _way_out(disks: Disks, lacks: Sequence[Lack], whole: FullName | None, word: Word) -> str:
    """What to type."""
    ways = []
    kinds = {lack.kind for lack in lacks}
    away, other = _hosts(lacks, "away"), _hosts(lacks, "other storage")
    if away:
        ways.append(f"start the job on {joined([f'host {host}' for host in away])} too")
    if other:
        names = joined([f"host {host}" for host in other])
        ways.append(f"start pccheckd on {names} with the earlier storage directory")
    if whole and (away or other):
        ways.append(_go_on_without(sorted(away + other)))
    moved = [lack for lack in lacks if lack.kind == "moved"]
    if moved:
        ways.append(f"start {listed([moved[0].part])} on {moved[0].host}")
    if "size" in kinds:
        ways.append(f"start the job with {next(one.host for one in lacks if one.kind == 'size')}")
    if "no copy" in kinds:
        holders = next(one.host for one in lacks if one.kind == "no copy")
        ways.append(f"start the job on {holders} only, which has a copy")
    if disks.silent and kinds & {"moved", "no copy", "size"}:
        ways.append(
            f"start pccheckd with --listen on {joined(disks.silent)}: then each node reads what it "
            f"lacks from the others{' (replicated state and DTensors)' if 'size' in kinds else ''}"
        )
    if whole:
        typed = _typed(Word(whole.name.step, word.start))
        ways.append(f"restore({typed}) goes back to step {whole.name.step}")
    ways.append(FRESH)
    return "; ".join(ways)


def _steps(answers: Collection[StartAnswer]) -> str:
    return _steps_of(one.restored.name.step for one in answers if one.restored) or "nothing"


def _steps_of(steps: Iterable[int]) -> str:
    found = sorted(set(steps), reverse=True)
    if not found:
        return "no step"
    shown = joined([str(step) for step in found[:STEPS_SHOWN]])
    more = ", and older ones" if len(found) > STEPS_SHOWN else ""
    return f"{'step' if len(found) == 1 else 'steps'} {shown}{more}"


def _id(record: StartRecord) -> str:
    return record.start.hex()[:ID_SHOWN]
