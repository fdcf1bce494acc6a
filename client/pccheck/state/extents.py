"""Views on memory -> extents of the payload, and where the bytes of each extent come from.

    payload = [GPU 0: gated, volatile][zeros][GPU 1 ...][zeros][GPU 0: pushed][zeros]...
              [host gated][host volatile][tree]

A chunk is filled from one side only, hence the zeros: every GPU's section starts at a chunk and
ends with one. Within a section extents ascend by address, so that neighbours in memory are
neighbours in the payload and are copied as one. Small neighbours with a gap between them keep their
distance, and the gap is copied with them. What is frozen comes first among what is gated: between
tensors that train it would share blocks with them, and be written again with each checkpoint.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pccheck_wire import tree
from pccheck_wire.errors import UnsupportedStateError
from pccheck_wire.tree import ITEM_BYTES

from .devices import HOST

#: Extents start at multiples of this within the payload, and in a replica (PCC_REPLICA_ALIGN).
EXTENT_ALIGN = 64
#: Closer than this, extents on a GPU keep their distance in the payload (PCC_EXPOSED_GAP_MAX):
#: torch rounds every tensor up to it, and a copy for each of many small ones takes far longer.
GAP_MAX = 512
#: Up to this much host memory is copied at once beside GPU tensors (counters of optimizers), or of
#: state dicts that are called every time, so that no gate waits for it on the CPU.
INLINE_BYTES_MAX = 256 << 10
#: A range on a GPU, as the native client takes it; the last number is reserved.
_ON_DEVICE = struct.Struct("<QQQII")


@dataclass(slots=True)
class View:
    """A tensor or an array: where its bytes are, and the node that records that."""

    path: str
    node: tree.Tensor | tree.Array
    address: int
    nbytes: int
    storage: int  # address of the memory that it is a view on
    owner: object  # keeps that memory
    volatile: bool = False
    device: int = HOST  # CUDA ordinal of the GPU that the memory is on
    shared: bool = False  # every rank has the same: with Shape.world_size one of them stores it
    sharded: bool = False  # the local part of a DTensor, which each rank stores itself
    tensor: torch.Tensor | None = None  # whose in-place changes torch counts
    number: int = 0  # of its appearance in the state
    loose: str = ""  # read in place as a frozen parameter of the attached thing of that name
    frozen: bool = False  # of a parameter that does not train, and is not in an optimizer
    constant: bool = False  # cannot change, ever


class Range(NamedTuple):
    """Payload [offset, offset + nbytes) lies at `address`; as the native client packs them."""

    address: int
    offset: int
    nbytes: int


class Shape(NamedTuple):
    """What the device part is laid out for."""

    chunk_bytes: int = 1 << 20  # of the session's page
    aside: bool = False  # snapshot="device": what is gated is staged, too, beside training
    rank: int = 0  # among those that divide replicated state
    world_size: int = 0  # of replicated state: shared views are divided among this many ranks ...
    first: int = 0  # ... and the first of them has this number in the job
    pushed: frozenset[int] = frozenset()  # addresses of GPU memory that the daemon cannot map
    replica: bool = False  # all replicated state is exposed, for other ranks


IN_PLACE = Shape()


def pack(ranges: Iterable[Range]) -> bytes:
    return b"".join(struct.pack("<QQQ", *item) for item in ranges)


def pack_device(ranges: Iterable[Range], device: int) -> bytes:
    return b"".join(_ON_DEVICE.pack(*item, device, 0) for item in ranges)


def unpack_device(packed: bytes) -> Iterator[tuple[Range, int]]:
    """Each range, and its GPU."""
    for address, offset, nbytes, device, _ in _ON_DEVICE.iter_unpack(packed):
        yield Range(address, offset, nbytes), device


@dataclass(slots=True)
class Replica:
    """Replicated state on GPUs, in a space where it has the same places on all ranks that divide
    it. When the GPU of a rank cannot be read any more, the daemon reads the rank's shares from the
    GPU of another rank."""

    id: int = 0  # of that space; 0: this rank exposes no replica
    ranges: bytes = b""  # packed device ranges; offsets are within that space
    shares: bytes = b""  # packed ranges of this rank's payload; addresses are within that space
    owners: list[object] = field(default_factory=list, compare=False)  # keep the memory


@dataclass(slots=True)
class Section:
    """What lies on one GPU. Staged ranges are first copied on the device, to where the payload's
    order has them: staging memory mirrors the payload from `staging_start` on."""

    device: int
    in_place: list[Range] = field(default_factory=list)
    aside: list[Range] = field(default_factory=list)  # staged on a stream of the core
    staged: list[Range] = field(default_factory=list)  # staged on the trainer's stream

    @property
    def staging_start(self) -> int:
        return min((item.offset for item in (*self.aside, *self.staged)), default=0)

    @property
    def staging_bytes(self) -> int:
        ends = (item.offset + item.nbytes for item in (*self.aside, *self.staged))
        return max(ends, default=0) - self.staging_start

    def copies(self, ranges: list[Range]) -> bytes:
        """For Client.stage: offsets count from where staging starts."""
        start = self.staging_start
        return pack(Range(item.address, item.offset - start, item.nbytes) for item in ranges)

    def tensors(self) -> list[Range]:
        """Where the bytes are before anything was staged, in the payload's order."""
        return [*self.in_place, *self.aside, *self.staged]

    def sources(self, staging: int) -> list[Range]:
        """Where the bytes are once everything was staged, at the address `staging`. What is there
        is one range: elsewhere neighbours may be of two allocations, which no copy may span."""
        nbytes = self.staging_bytes
        moved = [Range(staging, self.staging_start, nbytes)] if nbytes else []
        return [*self.in_place, *moved]


