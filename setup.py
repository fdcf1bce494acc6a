"""The C core; all else is in pyproject.toml."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent

#: What the core is compiled with: a header of it, and what says so when there is none.
NEEDED = {
    "stdlib.h": "A C compiler and the headers of the C library are needed: install gcc and "
    "libc6-dev (Debian, Ubuntu), or gcc (Fedora, Arch)",
    "Python.h": "Python.h is missing: install python3-dev (Debian, Ubuntu) or python3-devel "
    "(Fedora)",
    "xxhash.h": "xxhash.h is missing: install libxxhash-dev (Debian, Ubuntu), xxhash-devel "
    "(Fedora) or xxhash (Arch); or run native/xxhash.sh, which unpacks Debian's package without "
    "root",
}


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


class Needed(build_ext):
    """Compiles nothing: ends with one sentence, not with pages of gcc's, when a tool is missing."""

    def build_extensions(self) -> None:
        paths = (f"-I{path}" for path in (*CORE.include_dirs, *self.compiler.include_dirs))
        command = [*self.compiler.compiler_so, *paths, "-E", "-x", "c", "-o", "/dev/null", "-"]
        for header, sentence in NEEDED.items():
            try:
                subprocess.run(
                    command, input=f"#include <{header}>\n".encode(), check=True,
                    capture_output=True,
                )  # fmt: skip
            except (OSError, subprocess.CalledProcessError):
                raise SystemExit(sentence) from None


class BuildCore(Needed):
    def build_extensions(self) -> None:
        super().build_extensions()
        build_ext.build_extensions(self)


class Build(build):
    #: The core first: its sentence comes before a line for each file of Python.
    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


if __name__ == "__main__":
    setup(
        ext_modules=[CORE],
        cmdclass={"build": Build, "build_ext": BuildCore, "needed": Needed},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
