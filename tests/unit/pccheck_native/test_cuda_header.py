"""Our declarations of CUDA's driver agree with NVIDIA's cuda.h of 12.x and of 13.x.

Both headers come with the test dependencies nvidia-cuda-runtime-cu12 and nvidia-cuda-runtime (6 MB
to download). The names clash, so ours and theirs cannot be included together: a C file is made
from ours that includes NVIDIA's only, and the compiler compares.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = ROOT / "native" / "src" / "gpu" / "pcc_cuda.h"
STANDIN = ROOT / "tests" / "standin" / "standin_control.h"

#: Parameters that are enums there and ints here: (symbol, position) -> their type.
ENUMS = {
    ("cuDeviceGetAttribute", 1): "CUdevice_attribute",
    ("cuPointerGetAttribute", 1): "CUpointer_attribute",
    ("cuStreamIsCapturing", 1): "CUstreamCaptureStatus *",
    ("cuThreadExchangeStreamCaptureMode", 0): "CUstreamCaptureMode *",
    ("cuMemGetAllocationGranularity", 2): "CUmemAllocationGranularity_flags",
    ("cuMemExportToShareableHandle", 2): "CUmemAllocationHandleType",
    ("cuMemImportFromShareableHandle", 2): "CUmemAllocationHandleType",
    ("cuCheckpointProcessGetState", 1): "CUprocessState *",
}
SIZES = {
    "CUuuid": 16, "CUipcMemHandle": 64, "CUmemLocation": 8, "CUmemAllocationProp": 32,
    "CUmemAccessDesc": 12, "CUmemcpyAttributes": 24, "CUcheckpointLockArgs": 64,
    "CUcheckpointCheckpointArgs": 64, "CUcheckpointRestoreArgs": 64, "CUcheckpointUnlockArgs": 64,
}  # fmt: skip
PLACES = {
    "CUmemLocation, id": 4, "CUmemAllocationProp, requestedHandleTypes": 4,
    "CUmemAllocationProp, location": 8, "CUmemAllocationProp, allocFlags": 24,
    "CUmemAccessDesc, flags": 8, "CUmemcpyAttributes, srcLocHint": 4,
    "CUmemcpyAttributes, flags": 20,
}  # fmt: skip
CONSTANTS_MIN = 40  #: the pattern must go on finding them
VERSIONS = {12: "cuda_runtime", 13: "cu13"}  #: the major version and its folder in the wheel


def header(version: int) -> Path:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        found = folder / VERSIONS[version] / "include" / "cuda.h"
        if found.exists() and f"#define CUDA_VERSION {version}0" in found.read_text():
            return found
    raise AssertionError(f"no cuda.h of CUDA {version} in {folders}; `make venv` installs it")


def constants(text: str) -> dict[str, str]:
    return dict(re.findall(r"\b((?:CUDA?|CU)_[A-Z0-9_]+) = (\d+)", text))


def calls(text: str) -> list[tuple[str, str]]:
    """(symbol, parameters) of the product's table, or of prototypes."""
    flat = " ".join(text.replace("\\\n", " ").split())
    found = re.findall(r"X\(\w+, (cu\w+), \(([^()]*)\)\)", flat)
    found += re.findall(r"CUresult (cu\w+)\(((?:[^()]|\([^()]*\))*)\);", flat)
    return [(symbol, parameters.strip()) for symbol, parameters in found]


def program(text: str) -> str:
    """C that compiles with NVIDIA's header when it has all that `text` declares."""
    asserts = [(f"(long long){name} == {value}", name) for name, value in constants(text).items()]
    asserts += [(f"sizeof({name}) == {size}", name) for name, size in SIZES.items()]
    asserts += [(f"offsetof({place}) == {at}", place) for place, at in PLACES.items()]
    asserts += [
        ("__builtin_types_compatible_p(CUdeviceptr, unsigned long long)", "CUdeviceptr"),
        ("__builtin_types_compatible_p(CUdevice, int)", "CUdevice"),
    ]
    enums = {"CUresult", *(one.removesuffix(" *") for one in ENUMS.values())}
    asserts += [(f"sizeof({name}) == sizeof(int)", name) for name in sorted(enums)]
    for symbol, parameters in calls(text):
        theirs = ",".join(ENUMS.get((symbol, i), p) for i, p in enumerate(parameters.split(",")))
        same = f"__builtin_types_compatible_p(__typeof__({symbol}), CUresult({theirs}))"
        asserts.append((same, symbol))
    lines = [f'_Static_assert({condition}, "{name}");' for condition, name in asserts]
    return "\n".join(
        ["#include <stddef.h>", "#include <stdint.h>", "#include <cuda.h>", *lines, ""]
    )


def compile_against(theirs: Path, source: str, folder: Path) -> str:
    """What the compiler has to say; empty when all is well."""
    file = folder / "compare.c"
    file.write_text(source)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    # With that macro a name of theirs is the symbol of that name; without it, that of the version
    # which new programs are to use.
    command = [compiler, "-std=c17", "-D_GNU_SOURCE", "-D__CUDA_API_VERSION_INTERNAL"]
    command += ["-fsyntax-only", f"-I{theirs.parent}"]
    return subprocess.run([*command, str(file)], capture_output=True, text=True).stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_ours_is_theirs(version: int, tmp_path: Path) -> None:
    theirs = header(version)
    text = PRODUCT.read_text()
    assert len(constants(text)) >= CONSTANTS_MIN
    assert len(calls(text)) == text.count("\n    X(")
    source = program(text)
    assert compile_against(theirs, source, tmp_path) == ""
    wrong = source.replace("CUDA_ERROR_NOT_READY == 600", "CUDA_ERROR_NOT_READY == 601")
    wrong = wrong.replace("cuMemGetInfo_v2), CUresult(size_t *", "cuMemGetInfo_v2), CUresult(int *")
    found = compile_against(theirs, wrong, tmp_path)
    assert "CUDA_ERROR_NOT_READY" in found and "cuMemGetInfo_v2" in found  # it does compare


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_ins_is_theirs(version: int, tmp_path: Path) -> None:
    text = STANDIN.read_text()
    assert len(calls(text)) == len(re.findall(r"^CUresult cu", text, re.MULTILINE)) > 10
    assert compile_against(header(version), program(text), tmp_path) == ""