class DevicePart:
    """The sections of all GPUs; payload [0, nbytes). The daemon can pull what is before
    `pulled_bytes`; what follows, `rest`, lies in memory that it cannot map. Nothing changes."""

    def __init__(
        self, sections: list[Section], nbytes: int, owners: list[object], *, all_staged: bool,
        rest: list[Section] | None = None, pulled_bytes: int | None = None,
        replica: Replica | None = None,
    ) -> None:  # fmt: skip
        self.nbytes = nbytes
        self.pulled_bytes = nbytes if pulled_bytes is None else pulled_bytes
        self.owners = owners  #: keep the memory
        self.replica = replica or Replica()
        self.all_staged = all_staged
        self.pulled = tuple(section.device for section in sections)
        self.pushed = tuple(section.device for section in rest or ())
        self.devices = tuple(sorted({*self.pulled, *self.pushed}))
        self.mask = sum(1 << device for device in self.pulled)
        self.rest = b"".join(pack_device(one.in_place, one.device) for one in rest or ())
        self.staging_bytes = {s.device: s.staging_bytes for s in sections if s.staging_bytes}
        self.staged = {s.device: s.copies(s.staged) for s in sections if s.staged}
        self.aside = {s.device: s.copies(s.aside) for s in sections if s.aside}
        #: Packed device ranges of everything, where it is before anything was staged.
        self.unstaged = b"".join(
            pack_device((r for r in s.tensors() if r.nbytes), s.device)
            for s in (*sections, *(rest or ()))
        )
        self._sections = sections
        self._packed: tuple[Mapping[int, int], bytes] | None = None

    def ranges(self, staging: Mapping[int, int]) -> bytes:
        """Packed device ranges, but for `rest`, with staging memory at these addresses by GPU."""
        if self._packed is None or self._packed[0] != staging:
            packed = b"".join(
                pack_device(section.sources(staging.get(section.device, 0)), section.device)
                for section in self._sections
            )
            self._packed = (dict(staging), packed)
        return self._packed[1]


@dataclass(slots=True)
class Layout:
    """Extents for a set of views; host ranges that the gate protects, and volatile ones."""

    extents: list[tree.Extent] = field(default_factory=list)
    gated: list[Range] = field(default_factory=list)
    volatile: list[Range] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)
    device: DevicePart | None = None
    end: int = 0
    frozen: int = 0  # bytes of frozen extents
    division: int = 0  # the same on ranks that divide the same among them; 0: nothing is divided
    divided: list[tuple[_Group, int]] = field(default_factory=list)  # with places in the replica
    replica_id: int = 0  # see Replica

    @property
    def is_small(self) -> bool:
        """Whether so little host memory is gated that it is copied at once where that helps."""
        return sum(item.nbytes for item in self.gated) <= INLINE_BYTES_MAX

    @property
    def inline(self) -> bool:
        """Whether no host memory is to be read later, because that of GPUs is."""
        return self.device is not None and self.is_small

    def packed(self, *, inline: bool) -> tuple[bytes, bytes]:
        """Host ranges that are read later, and those that are copied at once: all if `inline`."""
        gated, volatile = pack(self.gated), pack(self.volatile)
        return (b"", gated + volatile) if inline else (gated, volatile)


