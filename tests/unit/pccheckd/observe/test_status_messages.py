"""The lines of `pccheckctl status` and `doctor` that users meet most: what happened, what it means,
what to do. A changed word is changed here, too (see test_messages.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_native import mounts
from pccheck_wire.errors import DaemonUnreachableError, StorageFullError
from pccheckctl.commands import status
from pccheckctl.doctor import daemon, gpu, machine, storage
from pccheckctl.doctor.finding import Finding
from pccheckctl.measure import disk
from pccheckctl.output.documents import Document
from pccheckd.group.explain import Standing
from pccheckd.observe import report
from pccheckd.tenancy.binding import BindingState
from tests.support.jobs import kept, saving
from tests.unit.repository.test_messages import PRIVATE

# -- warnings of a daemon: `pccheckctl status`, systemd's STATUS line, doctor -------------------


def volume(
    *, damaged: bool = False, quarantined: int = 0, replicas: int = 2, lost: bool = False
) -> SimpleNamespace:
    info = SimpleNamespace(valid_replicas=replicas, repaired_replicas=0, record_lost=lost)
    newest = kept(9, damaged=damaged)
    path = "/data/7/gpt/0.pcc"
    return SimpleNamespace(path=path, info=info, checkpoints=[newest], quarantined=quarantined)


class Name(str):
    uid = 7


def tenant(**changed: Any) -> Any:
    """A connected rank without trouble."""
    volumes = SimpleNamespace(
        unreadable={}, loss=changed.pop("loss", ""), open=[changed.pop("volume", volume())]
    )
    parked = changed.pop("parked", [])
    ledger = SimpleNamespace(
        failing=changed.pop("failing", 0), last_failure="write: EIO",
        newest=changed.pop("newest", (9, 90)), parked=lambda: parked,
    )  # fmt: skip
    binding = SimpleNamespace(
        state=changed.pop("state", BindingState.BOUND), stalled=changed.pop("stalled", "")
    )
    seat = SimpleNamespace(
        refused=changed.pop("refused", None), owner=changed.pop("owner", object())
    )
    values = {"seat": seat, "key": Name("gpt"), "quiet": True}
    retention = SimpleNamespace(unreadable=changed.pop("unreadable", set()))
    return SimpleNamespace(
        volumes=volumes, ledger=ledger, retention=retention, binding=binding, **(values | changed)
    )


def troubles(*tenants: Any, job: Any = None, gpus: Iterable[Any] = (), **of_engine: str) -> str:
    driver = SimpleNamespace(info=lambda: list(gpus))
    values = {"missing_storage": "", "stalled": ""} | of_engine
    engine: Any = SimpleNamespace(driver=driver, **values)
    registry = SimpleNamespace(
        engine=engine,
        tenants=lambda: tenants,
        jobs={0: job} if job else {},
        faults=list,
        nodes=SimpleNamespace(of=lambda _: None),
    )
    return "\n".join(report.troubles(registry))  # type: ignore[arg-type]


def late_job() -> Any:
    standing = Standing(4, 40, 9, None, 95.0, 3, {0: 0, 2: 2}, [], is_late=True)
    return SimpleNamespace(name="gpt", uid=7, lateness=SimpleNamespace(why=str(standing)))


def lost_gpu() -> Any:
    return SimpleNamespace(name="H200", uuid=bytes(16), lost=True)


FULL = StorageFullError("it takes 4.0 GiB, and 1.0 GiB is free", hint="raise --max-storage")

STATUS: dict[str, tuple[Callable[[], str], str]] = {
    "well": (lambda: troubles(tenant()), ""),
    "refused": (
        lambda: troubles(tenant(refused=FULL)),
        "gpt: checkpoints are NOT saved: it takes 4.0 GiB, and 1.0 GiB is free (raise "
        "--max-storage)",
    ),
    "failing": (
        lambda: troubles(tenant(failing=3)),
        "gpt: the last 3 checkpoints failed: write: EIO; a restart resumes from an older "
        "checkpoint",
    ),
    "failed once": (
        lambda: troubles(tenant(failing=1)),
        "gpt: the last checkpoint failed: write: EIO; a restart resumes from an older checkpoint",
    ),
    "failing, one in memory": (
        lambda: troubles(tenant(failing=3, parked=[saving(93, 12)])),
        "gpt: the last 3 checkpoints failed: write: EIO; step 93 is in memory only",
    ),
    "failing, nothing durable": (
        lambda: troubles(tenant(failing=3, newest=None)),
        "gpt: the last 3 checkpoints failed: write: EIO; there is no older checkpoint",
    ),
    "refused, ended": (
        lambda: troubles(tenant(refused=FULL, owner=None)),
        "gpt: checkpoints were NOT saved: it takes 4.0 GiB, and 1.0 GiB is free (raise "
        "--max-storage)",
    ),
    "nothing durable, ended": (
        lambda: troubles(tenant(failing=1, owner=None, newest=None)),
        "gpt: the trainer ended without a durable checkpoint: its last checkpoint failed: write: "
        "EIO",
    ),
    "ended, still written": (lambda: troubles(tenant(failing=1, owner=None, quiet=False)), ""),
    "record": (
        lambda: troubles(tenant(state=BindingState.STOPPED)),
        "gpt: a commit record could not be written, so its checkpoint failed; the next checkpoint "
        "opens the volume again once no process reads from it; check the disk (dmesg)",
    ),
    "quarantine": (
        lambda: troubles(tenant(volume=volume(quarantined=1))),
        "gpt: /data/7/gpt/0.pcc: 1 slot with write errors, used only when no other slot is free; "
        "check the disk (dmesg)",
    ),
    "damaged": (
        lambda: troubles(tenant(volume=volume(damaged=True))),
        "gpt: checkpoints [9] of /data/7/gpt/0.pcc are damaged, and recovery skips them; check the "
        "disk (dmesg), then run pccheckctl verify",
    ),
    "unreadable": (
        lambda: troubles(tenant(unreadable={9})),
        "gpt: checkpoints [9] of /data/7/gpt/0.pcc could not be read, and recovery skips them "
        "until they can be read; check the disk (dmesg)",
    ),
    "record lost": (
        lambda: troubles(tenant(volume=volume(lost=True))),
        "gpt: /data/7/gpt/0.pcc: both copies of a commit record are damaged, so that the newest "
        "checkpoint may be lost; check the disk (dmesg). The next checkpoint ends this warning",
    ),
    "one replica": (
        lambda: troubles(tenant(volume=volume(replicas=1))),
        "gpt: /data/7/gpt/0.pcc has only one good copy of its newest record; the next checkpoint "
        "writes two; check the disk (dmesg)",
    ),
    "late group": (
        lambda: troubles(job=late_job()),
        "job 'gpt' of uid 7: no new checkpoint was saved by all 4 ranks for 95 s (the last is "
        "step 40; rank 2 is behind by 2), and 3 were lost; after a crash the job restarts from "
        "the last one that all ranks have",
    ),
    "lost GPU": (
        lambda: troubles(gpus=[lost_gpu()]),
        "H200 GPU-00000000-0000-0000-0000-000000000000 is lost to this daemon: its tensors are "
        "pushed until pccheckd is restarted",
    ),
}


@pytest.mark.parametrize("name", STATUS)
def test_the_warnings_of_status(name: str) -> None:
    made, words = STATUS[name]
    assert made() == words
    assert not PRIVATE.search(words)


def test_the_lines_of_status() -> None:
    server = {"state": "degraded", "version": "0.1.0", "pid": 42, "uptime_s": 65.0, "slots": 4,
              "keep": 2, "in_flight": 2, "writers": 2, "chunk_bytes": 16 << 20,
              "engine": "pwrite", "engine_reason": "pmem is not possible here"}  # fmt: skip
    rank = {"job": "gpt", "rank": 0, "connected": True, "pid": 7, "incarnation": 1,
            "newest": {"step": 40, "wall_ns": 60_000_000_000}, "in_flight": 0, "failing": 3,
            "dram": {"bytes": 32 << 20, "wanted_bytes": 64 << 20},
            "counters": {"durable": 4, "superseded": 0, "skipped": 0, "failed": 3}}  # fmt: skip
    refused = rank | {"job": "big", "refused": {"message": "no space"}, "newest": None}
    document: Document = {
        "daemon": server, "ranks": [rank, refused], "warnings": ["the disk is slow"],
        "storage": {"path": "/data", "total_bytes": 100 << 30, "free_bytes": 10 << 30},
        "pool": {"budget_bytes": 6 << 30, "used_bytes": 1 << 30},
        "scrub": {"state": "off"}, "kept": {"limit": 4096, "stored": 9, "adopted_checkpoints": 1},
    }  # fmt: skip
    assert status.as_text(document, now_s=100.0) == (
        "daemon   degraded: pccheckd 0.1.0, pid 42, up 1 min 5 s\n"
        "storage  /data, 10.0 GiB free of 100 GiB\n"
        "pool     1.00 GiB used of 6.00 GiB\n"
        "slots    4 per volume: 2 in flight, 2 kept; 2 writers each, chunks of 16.0 MiB\n"
        "engine   pwrite (pmem is not possible here)\n"
        "restart  9 of 4096 descriptors stored; 1 checkpoint taken over from the previous daemon\n"
        "scrub    off: nothing looks for damage (see --scrub-rate, --scrub-interval); "
        "none has finished yet\n\n"
        "warning: the disk is slow\n\n"
        "job  rank  trouble     pid  run  last durable step       age  in flight  "
        "                DRAM  durable  superseded  skipped  failed\n"
        "gpt     0  failing: 3    7    1                 40  40 s ago          0  "
        "32.0 MiB of 64.0 MiB        4           0        0       3\n"
        "big     0  REFUSED       7    1                  -         -          0  "
        "32.0 MiB of 64.0 MiB        4           0        0       3"
    )


def test_the_line_of_status_without_a_daemon() -> None:
    document: Document = {"daemon": None, "storage": {"path": "/data"}, "ranks": []}
    assert status.as_text(document, now_s=0.0) == (
        "daemon   not asked: no private daemon serves this directory; read from its volumes:\n"
        "storage  /data\n\nno jobs"
    )


# -- doctor ------------------------------------------------------------------------------------


def answer(error: Exception | None = None, **changed: object) -> daemon.Answer:
    made = daemon.Answer.__new__(daemon.Answer)
    made.path, made.error = Path("/run/pccheck/attach.sock"), error  # type: ignore[assignment]
    values = {"version": "0.1.0", "pid": 1, "uptime_s": 5, "keep": 2}
    made.status = {} if error else {"daemon": values | changed, "warnings": [], "sessions": []}
    return made


def on(kind: str, *options: str) -> Callable[[Path, pytest.MonkeyPatch], Iterable[Finding]]:
    def found(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
        mount = mounts.Mount("0:0", "/data", kind, ("rw", *options))
        patch.setattr(mounts, "mount_of", lambda *_: mount)
        return storage.file_system(path)

    return found


def reading(result: object) -> Callable[[Path, pytest.MonkeyPatch], Iterable[Finding]]:
    def found(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
        def reads_back(fd: int, size: int) -> bool:
            if isinstance(result, OSError):
                raise result
            return bool(result)

        patch.setattr(disk, "reads_back", reads_back)
        return storage.direct_io(path)

    return found


def memory(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    patch.setattr(machine, "available", lambda: (1 << 30, "the machine"))
    return machine.memory(6 << 30)


def open_socket(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    path.chmod(0o777)
    return daemon.socket_access(path / "attach.sock")


def no_directory(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    return storage.access(path / "none" / "below", None)


def new_directory(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    return storage.access(path / "none", None)


def a_file(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    (path / "file").touch()
    return storage.access(path / "file", None)


def another_owner(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    return storage.access(path, os.getuid() + 1)


def no_driver(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    patch.setattr(gpu, "has_driver", lambda: False)
    patch.setattr(gpu, "DEVICES", path)
    (path / "nvidia0").touch()
    return gpu.cuda({})


def push(path: Path, patch: pytest.MonkeyPatch) -> Iterable[Finding]:
    patch.setattr(gpu, "has_driver", lambda: True)
    patch.setattr(gpu, "DEVICES", path)
    for name in ("nvidiactl", "nvidia-uvm"):
        (path / name).touch()
    reason = "no such device"
    return gpu.cuda({"daemon": {"transfer": "push", "transfer_reason": reason}})


GONE = DaemonUnreachableError(
    "no daemon listens at /run/pccheck/attach.sock", hint="start it with: pccheckd --storage DIR"
)

#: Each with its words: what was found, its effect, the fix.
DOCTOR: dict[
    str, tuple[Callable[[Path, pytest.MonkeyPatch], Iterable[Finding]], tuple[str, str, str]]
] = {
    "no daemon": (
        lambda *_: daemon.reachable(answer(GONE)),
        (
            "no daemon listens at /run/pccheck/attach.sock",
            "training continues without checkpoints until pccheckd runs",
            "start it with: pccheckd --storage DIR",
        ),
    ),
    "version": (
        lambda *_: daemon.reachable(answer(version="0.0.9")),
        (
            "pccheckd 0.0.9, pid 1, up 5.0 s, at /run/pccheck/attach.sock; DRAM pool: 0 B used of "
            "0 B; this is pccheckctl 0.1.0",
            "requests that only one of the versions knows are refused; nothing is misread",
            "install the same version of both, and restart the older one",
        ),
    ),
    "socket": (
        open_socket,
        (
            "every user may write to DIR",
            "any user can replace the daemon's socket with another one",
            "chmod 0750 DIR",
        ),
    ),
    "no storage": (
        no_directory,
        (
            "there is no directory DIR/none/below",
            "pccheckd cannot start there",
            "create it, owned by the user that runs pccheckd: mkdir -p DIR/none/below",
        ),
    ),
    "new storage": (
        new_directory,
        (
            "there is no directory DIR/none",
            "pccheckd creates it, and then finds no checkpoints",
            "if there should be some: mount the disk, or name the directory they are in",
        ),
    ),
    "file as storage": (
        a_file,
        (
            "DIR/file is not a directory",
            "pccheckd cannot start there",
            "name the directory that pccheckd was started with, or will use",
        ),
    ),
    "owner": (
        another_owner,
        (
            "DIR belongs to uid ME, but pccheckd runs as uid OTHER",
            "no checkpoint can be saved",
            "chown OTHER DIR",
        ),
    ),
    "network": (
        on("nfs4"),
        (
            "DIR is on nfs4, which is a network file system: a flush there does not prove that "
            "data is on a disk",
            "pccheckd refuses it: a checkpoint there could be lost after it was durable",
            "use a directory on a local ext4 or xfs disk",
        ),
    ),
    "nobarrier": (
        on("ext4", "nobarrier"),
        (
            "DIR is on ext4, mounted with nobarrier",
            "flushes do not reach the disk: a power loss may destroy durable checkpoints",
            "mount -o remount,barrier=1 /data",
        ),
    ),
    "other bytes": (
        reading(False),
        (
            "the disk returned data that differs from what was written",
            "checkpoints are damaged while they are written",
            "do not use this disk; see dmesg",
        ),
    ),
    "EIO": (
        reading(OSError(5, "Input/output error")),
        (
            "the disk fails to write, flush or read: EIO (Input/output error)",
            "every checkpoint fails",
            "see dmesg; replace the disk, or free space",
        ),
    ),
    "memory": (
        memory,
        (
            "1.00 GiB available (the machine); the pool may take 6.00 GiB more",
            "the kernel kills processes before the pool reaches its budget: checkpoints that were "
            "only copied are lost with pccheckd",
            "lower --dram, or raise the memory limit of the service or container",
        ),
    ),
    "no driver": (
        no_driver,
        (
            "found nvidia0, but no driver (libcuda.so.1)",
            "neither training nor pccheckd can use the GPUs",
            "install the driver; in a container, pass it in (nvidia runtime)",
        ),
    ),
    "push": (
        push,
        (
            "pccheckd does not pull: no such device",
            "the training process copies its GPU tensors itself, which takes its CPU time",
            "give pccheckd access to the driver and to /dev/nvidia*; it tries again by itself",
        ),
    ),
}


@pytest.mark.parametrize("name", DOCTOR)
def test_the_findings_of_doctor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, words = DOCTOR[name]
    found = next(iter(made(tmp_path, monkeypatch)))
    read = [text.replace(str(tmp_path), "DIR") for text in (found.found, found.effect, found.fix)]
    if name == "owner":
        uids = {str(os.getuid()): "ME", str(os.getuid() + 1): "OTHER"}
        read = [re.sub(r"\b\d+\b", lambda uid: uids[uid[0]], text) for text in read]
    assert tuple(read) == words
    assert not PRIVATE.search(" ".join(words))
