"""A look at the processes of a tree that use GPUs, before anything is locked: what the driver would
refuse too late, or lose the process by. The rules are what others have seen, by driver release."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pccheck_process.looking import Looked, Refusal
from pccheck_process.looking.found import Findings
from pccheck_process.looking.memory import Map, maps
from pccheck_process.procs.members import TreeProcess, member_of
from pccheck_process.procs.procfs import Proc, shown, whole
from pccheck_wire.basics import size_text
from pccheck_wire.errors import RefusedError

from . import driver, nvml

#: What the host must have beside the GPUs' memory, which the driver brings there.
ROOM_BYTES = 256 << 20
#: Variables without which NCCL shares memory between processes, and with which it uses sockets.
NCCL_VARIABLES = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0",
}  # fmt: skip
#: Releases from this one are reported to end a process with any NCCL communicator.
_NCCL_LOST_FROM = 590
#: The first release that may checkpoint processes that share GPU memory.
_SHARING_FROM = 610
#: The end of a process that this driver has restored is reported to stop the whole machine.
_STOPS_MACHINE = {"595.71.05": "Open Kernel Module"}
_NCCL_THREADS = ("NCCL ", "pt_nccl")
_LIBRARY_WAY = "or save with PCcheckClient"
_BEFORE_START = "before the program starts"


def inspect(looked: Looked, proc: Path = Path("/proc")) -> Looked:
    """Adds what there is against a snapshot of a process with GPUs, and what its memory there adds
    to the image. Starts nothing on a GPU."""
    files = Proc(proc)
    users = [user for pid in looked.tree if (user := user_of(files, pid))]
    if not users:
        return looked
    devices = driver.watched_devices()
    listed = {pid for device in devices for pid in device.used_by}
    users = [one for one in users if one.devices or one.pid in listed]
    if not users:
        return looked
    found = Findings()
    nbytes = bytes_used((one.pid for one in users), devices)
    if _look_at_driver(found, files, users):
        number = _release(files)
        for one in users:
            _look_at(found, files, one, number[0], alone=len(users) == 1)
        _look_at_room(found, files, users, nbytes, devices)
    return dataclasses.replace(
        looked, gpu=True, image_bytes=looked.image_bytes + nbytes,
        refusals=(*looked.refusals, *_without_double(looked.refusals, found)),
        notes=(*looked.notes, *found.notes),
    )  # fmt: skip


def _without_double(before: Iterable[Refusal], found: Findings) -> list[Refusal]:
    said = {one.what for one in before}
    return [one for one in found.refusals.values() if one.what not in said]


@dataclass(frozen=True)
class GpuUser:
    """A process that may have something on a GPU. Without `devices` it has only loaded the driver's
    library, or is checkpointed by somebody else; the driver knows."""

    member: TreeProcess
    devices: tuple[str, ...]  #: paths below /dev, open or mapped
    has_cuda: bool
    mapped: tuple[Map, ...] = field(repr=False)

    @property
    def pid(self) -> int:
        return self.member.pid

    def __str__(self) -> str:
        return str(self.member)


def user_of(files: Proc, pid: int) -> GpuUser | None:
    """None for a process without anything of a GPU."""
    member = member_of(files, pid)
    if member is None or not member.runs:
        return None
    mapped = tuple(maps(files.text(pid, "maps")))
    opened = (files.link(pid, "fd", number) or "" for number in files.numbers(pid, "fd") or [])
    paths = {*opened, *(one.path for one in mapped)}
    devices = tuple(sorted(path for path in paths if path.startswith("/dev/nvidia")))
    has_cuda = any(Path(path).name.startswith("libcuda.so") for path in paths)
    return GpuUser(member, devices, has_cuda, mapped) if devices or has_cuda else None


def bytes_used(pids: Iterable[int], devices: Iterable[nvml.GpuDevice]) -> int:
    """On all GPUs. Where NVML does not tell it of a process: all that is used there."""
    wanted = {*pids}
    total = 0
    for device in devices:
        used = [device.used_by[pid] for pid in wanted & device.used_by.keys()]
        known = sum(one for one in used if one > 0)
        total += known if -1 not in used else device.total_bytes - device.free_bytes
    return total


# -- the driver --------------------------------------------------------------------------------


def _look_at_driver(found: Findings, files: Proc, users: list[GpuUser]) -> bool:
    """Whether it has the calls."""
    first = users[0]
    where = f" ({first.devices[0]})" if first.devices else ""
    try:
        driver.load()
    except RefusedError as error:
        release = _release_text(files)
        named = f"; its release is {release}" if release else ""
        found.refuse(
            f"{first} uses a GPU{where}, and {error.message}{named}",
            f"{driver.LEAST_HINT}, {_LIBRARY_WAY}",
        )
        return False
    text = files.text("driver", "nvidia", "version")
    for release, kind in _STOPS_MACHINE.items():
        if _release_text(files) == release and kind in text:
            found.refuse(
                f"the open kernel module of NVIDIA driver {release} is reported to stop the whole "
                "machine when a process ends that was checkpointed",
                f"install another release, {_LIBRARY_WAY}",
            )
    return True


def _release_text(files: Proc) -> str:
    text = files.text("driver", "nvidia", "version")
    number = re.search(r"\b\d{3,}\.\d+(?:\.\d+)*", text)
    return number[0] if number else nvml.release()


def _release(files: Proc) -> tuple[int, ...]:
    """(0,) when it is unknown."""
    return tuple(map(int, re.findall(r"\d+", _release_text(files)))) or (0,)


# -- a process ---------------------------------------------------------------------------------


def _look_at(found: Findings, files: Proc, one: GpuUser, release: int, *, alone: bool) -> None:
    if not one.has_cuda:
        found.refuse(
            f"{one} has {one.devices[0]} open without CUDA (NVML, or graphics)",
            "let the program close it (nvmlShutdown) before",
        )
    if one.member.stat.state == "T":
        found.refuse(
            f"{one} is stopped by a signal, and the driver waits for it without end",
            f"kill -CONT {one.pid}",
        )
    environment = _environment(files, one.pid)
    _look_at_nccl(found, files, one, release, environment, alone=alone)
    _look_at_sharing(found, one, release)
    if "CUDA_MPS_PIPE_DIRECTORY" in environment:
        found.refuse(
            f"{one} is set up for MPS (CUDA_MPS_PIPE_DIRECTORY), whose processes the driver does "
            "not checkpoint",
            f"unset that variable {_BEFORE_START}",
        )
    if any("/nvidia-caps/" in path for path in one.devices):
        found.note(f"{one} may run on a part of a GPU (MIG), where this was never tried")


def _environment(files: Proc, pid: int) -> Mapping[str, str]:
    """That it was started with: what a program sets for itself cannot be seen."""
    pairs = (line.partition("=") for line in files.text(pid, "environ").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _look_at_nccl(
    found: Findings, files: Proc, one: GpuUser, release: int, environment: Mapping[str, str], *,
    alone: bool,
) -> None:  # fmt: skip
    threads = files.numbers(one.pid, "task") or []
    names = [files.text(one.pid, "task", thread, "comm").strip() for thread in threads]
    name = next((name for name in names if name.startswith(_NCCL_THREADS)), "")
    if not name:
        return
    who = f"{one} uses NCCL (thread {shown(name)!r})"
    if release >= _NCCL_LOST_FROM:
        found.refuse(
            f"{who}, which drivers from release {_NCCL_LOST_FROM} are reported to break",
            f"use the gloo backend for one GPU, install release 580, {_LIBRARY_WAY}",
        )
        return
    size = whole(environment.get("WORLD_SIZE"))
    wrong = [f"{name}={value}" for name, value in NCCL_VARIABLES.items()
             if environment.get(name) != value]  # fmt: skip
    if wrong and not (alone and size == 1):
        found.refuse(
            f"{who}, which shares memory between processes", f"set {_BEFORE_START}: "
            f"{' '.join(wrong)}; all-reduce then takes sockets",
        )  # fmt: skip


def _look_at_sharing(found: Findings, one: GpuUser, release: int) -> None:
    """Most of it cannot be seen from outside; the driver then refuses, or worse."""
    managed = sum(mapped.path == "/dev/nvidia-uvm" for mapped in one.mapped)
    if managed > 1:  # CUDA itself maps it once
        found.refuse(
            f"{one} uses managed memory (UVM, {managed} mappings of /dev/nvidia-uvm), which the "
            "driver does not checkpoint",
            "do without it (paged optimizers of bitsandbytes, RAPIDS' managed pools), "
            f"{_LIBRARY_WAY}",
        )
    shares = ("/dev/shm/torch_", "/dev/shm/cuda.shm.")
    shared = next((one.path for one in one.mapped if one.path.startswith(shares)), "")
    if shared and release < _SHARING_FROM:
        found.refuse(
            f"{one} seems to share GPU memory with other processes ({shown(shared)}), which "
            f"drivers before release {_SHARING_FROM} do not checkpoint",
            f"do not send CUDA tensors to other processes, {_LIBRARY_WAY}",
        )
    for path in one.devices:
        if "imex" in path or "nvidia-fs" in path:
            found.refuse(
                f"{one} has {shown(path)} open (fabric memory, or GPUDirect Storage), which the "
                "driver does not checkpoint",
                f"start it without that, {_LIBRARY_WAY}",
            )


# -- room --------------------------------------------------------------------------------------


def _look_at_room(
    found: Findings, files: Proc, users: list[GpuUser], nbytes: int,
    devices: list[nvml.GpuDevice],
) -> None:  # fmt: skip
    """The driver brings the memory of the GPUs into that of the process. A process that runs into
    a limit there is killed."""
    if not devices:
        found.refuse(
            f"{nvml.LIBRARY} is missing here, so nobody tells how much GPU memory {users[0]} has",
            "install it; in a container add utility to NVIDIA_DRIVER_CAPABILITIES",
        )
    wanted = nbytes + ROOM_BYTES
    free = whole(_line(files.text("meminfo"), "MemAvailable:")) << 10
    rooms = [("this machine", free)] if free else []
    rooms += [(f"the cgroup of {one}", room) for one in users[:1]
              if (room := cgroup_room(files, one.pid)) is not None]  # fmt: skip
    for name, room in rooms:
        if room < wanted:
            found.refuse(
                f"the driver brings {size_text(nbytes)} of GPU memory to the host, and {name} has "
                f"{size_text(max(0, room))} free",
                "free some, or raise that limit",
            )


def _line(text: str, name: str) -> str:
    lines = (line.removeprefix(name) for line in text.split("\n") if line.startswith(name))
    return next(lines, "")


def cgroup_room(files: Proc, pid: int, root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the process may still take, by the tightest limit above it; None without any."""
    name = _line(files.text(pid, "cgroup"), "0::").strip()
    place = root / name.lstrip("/")
    rooms = []
    while place.is_relative_to(root):
        limit, used = (_number(place / f"memory.{word}") for word in ("max", "current"))
        if limit is not None and used is not None:
            rooms.append(limit - used + _cache(place))
        if place == root:
            break
        place = place.parent
    return min(rooms, default=None)


def _cache(place: Path) -> int:
    """What the kernel gives back first."""
    try:
        text = (place / "memory.stat").read_text()
    except OSError:
        return 0
    return sum(whole(_line(text, name)) for name in ("inactive_file ", "active_file "))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