class _Group(NamedTuple):
    """Views that share memory: one extent."""

    volatile: bool
    trains: bool  # unless all of it is frozen
    first: int  # where the first of them is in the state
    views: list[View]  # by ascending address
    nbytes: int

    @property
    def is_shared(self) -> bool:
        return all(view.shared for view in self.views)


def lay_out(
    views: list[View], shape: Shape = IN_PLACE, *, start: int = 0, first_extent: int = 0
) -> Layout:
    """Gives every view its extent (numbered from `first_extent`) and its place in it.

    Views that overlap in memory, or touch within one storage, share an extent, so that aliases
    survive. On the host the order is that of first appearance in the state: equal states give
    equal payloads. GPU views need start=0.
    """
    layout = Layout(end=start)
    by_device: dict[int, list[View]] = {}
    for number, view in enumerate(views):
        view.number = number
        by_device.setdefault(view.device, []).append(view)
    groups = {device: _groups(some) for device, some in by_device.items()}
    if shape.world_size:
        groups = _divide(layout, groups, shape, first_extent)
    host = groups.pop(HOST, [])
    if groups:
        assert start == 0
        _lay_out_devices(layout, groups, shape)
    for group in sorted(host, key=lambda group: group[:3]):
        placed = _place(layout, group, first_extent, shape)
        (layout.volatile if group.volatile else layout.gated).append(placed)
        layout.owners.extend(view.owner for view in group.views)
    return layout


def _divide(
    layout: Layout, groups: dict[int, list[_Group]], shape: Shape, first_extent: int
) -> dict[int, list[_Group]]:
    """Divides what every rank has among the ranks, by size, in the same way on each of them, and
    what trains evenly in itself: what is frozen is written once. Returns this rank's part; the
    others' extents get no bytes here."""
    shared = [group for some in groups.values() for group in some if group.is_shared]
    loads = [0] * shape.world_size
    elsewhere: set[int] = set()
    at = EXTENT_ALIGN  # in the replica, where nothing lies at 0
    digest, places = hashlib.blake2b(digest_size=7), hashlib.blake2b(digest_size=7)
    for group in sorted(shared, key=lambda group: (not group.trains, -group.nbytes, group.first)):
        owner = loads.index(min(loads))
        loads[owner] += group.nbytes
        # With the paths: tensors of one size, in another order, would be mixed up by `parts.merge`.
        alike = [(view.path, view.nbytes) for view in group.views]
        digest.update(f"{group.nbytes} {alike} ".encode())
        if shape.replica:
            places.update(f"{[_arranged(view, group) for view in group.views]} ".encode())
            layout.divided.append((group, at))
            at = aligned(at + group.nbytes)
        if owner != shape.rank:
            elsewhere.add(group.first)
            _add_extent(layout, group, first_extent, tree.ELSEWHERE, shape.first + owner)
    layout.division = int.from_bytes(digest.digest()) if shared else 0
    # Other shards of the same sizes are other bytes.
    places.update(f"{layout.division} {shape.first}".encode())
    layout.replica_id = int.from_bytes(places.digest()) if shared else 0
    left = {
        device: [group for group in some if group.first not in elsewhere]
        for device, some in groups.items()
    }
    return {device: some for device, some in left.items() if some}


def _arranged(view: View, group: _Group) -> object:
    """What makes other bytes of the same tensor: `parts.merge` gives a tensor the strides of the
    rank that stores it, so each rank may have its own."""
    node, within = view.node, view.address - group.views[0].address
    order = node.strides if isinstance(node, tree.Tensor) else node.order
    return within, node.dtype, node.shape, order


def _lay_out_devices(layout: Layout, groups: dict[int, list[_Group]], shape: Shape) -> None:
    """What is staged lies in memory of the client, which the daemon can map."""
    pulled: dict[int, list[_Group]] = {}
    rest: dict[int, list[_Group]] = {}
    owners: list[object] = []
    for device in sorted(groups):
        for group in sorted(groups[device], key=lambda group: group[:2]):
            in_place = not (group.volatile or shape.aside)
            apart = in_place and group.views[0].address in shape.pushed
            (rest if apart else pulled).setdefault(device, []).append(group)
            owners.extend(view.owner for view in group.views)
    sections = [_section(layout, *item, shape) for item in pulled.items()]
    pulled_bytes = layout.end
    replica = _replica(layout, groups, sections, shape) if shape.replica and not rest else None
    apart_sections = [_section(layout, *item, shape) for item in rest.items()]
    layout.device = DevicePart(
        sections, layout.end, owners, all_staged=shape.aside, rest=apart_sections,
        pulled_bytes=pulled_bytes, replica=replica,
    )  # fmt: skip
    layout.owners.append(layout.device)


