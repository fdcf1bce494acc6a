"""Which GPUs a process used, what is noted of them beside its image, and where a restore may put
the process: on the same GPUs, or on others of the same type that the user names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pccheck_process.procs.procfs import Proc, parse_fields, whole
from pccheck_wire.basics import size_text
from pccheck_wire.errors import PccheckError, RefusedError

from . import driver, nvml
from .inspecting import GpuUser

#: What a context takes beside the memory of the process.
ROOM_BYTES = 256 << 20
_INFORMATION = Path("/proc/driver/nvidia/gpus")

Document = dict[str, Any]


@dataclass(frozen=True)
class UsedGpus:
    """Of one process: UUIDs of the GPUs that it sees, and its bytes on each that it uses."""

    seen: tuple[str, ...]
    nbytes: Mapping[str, int]


def used_by(user: GpuUser, devices: Sequence[nvml.GpuDevice]) -> UsedGpus:
    """While the process is not locked. CUDA opens every GPU that it shows to a program."""
    nbytes = {
        one.uuid: held if (held := one.used_by[user.pid]) >= 0 else one.total_bytes - one.free_bytes
        for one in devices
        if user.pid in one.used_by
    }
    by_minor = _by_minor()
    opened = {by_minor[path] for path in user.devices if path in by_minor}
    seen = opened | nbytes.keys() or {one.uuid for one in devices}
    return UsedGpus(tuple(one.uuid for one in devices if one.uuid in seen), nbytes)


def _by_minor() -> dict[str, str]:
    """Path below /dev -> UUID, as the kernel's module tells."""
    found = {}
    for place in _INFORMATION.glob("*/information"):
        try:
            fields = parse_fields(place.read_text(errors="replace"))
        except OSError:
            continue
        if uuid := fields.get("GPU UUID"):
            found[f"/dev/nvidia{whole(fields.get('Device Minor'))}"] = uuid
    return found


def noted(
    used: Mapping[int, UsedGpus], devices: Sequence[nvml.GpuDevice], version: int
) -> Document:
    """For the facts of the snapshot; plain JSON."""
    seen = {uuid for one in used.values() for uuid in one.seen}
    return {
        "schema": 1,
        "release": nvml.release(),
        "version": version,
        "gpus": {one.uuid: {"name": one.name, "bytes": one.total_bytes}
                 for one in devices if one.uuid in seen},
        "processes": {str(pid): {"seen": [*one.seen], "bytes": dict(one.nbytes)}
                      for pid, one in used.items()},
    }  # fmt: skip


def used_in(document: Mapping[str, Any]) -> dict[int, UsedGpus]:
    """Process, as it sees itself -> its GPUs."""
    return {
        int(pid): UsedGpus(tuple(one["seen"]), dict(one["bytes"]))
        for pid, one in document.get("processes", {}).items()
    }


def refusals(
    document: Mapping[str, Any], chosen: Mapping[str, str], *, force: bool = False
) -> list[str]:
    """Why the processes cannot get their GPUs here, one sentence each. `chosen`: old -> new UUID.
    `force`: although driver or GPU are others."""
    if not document.get("processes"):
        return ["its processes used no GPU, but --gpus names some"] if chosen else []
    try:
        found = driver.load()
        devices = {one.uuid: one for one in driver.watched_devices()}
    except PccheckError as error:
        return [f"its processes used GPUs, and {error.message}"]
    reasons = []
    if (release := nvml.release()) != document["release"] and not force:
        reasons.append(
            f"the NVIDIA driver's release is {release}; the snapshot was taken with "
            f"{document['release']}"
        )
    unknown = sorted(chosen.keys() - document["gpus"].keys())
    if unknown:
        had = ", ".join(document["gpus"])
        reasons.append(f"its processes had no GPU {unknown[0]}; they had {had}")
    target = {old: chosen.get(old, old) for old in document["gpus"]}
    if len({*target.values()}) < len(target):
        reasons.append("two of its GPUs would become the same one: name a new one for each")
    if not found.takes_map and any(old != new for old, new in target.items()):
        reasons.append(
            "this NVIDIA driver cannot put a process on another GPU: release 580 or newer can"
        )
    for old, new in target.items():
        reasons += _difference(document, old, devices.get(new), new, force=force)
    return reasons


def _difference(
    document: Mapping[str, Any], old: str, device: nvml.GpuDevice | None, new: str, *, force: bool
) -> list[str]:
    if device is None:
        return [f"GPU {new} is not in this machine: name another one with --gpus {old}=NEW"]
    name = document["gpus"][old]["name"]
    if device.name != name and not force:
        return [f"GPU {new} is a {device.name}; the snapshot was taken on a {name}"]
    wanted = _on(old, used_in(document).values())
    if wanted and device.free_bytes < wanted + ROOM_BYTES:
        return [
            f"GPU {new} has {size_text(device.free_bytes)} free, and the processes had "
            f"{size_text(wanted)} there"
        ]
    return []


def pairs(used: UsedGpus, chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    """Old and new UUID of every GPU that the process sees: a map with fewer is refused."""
    return [(old, chosen.get(old, old)) for old in used.seen]


def lacking(
    used: Iterable[UsedGpus], chosen: Mapping[str, str], devices: Iterable[nvml.GpuDevice]
) -> str:
    """The first GPU without room for these processes; "" when all have it. A restore that runs out
    of memory can never be tried again."""
    known = [*used]
    for device in devices:
        old = next((old for old, new in chosen.items() if new == device.uuid), device.uuid)
        wanted = _on(old, known)
        if wanted and device.free_bytes < wanted + ROOM_BYTES:
            return (
                f"GPU {device.uuid} has {size_text(device.free_bytes)} free of "
                f"{size_text(wanted + ROOM_BYTES)}"
            )
    return ""


def _on(uuid: str, used: Iterable[UsedGpus]) -> int:
    return sum(one.nbytes.get(uuid, 0) for one in used)


def strayed(
    pid: int, used: UsedGpus, chosen: Mapping[str, str], devices: Iterable[nvml.GpuDevice]
) -> str:
    """Where a process is that is not on its GPUs; "" when it is, or when nobody tells."""
    found = {one.uuid for one in devices if pid in one.used_by}
    wanted = {chosen.get(old, old) for old in used.nbytes}
    return "" if not found or found == wanted else ", ".join(sorted(found))


def outer_pids(
    pids: Collection[int], maker: int | None, proc: Path = Path("/proc")
) -> dict[int, int]:
    """Each process as this process sees it. `maker`: the process that made a PID namespace for
    them; None when they are in this one's. Raises RefusedError."""
    if maker is None:
        return {pid: pid for pid in pids}
    files = Proc(proc)
    found = {}
    for outer in files.pids():
        numbers = parse_fields(files.text(outer, "status")).get("NSpid", "").split()
        if len(numbers) > 1 and int(numbers[-1]) in pids and _is_below(files, outer, maker):
            found[int(numbers[-1])] = outer
    if found.keys() != {*pids}:
        raise RefusedError("the restored processes cannot be found outside of their namespace")
    return found


def _is_below(files: Proc, pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = whole(parse_fields(files.text(pid, "status")).get("PPid"))
    return pid == ancestor
