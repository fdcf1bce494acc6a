"""Every script in examples/, as its docstring says: killed after a checkpoint, and run again.

    python -m tests.smoke.examples [NAME ...]

The command is the line of the docstring that names the script; without one it is run by Python. A
script passes when the second run says at which step it resumed (see tests/support/curves.py), which
is not before the last durable step of the first, and ends with 0. Scripts that import what is not
installed are skipped, and named.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path

from pccheck_native import layout
from pccheck_store.observer import Observer
from pccheck_wire.errors import PccheckError
from pccheckctl.output.documents import rows
from tests.support.curves import LIMIT_S, ROOT, Trainer
from tests.support.daemon import Daemon

EXAMPLES = ROOT / "examples"
#: No scripts of a user: they start one.
NOT_ALONE = {"__init__", "demo", "torch_saves"}
LOOK_S = 0.05


class ExampleError(Exception):
    """An example does not do what it should."""


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in NOT_ALONE)


def missing(script: Path) -> list[str]:
    """The packages that the script imports anywhere, and that are not installed."""
    wanted = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            wanted |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted.add(node.module.split(".")[0])
    return sorted(name for name in wanted if importlib.util.find_spec(name) is None)


def command(script: Path) -> tuple[int, list[str]]:
    """How many ranks of torchrun (0: Python alone), and the flags; from the docstring."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    for line in text.splitlines():
        words = shlex.split(line, comments=True) if f"examples/{script.name}" in line else []
        if words and words[0] in ("python", "torchrun"):
            at = next(i for i, word in enumerate(words) if word.endswith(script.name))
            before = words[1:at]
            ranks = 0
            if words[0] == "torchrun":
                ranks = int(before[before.index("--nproc-per-node") + 1])
            return ranks, words[at + 1 :]
    return 0, []


def durable_step(sockets: list[Path], ranks: int) -> int:
    """The newest step that is durable on all ranks; 0: none yet."""
    steps: dict[object, int] = {}
    for socket in sockets:
        try:
            with Observer(str(socket)) as observer:
                found = rows(observer.listing(), "checkpoints")
        except PccheckError:  # a private daemon that is starting
            continue
        for one in found:
            assert isinstance(one["step"], int)
            steps[one["rank"]] = max(one["step"], steps.get(one["rank"], 0))
    return min(steps.values()) if len(steps) == max(1, ranks) else 0


def try_out(name: str, daemon: Daemon, directory: Path) -> str:
    """What happened. Raises ExampleError, RuntimeError."""
    script, storage = EXAMPLES / f"{name}.py", directory / "checkpoints"
    ranks, flags = command(script)
    variables = {"PCCHECK_SOCKET": str(daemon.socket), "PCCHECK_STORAGE": str(storage)}

    def start() -> Trainer:
        return Trainer(script, *flags, ranks=ranks, cwd=directory, variables=variables)

    began = time.monotonic()
    first = start()
    reader = threading.Thread(target=lambda: list(first.steps()), daemon=True)
    reader.start()  # the pipe must not fill up
    durable = 0
    while not durable:
        if first.process.poll() is not None:
            reader.join()
            said = "\n".join(first.run.said[-30:])
            raise ExampleError(
                f"it ended without a durable checkpoint before it was killed:\n{said}"
            )
        private = layout.noted_socket(storage)
        sockets = [daemon.socket] if private is None else [daemon.socket, private]
        durable = durable_step(sockets, ranks)
        time.sleep(LOOK_S)
    first.send_kill()
    reader.join(LIMIT_S)
    first.kill()
    again = start().finish()
    if again.resumed < durable:
        said = "\n".join(again.said[-30:])
        raise ExampleError(
            f"it was killed when step {durable} was durable, and run again it said nothing of "
            f"'resumed at step {durable}' or a later one:\n{said}"
        )
    return (
        f"killed when step {durable} was durable, resumed at step {again.resumed}, ended well; "
        f"{time.monotonic() - began:.0f} s for both runs"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no example {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    failed = 0
    for name in options.names or names():
        if lacking := missing(EXAMPLES / f"{name}.py"):
            print(f"{name:18} SKIPPED: {', '.join(lacking)} is not installed", flush=True)
            continue
        with Daemon("--dram", "256MiB") as daemon, tempfile.TemporaryDirectory() as directory:
            daemon.start()
            try:
                print(f"{name:18} {try_out(name, daemon, Path(directory))}", flush=True)
            except (ExampleError, RuntimeError) as error:
                failed += 1
                print(f"{name:18} FAILED: {error}", flush=True)
            daemon.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
