"""PCcheck on a GPU as a contender, DCP at its settings for GPUs, and what the benches share."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import common
from bench.common import GIB, MIB, BenchError
from bench.gpu.model import DTYPES, MEDIUM, TINY, Shape, Training
from bench.ours import Ours
from bench.rivals import KEPT, Finish, Rivals, State, stager_kept
from pccheck import Checkpoint, PCcheckClient

#: How PCcheck takes the bytes, by the name in the tables: arguments of PCcheckClient.
ON_GPU: dict[str, dict[str, Any]] = {
    "pull": {"transfer": "pull"},
    "push": {"transfer": "push"},
    "device": {"snapshot": "device"},
}
ON_CPU: dict[str, dict[str, Any]] = {"push": {"transfer": "push"}}
DCP = "DCP async_save"
LIMIT_S = 120.0

Document = dict[str, Any]


def modes(device: torch.device) -> dict[str, dict[str, Any]]:
    return ON_GPU if device.type == "cuda" else ON_CPU


class Node(Ours):
    """One daemon for a whole bench; `connect` starts a client of one mode, `leave` ends it."""

    def __init__(self, state: State, storage: Path, payload_bytes: int, *flags: str) -> None:
        dram = f"{2 * payload_bytes // MIB + 256}MiB"  # M >= 2m: two are under way at once
        super().__init__(state, storage, payload_bytes, "--dram", dram, *flags)
        self.mode: dict[str, Any] = {}
        self.handles: list[Checkpoint] = []

    def __enter__(self) -> Node:
        self.daemon.start()
        return self

    def _connect(self) -> None:
        self.client = PCcheckClient(
            job="bench", socket=str(self.daemon.socket), on_error="raise", stall_limit_s=60,
            **self.mode,
        )  # fmt: skip
        self.client.attach(model=self.state.model, optimizer=self.state.optimizer)

    def connect(self, mode: dict[str, Any]) -> None:
        self.leave()
        self.mode = mode | {"fresh": True}
        self.handles = []
        self._connect()

    def reconnect(self, *, restart_daemon: bool = False) -> None:
        """Like a restarted trainer: the newest checkpoint will be restored."""
        self.mode = self.mode | {"fresh": False}
        super().reconnect(restart_daemon=restart_daemon)

    def leave(self) -> None:
        """Ends the client, if there is one; also when ending it fails."""
        client = self.__dict__.pop("client", None)
        if client is not None:
            client.close()

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self.leave()
                self.daemon.stop()
        finally:
            self.daemon.cleanup()

    def start_save(self) -> Checkpoint:
        self.handles.append(super().start_save())
        return self.handles[-1]

    def chosen(self) -> str:
        """How the connected client's bytes are transferred, and why."""
        for session in self.status()["sessions"]:
            if session["pid"] == os.getpid():
                return f"{session['transfer']}: {session['transfer_reason']}".removesuffix(": ")
        return "not connected"

    def copy_seconds(self) -> float:
        """How long the newest checkpoint's copy took from its admission, as the daemon saw it."""
        for rank in self.status()["ranks"]:
            for found in reversed(rank["checkpoints"]):
                if found["step"] == self.step and found["copied_s"] is not None:
                    return float(found["copied_s"]) - float(found["waited_s"] or 0)
        raise BenchError(f"the daemon's status does not tell when step {self.step} was copied")

    def endings(self) -> dict[str, int]:
        """How many of the client's checkpoints ended, or are, in which state."""
        found: dict[str, int] = {}
        for handle in self.handles:
            name = handle.state.name.lower()
            found[name] = found.get(name, 0) + 1
        return found


class GpuRivals(Rivals):
    """DCP for GPUs: a kept stager with pinned memory that copies on a stream of its own; the next
    update waits for it."""

    def __init__(self, state: State, device: torch.device) -> None:
        super().__init__(state)
        self.staged: Callable[[], object] = lambda: None
        self.hook: Any = None
        if device.type == "cuda":
            self.save[DCP] = self._dcp_pinned
        else:
            self.save[DCP] = self.save[KEPT]

    def _dcp_pinned(self, directory: Path) -> Finish:
        if self.stager is None:
            self.stager = stager_kept(of_gpu=True)
            self.hook = self.state.optimizer.register_step_pre_hook(lambda *_: self.wait())
        # It copies on this stream, which does not wait for the last update otherwise.
        side: torch.cuda.Stream | None = getattr(self.stager, "_staging_stream", None)
        if side is None:
            torch.cuda.current_stream().synchronize()
        else:
            side.wait_stream(torch.cuda.current_stream())
        response = self._begin(directory, self.stager)
        self.staged = response.staging_completion.result
        return self._rest(directory, response)

    def wait(self) -> None:
        self.staged()
        self.staged = lambda: None

    def __exit__(self, *exception: object) -> None:
        if self.hook is not None:
            self.hook.remove()
        super().__exit__(*exception)


# -- what every bench here has -------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    made = common.arguments(description)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    made.add_argument("--tiny", action="store_true", help="a small model, to try the bench")
    made.add_argument("--layers", type=int, default=0, help="default 24, with --tiny 2")
    made.add_argument("--batch", type=int, default=0, help="default 16, with --tiny 2")
    made.add_argument("--budget-s", type=float, default=120, help="nothing is begun after that")
    made.add_argument("--json", type=Path, help="write there, not into bench/results")
    made.add_argument("--daemon-flags", default="", help="in one word: '--writers 4'")
    return made


class Report:
    """The bench's document; with --json it is written after every part, so that what was measured
    stays when the bench is ended."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.path: Path | None = options.json
        self.document: Document = common.facts_of(options.directory)
        if options.device == "cuda":
            self.document["gpu"] = torch.cuda.get_device_name()
        self.start_s = time.monotonic()
        self.budget_s: float = options.budget_s

    def keep(self, **parts: object) -> None:
        self.document.update(parts)
        if self.path is not None:
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(self.document, indent=1) + "\n")
            fresh.replace(self.path)

    def has_time(self) -> bool:
        return time.monotonic() - self.start_s < self.budget_s

    def finish(self, lines: list[str]) -> None:
        if self.path is None:
            head = common.heading(f"GPU: {self.name}", self.document)
            common.write_results(f"gpu-{self.name}", self.document, "\n".join([*head, *lines, ""]))
        else:
            self.keep(table=lines)
            print("\n".join(lines))


def training_of(options: argparse.Namespace, dtype: str = "", seed: int = 1) -> Training:
    shape: Shape = TINY if options.tiny else MEDIUM
    if options.layers:
        shape = replace(shape, layers=options.layers)
    batch = options.batch or (2 if options.tiny else 16)
    return Training(
        shape, torch.device(options.device), DTYPES[dtype or options.dtype], batch, seed
    )


def node_of(training: Training, directory: Path, options: argparse.Namespace) -> Node:
    common.require_room(directory, 6 * training.payload_bytes() + GIB // 4)
    return Node(
        training.state, directory / "storage", training.payload_bytes(),
        *options.daemon_flags.split(),
    )  # fmt: skip


@contextmanager
def recorded(failures: list[str], what: str) -> Iterator[None]:
    """Records a part that fails; the others continue."""
    try:
        yield
    except Exception as error:
        failures.append(f"{what}: {type(error).__name__}: {error}"[:500])
        print(f"  {failures[-1]}", file=sys.stderr, flush=True)


def begin(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The options. From now on a bench that gets a signal to end also ends its daemon."""
    options = made.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("torch finds no GPU; --device cpu --tiny tries the bench without one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warnings.simplefilter("ignore", FutureWarning)
    return options
