"""Compiles and runs the GPU probe, which reports what this machine's GPU and driver do.

    python bench/gpu/probe.py [--small] [--device N] [--only STEP]... [--limit-s 120]
                              [--output FILE]

Needs a C compiler and Python's own library only; CUDA's driver is looked for at run time. Prints
one JSON document on any machine; without a driver the document reports only that. The head of
bench/gpu/probe.c lists the questions.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
#: Not -Werror: a warning of an untested compiler would prevent the whole probe.
_WARNINGS = "-std=c17 -D_GNU_SOURCE -Wall -Wextra -Wconversion -Wshadow -Wvla"

Document = dict[str, Any]


class ProbeError(Exception):
    """The probe could not be compiled, or its output cannot be parsed."""


def build(directory: Path) -> Path:
    """The probe's program."""
    program = directory / "probe"
    sources = sorted(map(str, _HERE.glob("probe*.c")))
    command = [
        *shlex.split(os.environ.get("CC", "cc")), *_WARNINGS.split(), "-O2",
        f"-I{_HERE.parents[1] / 'native' / 'src'}", "-o", str(program), *sources,
        "-ldl", "-lpthread", "-lm",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ProbeError(f"no C compiler: {error}") from error
    if done.returncode != 0:
        raise ProbeError(f"the probe does not compile:\n{done.stderr}")
    return program


def run(program: Path, arguments: list[str], limit_s: float) -> Document:
    """Runs the probe. The probe keeps its own limit; this limit is for a probe that hangs."""
    process = subprocess.Popen(
        [str(program), "--limit-s", str(limit_s), *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s + 30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return parse(output)


def parse(output: str) -> Document:
    """The document; if it ends between two steps, it is completed."""
    for ending in (
        "",
        ' },\n "driver": "found"\n}\n',
        '  "cut_off": {}\n },\n "driver": "found"\n}\n',
    ):
        try:
            document: Document = json.loads(output + ending)
        except json.JSONDecodeError:
            continue
        return document
    raise ProbeError(f"the probe's output cannot be read:\n{output}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="little memory and short runs")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="STEP")
    parser.add_argument("--limit-s", type=float, default=120)
    parser.add_argument("--output", type=Path, help="also write the document there")
    options = parser.parse_args()
    arguments = ["--device", str(options.device)]
    arguments += ["--small"] if options.small else []
    arguments += [word for step in options.only for word in ("--only", step)]
    try:
        with tempfile.TemporaryDirectory(prefix="pcc-probe-") as directory:
            document = run(build(Path(directory)), arguments, options.limit_s)
    except ProbeError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 1
    text = json.dumps(document, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
