"""native/src/gpu/pcc_cuda.h agrees with NVIDIA's cuda.h, where that is installed.

The names clash, so the two cannot be included together: a C file is made from ours that includes
NVIDIA's only, and the compiler compares. CUDA_HEADER names the file to compare with.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

OURS = Path(__file__).parents[3] / "native" / "src" / "gpu" / "pcc_cuda.h"

#: Parameters that are enums there and ints here: (symbol, position) -> their type.
ENUMS = {
    ("cuDeviceGetAttribute", 1): "CUdevice_attribute",
    ("cuPointerGetAttribute", 1): "CUpointer_attribute",
    ("cuStreamIsCapturing", 1): "CUstreamCaptureStatus *",
    ("cuThreadExchangeStreamCaptureMode", 0): "CUstreamCaptureMode *",
}
CONSTANTS_MIN = 40  #: the pattern must go on finding them


def header() -> Path | None:
    named = os.environ.get("CUDA_HEADER")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [path for folder in folders for path in folder.glob("*/include/cuda.h")]
    found += sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
    return found[0] if found else None


def constants(text: str) -> dict[str, str]:
    return dict(re.findall(r"\b((?:CUDA?|CU)_[A-Z0-9_]+) = (\d+)", text))


def calls(text: str) -> list[tuple[str, str]]:
    """(symbol, parameters)"""
    table = text[text.index("#define PCC_CUDA_CALLS(X)") :]
    table = table[: table.index("\n\n")].replace("\\\n", " ")
    found = re.findall(r"X\(\w+,\s+(\w+),\s+\((.*?)\)\)", table)
    return [(symbol, " ".join(parameters.split())) for symbol, parameters in found]


def parameter_types(parameters: str) -> list[str]:
    """Types without the names: "CUdevice * device, int ordinal" -> ["CUdevice *", "int"]."""
    types = []
    for parameter in parameters.split(","):
        match = re.fullmatch(r"(.*?[\s*])\w+", parameter.strip())
        assert match, parameter
        types.append(match.group(1).strip())
    return types


def program(text: str) -> str:
    asserts = [(f"(long long){name} == {value}", name) for name, value in constants(text).items()]
    asserts += [
        ("sizeof(CUuuid) == 16", "CUuuid"),
        ("sizeof(CUipcMemHandle) == 64", "CUipcMemHandle"),
        ("__builtin_types_compatible_p(CUdeviceptr, unsigned long long)", "CUdeviceptr"),
        ("__builtin_types_compatible_p(CUdevice, int)", "CUdevice"),
    ]
    enums = {"CUresult", *(one.removesuffix(" *") for one in ENUMS.values())}
    asserts += [(f"sizeof({name}) == sizeof(int)", name) for name in sorted(enums)]
    for symbol, parameters in calls(text):
        types = parameter_types(parameters)
        theirs = ", ".join(ENUMS.get((symbol, i), one) for i, one in enumerate(types))
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
    command = [compiler, "-std=c17", "-D_GNU_SOURCE", "-fsyntax-only", f"-I{theirs.parent}"]
    return subprocess.run([*command, str(file)], capture_output=True, text=True).stderr


def test_ours_is_theirs(tmp_path: Path) -> None:
    theirs = header()
    if theirs is None:
        pytest.skip("no cuda.h here: CUDA_HEADER can name one")
    text = OURS.read_text()
    assert len(constants(text)) >= CONSTANTS_MIN
    assert len(calls(text)) == text.count("\n    X(")
    source = program(text)
    assert compile_against(theirs, source, tmp_path) == ""
    wrong = source.replace("CUDA_ERROR_NOT_READY == 600", "CUDA_ERROR_NOT_READY == 601")
    wrong = wrong.replace("cuMemGetInfo_v2), CUresult(size_t *", "cuMemGetInfo_v2), CUresult(int *")
    found = compile_against(theirs, wrong, tmp_path)
    assert "CUDA_ERROR_NOT_READY" in found and "cuMemGetInfo_v2" in found  # it does compare
