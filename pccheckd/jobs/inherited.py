"""What outlives the daemon: the service manager's descriptor store, and recovering from it what a
killed daemon had copied and not written (systemd: FileDescriptorStoreMax=)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from pccheck_native import _core
from pccheck_wire.messages import JOB_PATTERN
from pccheckd.base.logs import LOG
from pccheckd.tenancy.volumes import Key

FDS_MAX = 1 << 16
_NAME = re.compile(r"(pccheck-[0-9a-f]{16})-(segment|state)-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A stored descriptor. The C core chose its name (pcc_pool.h)."""

    fd: int
    name: str

    @property
    def parts(self) -> tuple[str, str, int]:
        """Label, kind and id; empty for a name of another kind."""
        found = _NAME.fullmatch(self.name)
        return (found[1], found[2], int(found[3], 16)) if found else ("", "", 0)


@dataclass(slots=True)
class StoredState:
    """A state memfd and its contents."""

    descriptor: Descriptor
    id: int
    says: _core.KeptState


@dataclass(slots=True)
class Left:
    """What a killed daemon has left of one tenant."""

    states: list[StoredState] = field(default_factory=list)
    segments: dict[int, Descriptor] = field(default_factory=dict)

    def segments_by_need(self) -> list[int]:
        """Segments that hold a copied checkpoint, those of the newest one first, since the budget
        may be smaller now. The others hold nothing, and a trainer may still write to them."""
        copied = sorted((one for state in self.states for one in state.says.copied), reverse=True,
                        key=lambda one: one[0])  # fmt: skip
        needed = [number for _, numbers in copied for number in sorted(numbers)]
        return [number for number in dict.fromkeys(needed) if number in self.segments]


@dataclass(slots=True)
class Summary:
    """For the status: what this daemon took over when it started."""

    segments: int = 0
    nbytes: int = 0
    checkpoints: int = 0
    dropped: list[tuple[Key, str]] = field(default_factory=list)


def take(given: list[tuple[str, int]]) -> list[Descriptor]:
    """Takes the descriptors from the service manager that activation.py left: usable or not, this
    process owns them from now on."""
    found = [Descriptor(number, name) for name, number in given]
    given.clear()
    return found


def store_of(environ: MutableMapping[str, str], found: list[Descriptor]) -> tuple[str, int]:
    """The notify socket and the store's capacity; ("", 0) without a store. A manager that returned
    descriptors has a store, even if it is too old to set $FDSTORE (systemd 254)."""
    address, limit = environ.get("NOTIFY_SOCKET", ""), environ.get("FDSTORE", "")
    most = int(limit) if limit.isdecimal() else len(found)
    return (address, min(most, FDS_MAX)) if address and most else ("", 0)


def sort(found: list[Descriptor]) -> tuple[dict[Key, Left], list[Descriptor]]:
    """The descriptors of each tenant, and those of no use. Blocks: maps the state memfds."""
    labels: dict[str, Key] = {}
    left: dict[Key, Left] = {}
    useless: list[Descriptor] = []
    seen: set[str] = set()
    segments = []
    for item in found:
        label, kind, number = item.parts
        if not label or item.name in seen:
            useless.append(item)
        elif kind == "segment":
            segments.append(item)
        elif (says := _read(item)) is not None and (key := _key(says, label)) is not None:
            labels[label] = key
            left.setdefault(key, Left()).states.append(StoredState(item, number, says))
        else:
            useless.append(item)
        seen.add(item.name)
    for item in segments:
        label, _, number = item.parts
        if label in labels:
            left[labels[label]].segments[number] = item
        else:
            useless.append(item)
    for key in [key for key, one in left.items() if not any(s.says.copied for s in one.states)]:
        gone = left.pop(key)  # all of it was durable
        useless += [*gone.segments.values(), *(state.descriptor for state in gone.states)]
    return left, useless


def close(item: Descriptor, pool: _core.Pool) -> None:
    """Closes an unused descriptor, here and in the store."""
    with contextlib.suppress(OSError):
        os.close(item.fd)
    if item.name.isprintable() and item.name.isascii() and 0 < len(item.name) <= 255:
        pool.unstore(item.name)


def _read(item: Descriptor) -> _core.KeptState | None:
    try:
        return _core.kept_state(item.fd)
    except (OSError, UnicodeError, _core.NativeError) as error:
        LOG.warning("the stored descriptor %s cannot be used: %s", item.name, error)
        return None


def _key(says: _core.KeptState, label: str) -> Key | None:
    key = Key(says.uid, says.job, says.rank)
    return key if re.fullmatch(JOB_PATTERN, says.job) and key.label == label else None