def _replica(
    layout: Layout, mine: dict[int, list[_Group]], sections: list[Section], shape: Shape
) -> Replica | None:
    """None when this rank stores something from its GPUs that no other rank has, or that is
    staged."""
    places = {group.first: at for group, at in layout.divided}
    own = [group for some in mine.values() for group in some]
    if any(one.staged or one.aside for one in sections) or any(
        group.first not in places for group in own
    ):
        return None
    by_address = {(device, g.views[0].address): g for device, some in mine.items() for g in some}
    shares = [
        Range(places[by_address[section.device, item.address].first], item.offset, item.nbytes)
        for section in sections
        for item in section.in_place
        if item.nbytes
    ]
    devices = {section.device for section in sections}  # those whose streams say when it changes
    placed = [
        (group.views, Range(group.views[0].address, at, group.nbytes))
        for group, at in layout.divided
        if group.views[0].device in devices and group.nbytes and not group.volatile
        and group.views[0].address not in shape.pushed
    ]  # fmt: skip
    ranges = b"".join(pack_device([place], views[0].device) for views, place in placed)
    owners = [view.owner for views, _ in placed for view in views]
    return Replica(layout.replica_id, ranges, pack(shares), owners)


def _section(layout: Layout, device: int, groups: list[_Group], shape: Shape) -> Section:
    """Places these groups, up to the end of a chunk."""
    section = Section(device)
    gated = section.aside if shape.aside else section.in_place
    for group in groups:
        placed = section.staged if group.volatile else gated
        gap = _gap(placed, group) if placed else 0
        placed.append(_place(layout, group, 0, shape, gap))
    layout.end = -(-layout.end // shape.chunk_bytes) * shape.chunk_bytes
    return section


def _groups(views: list[View]) -> list[_Group]:
    """Views of one device, by what they share; groups by ascending address."""
    groups: list[list[View]] = []
    end, storage = -1, -1
    for view in sorted(views, key=lambda view: (view.address, -view.nbytes)):
        if view.address < end or (view.address == end and view.storage == storage):
            groups[-1].append(view)
        else:
            groups.append([view])
        end = max(end, view.address + view.nbytes)
        storage = view.storage
    return [_group(views) for views in groups]


def _group(views: list[View]) -> _Group:
    first = views[0]
    if len(views) == 1:  # nearly all
        return _Group(first.volatile, not first.frozen, first.number, views, first.nbytes)
    volatile = any(view.volatile for view in views)
    for view in views:
        view.volatile = volatile
    end = max(view.address + view.nbytes for view in views)
    trains = not all(view.frozen for view in views)
    return _Group(volatile, trains, min(view.number for view in views), views, end - first.address)


def _gap(placed: list[Range], group: _Group) -> int:
    """The gap between the last range and the group in memory, when it is kept; else 0."""
    last = placed[-1]
    gap = group.views[0].address - last.address - last.nbytes  # < 0 behind what is frozen
    is_kept = 0 <= gap < GAP_MAX and (last.offset + last.nbytes + gap) % EXTENT_ALIGN == 0
    return gap if is_kept else 0


def aligned(offset: int) -> int:
    return -(-offset // EXTENT_ALIGN) * EXTENT_ALIGN


def _place(layout: Layout, group: _Group, first_extent: int, shape: Shape, gap: int = 0) -> Range:
    """The next extent of the payload is the group's, `gap` bytes behind the one before."""
    offset = aligned(layout.end + gap)
    owner = shape.first + shape.rank if shape.world_size and group.is_shared else -1
    _add_extent(layout, group, first_extent, offset, owner)
    layout.end = offset + group.nbytes
    layout.frozen += 0 if group.trains or group.volatile else group.nbytes
    return Range(group.views[0].address, offset, group.nbytes)


def _add_extent(layout: Layout, group: _Group, first_extent: int, offset: int, owner: int) -> None:
    first = group.views[0]
    lead = (first.address - first.storage) % tree.LEAD_ALIGN
    for view in group.views:
        node, within = view.node, view.address - first.address
        if isinstance(node, tree.Tensor) and (lead + within) % ITEM_BYTES[node.dtype]:
            raise UnsupportedStateError(
                f"{view.path}: a {node.dtype} tensor shares memory with another, unaligned",
                hint="attach a clone of it",
            )
        node.extent, node.offset = first_extent + len(layout.extents), within
    layout.extents.append(tree.Extent(offset, group.nbytes, lead, owner))
