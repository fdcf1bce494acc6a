"""What is found against a snapshot of a process with GPUs, before anything is locked: fixtures of
maps, environments and threads, and drivers that cannot do it."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
from pathlib import Path

import pytest

from pccheck_process.gpu import devices, driver, inspecting, journal
from pccheck_process.gpu.driver import CudaCheckpoints
from pccheck_process.gpu.nvml import GpuDevice
from pccheck_process.looking import Looked
from pccheck_wire.errors import RefusedError
from tests.unit.pccheck_native.test_cuda_header import compile_against, header
from tests.unit.pccheck_process.looking.fakes import MAPS, FakeProc

GIB = 1 << 30
LIBCUDA = "7f1000000000-7f1000001000 r-xp 00000000 08:01 31 /usr/lib/libcuda.so.580.1.1\n"
CONTROL = "7f2000000000-7f2000001000 rw-s 00000000 00:06 40 /dev/nvidiactl\n"
UVM = "7f300000{n}000-7f300000{n}800 rw-s 00000000 00:06 41 /dev/nvidia-uvm\n"
USED = GpuDevice("GPU-1", "NVIDIA H200", 140 * GIB, 100 * GIB, {70: 3 * GIB})


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    """Process 70 trains on a GPU with driver 580, which can all."""
    made = FakeProc(tmp_path / "proc")
    made.process(70, maps=MAPS + LIBCUDA + CONTROL)
    made.fd(70, 5, "/dev/nvidia0")
    made.put("driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06")
    made.put("meminfo", f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
    monkeypatch.setattr(driver, "load", object)
    monkeypatch.setattr(driver, "watched_devices", lambda: [USED])
    return made


def seen(fake: FakeProc) -> Looked:
    before = fake.look()
    assert before.gpu and before.refusals == ()
    return inspecting.inspect(before, fake.root)


def refused(fake: FakeProc) -> str:
    (one,) = seen(fake).refusals
    return str(one)


def test_nothing_is_in_the_way_of_a_process_with_a_gpu(fake: FakeProc) -> None:
    before, found = fake.look(), seen(fake)
    assert found.refusals == () and found.notes == before.notes
    assert found.image_bytes - before.image_bytes == 3 * GIB


def test_a_process_without_a_gpu_is_as_before(fake: FakeProc) -> None:
    fake.process(71)
    before = fake.look(71)
    assert inspecting.inspect(before, fake.root) is before


def test_only_the_library_is_no_gpu(fake: FakeProc) -> None:
    fake.process(72, maps=MAPS + LIBCUDA)
    before = fake.look(72)
    assert inspecting.inspect(before, fake.root) is before


# -- drivers that cannot do it


@pytest.fixture
def old(tmp_path: Path) -> ctypes.CDLL:
    """A driver of CUDA 12.4, without the calls."""
    source = tmp_path / "old.c"
    source.write_text("int cuDriverGetVersion(int *out) { *out = 12040; return 0; }\n")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "old.so", source], check=True)
    return ctypes.CDLL(str(tmp_path / "old.so"))


def test_a_driver_without_the_calls_is_named(
    fake: FakeProc, old: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.put("driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14")
    monkeypatch.setattr(driver, "load", lambda: CudaCheckpoints(old))
    assert refused(fake) == (
        "process 70 (python) uses a GPU (/dev/nvidia0), and the NVIDIA driver (CUDA 12.4) cannot "
        "checkpoint processes; its release is 550.54.14 (install an NVIDIA driver of release 570 "
        "or newer, or save with PCcheckClient)"
    )


def test_a_machine_without_a_driver_is_named(
    fake: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RefusedError("libcuda.so.1 cannot be loaded here")

    monkeypatch.setattr(driver, "load", missing)
    assert "uses a GPU (/dev/nvidia0), and libcuda.so.1 cannot be loaded here" in refused(fake)


def test_a_driver_that_stops_the_machine_is_refused(fake: FakeProc) -> None:
    text = "NVRM version: NVIDIA UNIX {} for x86_64  595.71.05  Release Build"
    fake.put("driver/nvidia/version", text.format("Open Kernel Module"))
    assert "the open kernel module of NVIDIA driver 595.71.05 is reported to stop" in refused(fake)
    fake.put("driver/nvidia/version", text.format("Kernel Module"))
    assert seen(fake).refusals == ()


# -- what the driver would refuse too late


def nccl(fake: FakeProc, release: str = "580.65.06", **environment: str) -> list[str]:
    fake.put("driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {release}")
    fake.put("70/task/73/comm", "pt_nccl_watchdg\n")
    fake.put("70/task/73/status", "Name:\tpt_nccl_watchdg\n")
    fake.put("70/environ", "".join(f"{name}={text}\0" for name, text in environment.items()))
    found = inspecting.Findings()
    user = inspecting.user_of(inspecting.Proc(fake.root), 70)
    assert user is not None
    files = inspecting.Proc(fake.root)
    inspecting._look_at(found, files, user, inspecting._release(files)[0], alone=True)
    return [str(one) for one in found.refusals.values()]


def test_nccl_is_refused_with_the_variables_to_set(fake: FakeProc) -> None:
    assert nccl(fake) == [
        "process 70 (python) uses NCCL (thread 'pt_nccl_watchdg'), which shares memory between "
        "processes (set before the program starts: NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 "
        "NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0; all-reduce then takes "
        "sockets)"
    ]
    (said,) = nccl(fake, **inspecting.NCCL_VARIABLES | {"NCCL_NVLS_ENABLE": "1"})
    assert "starts: NCCL_NVLS_ENABLE=0;" in said
    assert nccl(fake, **inspecting.NCCL_VARIABLES) == []
    assert nccl(fake, WORLD_SIZE="1") == []
    (said,) = nccl(fake, "595.84", **inspecting.NCCL_VARIABLES, WORLD_SIZE="1")
    assert "which drivers from release 590 are reported to break" in said


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        (UVM.format(n=1), ""),
        (UVM.format(n=1) + UVM.format(n=2), "uses managed memory (UVM, 2 mappings of"),
        (
            "7f4000000000-7f4000014000 rw-s 00000000 00:19 50 /dev/shm/torch_70_123_0\n",
            "seems to share GPU memory with other processes (/dev/shm/torch_70_123_0), which",
        ),
    ],
)
def test_what_shares_memory_is_refused(fake: FakeProc, maps: str, said: str) -> None:
    fake.process(70, maps=MAPS + LIBCUDA + CONTROL + maps)
    fake.fd(70, 5, "/dev/nvidia0")
    found = [str(one) for one in seen(fake).refusals]
    assert len(found) == bool(said) and all(said in one for one in found), found


def test_fabric_memory_is_refused(fake: FakeProc) -> None:
    fake.fd(70, 6, "/dev/nvidia-caps-imex-channels/channel0")
    assert "channel0 open (fabric memory, or GPUDirect Storage)" in refused(fake)


def test_mps_is_refused(fake: FakeProc) -> None:
    fake.put("70/environ", "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps\0")
    assert "set up for MPS (CUDA_MPS_PIPE_DIRECTORY)" in refused(fake)


def test_a_part_of_a_gpu_is_noted(fake: FakeProc) -> None:
    fake.fd(70, 6, "/dev/nvidia-caps/nvidia-cap3")
    assert "may run on a part of a GPU (MIG), where this was never tried" in str(seen(fake).notes)


def test_a_stopped_process_is_refused(fake: FakeProc) -> None:
    fake.process(70, maps=MAPS + LIBCUDA + CONTROL, state="T")
    fake.fd(70, 5, "/dev/nvidia0")
    assert refused(fake).endswith("the driver waits for it without end (kill -CONT 70)")


def test_a_gpu_without_cuda_is_refused(fake: FakeProc) -> None:
    fake.process(70)
    fake.fd(70, 5, "/dev/nvidiactl")
    assert "has /dev/nvidiactl open without CUDA (NVML, or graphics)" in refused(fake)


# -- room


def test_the_host_must_have_room(fake: FakeProc) -> None:
    fake.put("meminfo", "MemAvailable: 1048576 kB\n")
    assert refused(fake) == (
        "the driver brings 3.00 GiB of GPU memory to the host, and this machine has 1.00 GiB free "
        "(free some, or raise that limit)"
    )


def test_the_tightest_cgroup_counts(fake: FakeProc, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    files = inspecting.Proc(fake.root)
    fake.put("70/cgroup", "0::/a/b\n")
    assert inspecting.cgroup_room(files, 70, root) is None
    for place, limit, used in ((inner, "max", 5), (root / "a", "1000", 800)):
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
    assert inspecting.cgroup_room(files, 70, root) == 200
    (root / "a" / "memory.stat").write_text("anon 400\ninactive_file 100\nactive_file 50\n")
    assert inspecting.cgroup_room(files, 70, root) == 350


def test_without_nvml_the_size_is_unknown(fake: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "watched_devices", list)
    assert "libnvidia-ml.so.1 is missing here" in refused(fake)


def test_memory_that_nvml_does_not_tell_of_is_all_that_is_used() -> None:
    hidden = GpuDevice("GPU-1", "", 10, 3, {70: -1})
    assert inspecting.bytes_used([70], [hidden]) == 7
    assert inspecting.bytes_used([70], [GpuDevice("GPU-1", "", 10, 3, {71: 5})]) == 0


# -- layouts and names


def test_our_structures_are_the_drivers(tmp_path: Path) -> None:
    lock, restore = driver.LockArguments, driver.RestoreArguments
    facts = {
        "sizeof(CUcheckpointLockArgs)": ctypes.sizeof(lock),
        "sizeof(CUcheckpointRestoreArgs)": ctypes.sizeof(restore),
        "sizeof(CUcheckpointGpuPair)": ctypes.sizeof(driver.GpuPair),
        "offsetof(CUcheckpointLockArgs, timeoutMs)": lock.timeout_ms.offset,
        "offsetof(CUcheckpointRestoreArgs, gpuPairs)": restore.pairs.offset,
        "offsetof(CUcheckpointRestoreArgs, gpuPairsCount)": restore.count.offset,
        "offsetof(CUcheckpointGpuPair, newUuid)": driver.GpuPair.new.offset,
        "CU_PROCESS_STATE_CHECKPOINTED": driver.CHECKPOINTED,
        "CU_PROCESS_STATE_FAILED": driver.FAILED,
        "CUDA_ERROR_ILLEGAL_STATE": driver.ILLEGAL_STATE,
        "CUDA_ERROR_OPERATING_SYSTEM": driver.OPERATING_SYSTEM,
        "CUDA_ERROR_NOT_SUPPORTED": driver.NOT_SUPPORTED,
    }
    lines = [f'_Static_assert({name} == {value}, "{name}");' for name, value in facts.items()]
    source = "\n".join(["#include <stddef.h>", "#include <cuda.h>", *lines, ""])
    assert compile_against(header(13), source, tmp_path) == ""
    assert "CUcheckpointGpuPair" in compile_against(
        header(13), source.replace("Pair, newUuid) == 16", "Pair, newUuid) == 8"), tmp_path
    )


def test_pids_of_a_namespace_are_found_from_outside(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    for outer, parent, inner in ((900, 1, ""), (901, 900, "1"), (902, 901, "70"), (903, 902, "71")):
        fake.process(outer, parent=parent, NSpid=f"{outer} {inner}".strip(), PPid=str(parent))
    fake.process(950, parent=1, NSpid="950 70", PPid="1")  # of another namespace
    assert devices.outer_pids([70, 71], 900, tmp_path) == {70: 902, 71: 903}
    assert devices.outer_pids([70], None) == {70: 70}
    with pytest.raises(RefusedError, match="cannot be found"):
        devices.outer_pids([72], 900, tmp_path)


def test_notes_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have made the directory."""
    open_to_all = tmp_path / "runtime"
    open_to_all.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(open_to_all))
    assert journal.places()[0] == open_to_all / "pccheck-gpu"
    open_to_all.chmod(0o777)
    assert open_to_all / "pccheck-gpu" not in journal.places()
