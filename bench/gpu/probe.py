"""What a GPU and its driver really do, as far as PCcheck's design depends on it.

    python bench/gpu/probe.py [PART]... [--small] [--output FILE]

    facts      driver and GPU, which memory has an IPC handle, what a second context takes
    vmm        memory with a descriptor (torch's expandable segments), read under another user id
    handles    2,000 allocations of 20 MiB and one of 60 GiB, shared both ways: milliseconds
    death      bytes and memory of a process after SIGKILL, idle, copied from, with kernels running
    latency    a copy of 4 bytes beside copies of 16 MiB, by the number of these under way
    queue      1,200 device copies, batches of them, a kernel's first launch, behind a held stream
    page       from a stream's write to another process's CPU, and back
    overlap    kernels beside copies, by another process (pull) and by their own (push)
    mps        sharing with a client of the MPS server
    locks      what other calls take beside registrations, and behind a stream that is held
    power      watts and clocks, with and without an idle context
    host       pinned copies, and what pinning takes

Prints one JSON document. Needs Python's own library, and torch for a part of `vmm`; what a machine
lacks is reported as "not here". --small is for little memory, such as the stand-in driver's. Each
part is a process of its own with a time limit; each fact is written to FILE as soon as it is known.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script, so that it runs where PCcheck is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu import probe_memory, probe_streams
from bench.gpu.driver import RefusedError
from tests.standin.behaviours import NotHereError

Document = dict[str, Any]
#: Seconds at most, in the order of what they decide.
PARTS: dict[str, tuple[int, Callable[..., None]]] = {
    "vmm": (30, probe_memory.vmm),
    "death": (30, probe_memory.death),
    "latency": (15, probe_streams.latency),
    "queue": (15, probe_streams.queue),
    "handles": (30, probe_memory.handles),
    "mps": (40, probe_memory.mps),
    "locks": (12, probe_streams.locks),
    "power": (10, probe_streams.power),
    "facts": (10, probe_memory.facts),
    "page": (10, probe_streams.page),
    "overlap": (15, probe_streams.overlap),
    "host": (20, probe_memory.host),
}


def short(value: object) -> object:
    """Numbers with four digits."""
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def body(pipe: int, part: Callable[..., None], small: bool) -> None:
    """The part's process. Facts go through the pipe, a line of JSON each."""

    def say(key: str, value: object) -> None:
        os.write(pipe, (json.dumps({key: short(value)}) + "\n").encode())

    try:
        part(say, small)
        say("ended", "ok")
    except NotHereError as error:
        say("ended", f"not here: {error}")
    except (RefusedError, OSError, AssertionError) as error:
        say("ended", f"failed: {type(error).__name__}: {error}")


def run(name: str, small: bool, keep: Callable[[Document], None]) -> Document:
    limit_s, part = PARTS[name]
    found: Document = {"ended": "failed: its process has ended"}
    ends, start_s = os.pipe(), time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(ends[0])
        body(ends[1], part, small)
        os._exit(0)
    os.close(ends[1])
    text = b""
    while (left_s := start_s + limit_s - time.monotonic()) > 0:
        if not select.select([ends[0]], [], [], left_s)[0]:
            continue
        got = os.read(ends[0], 1 << 16)
        if not got:
            break
        *lines, text = (text + got).split(b"\n")
        for line in lines:
            found |= json.loads(line)
        keep(found)
    else:
        found["ended"] = f"timed out after {limit_s} s"
    os.killpg(pid, signal.SIGKILL)
    if "timed out" not in found["ended"]:  # else it may hang in the driver, and is left behind
        os.waitpid(pid, 0)
    os.close(ends[0])
    found["seconds"] = round(time.monotonic() - start_s, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--small", action="store_true", help="little memory and short runs")
    parser.add_argument("--output", type=Path, help="also write the document there")
    options = parser.parse_args()
    steps: Document = {}

    def keep(name: str, found: Document) -> None:
        steps[name] = found
        if options.output is not None:
            options.output.write_text(json.dumps({"steps": steps}, indent=1) + "\n")

    for name in options.parts or PARTS:
        keep(name, run(name, options.small, functools.partial(keep, name)))
    print(json.dumps({"steps": steps}, indent=1))
    return int(any(step["ended"].startswith(("failed", "timed out")) for step in steps.values()))


if __name__ == "__main__":
    sys.exit(main())
