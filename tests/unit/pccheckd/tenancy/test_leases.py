"""What readers have opened stays until they close it or a new checkpoint needs the slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_wire.errors import NoCheckpointError
from pccheckd.tenancy.retention import Leases
from pccheckd.tenancy.volumes import Key
from tests.support.jobs import kept


class Volume:
    """Has checkpoints 1 to 5, of which it keeps 4 and 5 by itself."""

    def __init__(self) -> None:
        self.spared: set[int] = set()
        self.there = {1, 2, 3, 4, 5}

    def spare(self, sequence: int, spared: bool) -> None:
        if sequence not in self.there:
            raise FileNotFoundError(2, "recycled")
        (self.spared.add if spared else self.spared.discard)(sequence)

    def has_expendable(self) -> bool:
        return bool(self.there - self.spared - {4, 5})

    def recycle(self) -> None:
        self.there &= self.spared | {4, 5}


def made() -> tuple[Volume, Leases]:
    volume = Volume()
    item = SimpleNamespace(volume=volume, checkpoints=[kept(n) for n in range(1, 6)])
    volumes: Any = SimpleNamespace(key=Key(7, "gpt", 0), current=item, find=lambda _: item)
    return volume, Leases(volumes)


def test_a_lease_ends_with_the_last_of_its_sessions() -> None:
    volume, leases = made()
    leases.take(1, session=8)
    leases.take(1, session=9)
    leases.take(2, session=9)
    leases.give_back(8)
    assert volume.spared == {1, 2}
    leases.give_back(9)
    leases.give_back(9)
    assert volume.spared == set()


def test_what_was_recycled_meanwhile_is_not_leased() -> None:
    volume, leases = made()
    volume.there.remove(1)
    with pytest.raises(NoCheckpointError):
        leases.take(1, session=8)
    assert not leases.end_for_room()


def test_the_oldest_one_that_makes_room_ends_first() -> None:
    volume, leases = made()
    for sequence in (5, 3, 1):
        leases.take(sequence, session=8)
    volume.recycle()
    assert leases.end_for_room() and volume.spared == {3, 5}
    volume.recycle()
    assert leases.end_for_room() and volume.spared == {5}
    volume.recycle()
    assert not leases.end_for_room()  # it is kept anyway: its end would make no room
    assert volume.spared == {5}
    leases.give_back(8)


def test_a_volume_that_is_being_opened_again_is_leased_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volume, leases = made()

    def closed(*_: object) -> None:
        raise ValueError("this Volume is closed")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(volume, "spare", closed)
        leases.take(1, session=8)
    leases.renew()
    assert volume.spared == {1}


def test_leases_hold_in_a_volume_that_was_read_again() -> None:
    volume, leases = made()
    leases.take(1, session=8)
    leases.take(2, session=8)
    volume.spared.clear()
    volume.there.remove(2)  # its record was never durable
    leases.renew()
    assert volume.spared == {1}
