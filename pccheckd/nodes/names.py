"""The names that nodes use for checkpoints, and the sequences that this node gave them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from pccheck_native import _core, catalog
from pccheck_native.nodes.facts import FullName, SaveName
from pccheckd.group.job import Job
from pccheckd.tenancy.tenant import Tenant

#: Names that are remembered beside those of what is there: facts about them may come late.
KEPT = 256


class Names:
    """Owned by the wide job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sequences: dict[FullName, int] = {}
        self._names: dict[int, FullName] = {}

    def sequence(self, full: FullName) -> int | None:
        return self._sequences.get(full)

    def take(self, start: bytes, sequence: int) -> FullName | None:
        """A rank was just given this sequence; its name, which is remembered from now on."""
        name = self._job.members.numbering.name_of(sequence)
        if name is None:
            return None
        full = FullName(start, SaveName(*name[1:]))
        self._learn(full, sequence)
        return full

    def sequence_or_new(self, full: FullName) -> int:
        """Its sequence; a new one for a checkpoint that only other nodes hold."""
        sequence = self._sequences.get(full)
        if sequence is None:
            numbering = self._job.members.numbering
            sequence = numbering.last + 1
            numbering.passed(sequence)
            self._learn(full, sequence)
        return sequence

    def of(self, start: bytes, sequences: Iterable[int]) -> set[SaveName]:
        """The names of those sequences that are checkpoints of a start."""
        found = map(self._names.get, sequences)
        return {full.name for full in found if full is not None and full.start == start}

    def every(self) -> Iterator[tuple[Tenant, catalog.StoredCheckpoint, FullName]]:
        """What the volumes hold of wide starts."""
        for tenant in self._job.tenants.values():
            for one in tenant.volumes.checkpoints():
                full = self._names.get(one.id.sequence)
                if full is not None and full.start == one.id.start:
                    yield tenant, one, full

    async def see(self, known: Collection[bytes], call: Callable[..., Any]) -> None:
        """Learns the names of what the volumes hold of these starts; `call` blocks in a thread."""
        for tenant in self._job.tenants.values():
            for item in tenant.volumes.open:
                for one in item.checkpoints:
                    if one.id.start not in known or one.id.sequence in self._names:
                        continue
                    try:
                        name = await call(item.name, one)
                    except (OSError, ValueError, _core.NativeError):
                        continue  # it cannot be read, so it does not count
                    self._learn(FullName(one.id.start, SaveName(*name)), one.id.sequence)

    def forget(self, kept: Iterable[FullName]) -> set[int]:
        """Forgets the oldest names of what is not there any more, but `kept`. Returns the sequences
        that are remembered."""
        if len(self._names) > 2 * KEPT:
            there = {self._sequences[full] for full in kept if full in self._sequences}
            for tenant in self._job.tenants.values():
                there |= tenant.volumes.sequences() | set(tenant.ledger.pending())
            for sequence in sorted(self._names.keys() - there)[:-KEPT]:
                del self._sequences[self._names.pop(sequence)]
        return set(self._names)

    def _learn(self, full: FullName, sequence: int) -> None:
        before = self._names.get(sequence)  # a volume was away when the sequence was given out
        if before is not None:
            self._sequences.pop(before, None)
        self._names.pop(self._sequences.get(full, 0), None)
        self._sequences[full], self._names[sequence] = sequence, full
