"""The C core; all else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).parent


def files(ending: str) -> list[str]:
    found = (*HERE.glob(f"native/python/*.{ending}"), *HERE.glob(f"native/src/*/*.{ending}"))
    return sorted(str(path.relative_to(HERE)) for path in found)


CORE = Extension(
    "pccheck_native._core",
    sources=files("c"),
    depends=files("h"),
    # native/build has xxhash.h where the system has not (native/xxhash.sh).
    include_dirs=["native/src", "native/build"],
    extra_compile_args=[
        "-D_GNU_SOURCE", "-DPy_LIMITED_API=0x030b0000", "-std=c17", "-O3", "-fvisibility=hidden",
        "-Wall", "-Wextra", "-pthread",
    ],
    extra_link_args=["-pthread"],
    py_limited_api=True,
)  # fmt: skip

if __name__ == "__main__":
    setup(ext_modules=[CORE])
