"""PCcheck on a GPU as a contender, DCP at its settings for GPUs, and what the benches share."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench import common
from bench.common import GIB, MIB, BenchError, sync_path, tensors_of
from bench.gpu.model import DTYPES, MODELS, TINY, Training
from bench.ours import Ours
from bench.rivals import Finish, Rivals, State, stager_kept
from pccheck import Checkpoint, PCcheckClient
from tests.support.realgpu import expandable_segments

#: How PCcheck takes the bytes, by the name in the tables: arguments of PCcheckClient.
OURS: dict[str, dict[str, Any]] = {
    "pull": {"transfer": "pull"},
    "push": {"transfer": "push"},
    "device": {"snapshot": "device"},
    "expandable": {"transfer": "pull"},
    "memory": {"durable_every": "auto"},
    "last step": {},
}
#: Whose state lies in expandable segments.
EXPANDABLE = "expandable"
#: Whose checkpoints stay on the GPU: checkpoint(to="device").
LAST_STEP = "last step"
MODES = ("pull", "push", "device")
DCP, DCP_PROCESS, CHECKFREQ = "DCP thread", "DCP process", "CheckFreq"
LIMIT_S = 120.0

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """One of ours as it is named: "pull", or "pull:N=2,M=1.5,p=4", or "device:durable=100". On
    the CPU PCcheck pushes."""

    way: str
    mode: dict[str, Any]
    in_flight: int = 0  # N; 0: the daemon's default
    dram: float = 2.0  # M, in checkpoints
    writers: int = 0  # p

    @staticmethod
    def named(name: str) -> str:
        return name.partition(":")[0]

    @classmethod
    def of(cls, name: str, device: torch.device) -> Setting:
        way, rest = cls.named(name), name.partition(":")[2]
        found = dict(pair.split("=") for pair in rest.split(",") if pair)
        mode = OURS[way] if device.type == "cuda" else {}
        if "durable" in found:
            mode = mode | {"durable_every": int(found["durable"])}
        numbers = int(found.get("N", 0)), float(found.get("M", 2)), int(found.get("p", 0))
        return cls(way, mode, *numbers)

    def flags(self, payload_bytes: int) -> list[str]:
        spare_mib = 256 if self.dram >= 2 else 0
        dram_mib = max(32, int(self.dram * payload_bytes) // MIB + spare_mib)
        found = ["--dram", f"{dram_mib}MiB"]
        if self.in_flight:
            found += ["--slots", str(self.in_flight + 1), "--keep", "1"]
        return found + (["--writers", str(self.writers)] if self.writers else [])


class Node(Ours):
    """One daemon for a whole bench; `connect` starts a client of one mode, `leave` ends it."""

    def __init__(self, state: State, storage: Path, payload_bytes: int, *flags: str) -> None:
        super().__init__(state, storage, payload_bytes, *flags)
        self.mode: dict[str, Any] = {}
        self.handles: list[Checkpoint] = []

    def __enter__(self) -> Node:
        self.daemon.start()
        self.daemon.open_to_everybody()
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
        self.to = None
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
        return copy_seconds(self.status(), "bench", self.step)

    def endings(self) -> dict[str, int]:
        """How many of the client's checkpoints ended, or are, in which state."""
        found: dict[str, int] = {}
        for handle in self.handles:
            name = handle.state.name.lower()
            found[name] = found.get(name, 0) + 1
        return found


def copy_seconds(status: Document, job: str, step: int) -> float:
    """How long a checkpoint's copy took from its admission, as the daemon saw it."""
    for rank in status["ranks"]:
        for found in reversed(rank["checkpoints"]):
            if (rank["job"], found["step"]) == (job, step) and found["copied_s"] is not None:
                return float(found["copied_s"]) - float(found["waited_s"] or 0)
    raise BenchError(f"the daemon's status does not tell when step {step} was copied")


class GpuRivals(Rivals):
    """Rivals whose copies run beside training, on a stream of their own, with pinned memory that is
    kept; the next update waits for them. DCP writes in a thread or in a process. CheckFreq, as its
    paper describes it, has one checkpoint at a time in the background."""

    def __init__(self, state: State, device: torch.device) -> None:
        super().__init__(state)
        self.on_gpu = device.type == "cuda"
        self.staged: Callable[[], object] = lambda: None
        self.hook = state.optimizer.register_step_pre_hook(lambda *_: self.wait())
        self.stagers: dict[str, DefaultStager] = {}
        self.copy: dict[str, torch.Tensor] = {}
        self.side: Any = torch.cuda.Stream(device) if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.save[DCP] = lambda directory: self._dcp(DCP, directory)
        self.save[DCP_PROCESS] = lambda directory: self._dcp(DCP_PROCESS, directory)
        self.save[CHECKFREQ] = self._checkfreq
        os.environ.setdefault("MASTER_ADDR", "localhost")  # for the process of DCP

    def _dcp(self, name: str, directory: Path) -> Finish:
        if name not in self.stagers:
            self.stagers[name] = stager_kept(of_gpu=self.on_gpu, shared=name == DCP_PROCESS)
        stager = self.stagers[name]
        # It copies on this stream, which does not wait for the last update otherwise.
        side: torch.cuda.Stream | None = getattr(stager, "_staging_stream", None)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        elif self.on_gpu:
            torch.cuda.current_stream().synchronize()
        by = AsyncCheckpointerType.PROCESS if name == DCP_PROCESS else AsyncCheckpointerType.THREAD
        response = self._begin(directory, stager, by)
        if self.on_gpu:
            self.staged = response.staging_completion.result
        return self._rest(directory, response)

    def _checkfreq(self, directory: Path) -> Finish:
        tensors = tensors_of(self.state.model, self.state.optimizer)
        if self.copy.keys() != tensors.keys():
            self.copy = {
                name: torch.empty_like(t, device="cpu", pin_memory=self.on_gpu)
                for name, t in tensors.items()
            }
        copied: Callable[[], object] = lambda: None  # noqa: E731
        if self.on_gpu:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for name, tensor in tensors.items():
                self.copy[name].copy_(tensor, non_blocking=True)
        if self.on_gpu:
            event = self.side.record_event()
            copied = event.synchronize
            self.staged = lambda: torch.cuda.current_stream().wait_event(event)

        def finish() -> None:
            copied()
            path = directory / "state.pt"
            torch.save(self.copy, path)
            sync_path(path)
            sync_path(directory)

        return finish

    def wait(self) -> None:
        self.staged()
        self.staged = lambda: None

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()
        for stager in self.stagers.values():
            stager.close()
        super().__exit__(*exception)


# -- what every bench here has -------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    made = common.arguments(description)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--model", choices=MODELS, default="gpt2-medium")
    made.add_argument("--dtype", choices=sorted(DTYPES), help="default: as the model is trained")
    made.add_argument("--tiny", action="store_true", help="a small model, to try the bench")
    made.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    made.add_argument("--batch", type=int, default=0, help="default: the model's")
    made.add_argument("--budget-s", type=float, default=120, help="nothing is begun after that")
    made.add_argument("--json", type=Path, help="write there, not into bench/results")
    return made


class Report:
    """The bench's document; with --json it is written after every part, so that what was measured
    stays when the bench is ended."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.path: Path | None = options.json
        self.document: Document = common.facts_of(options.directory)
        self.start_s = time.monotonic()
        self.budget_s: float = options.budget_s

    def keep(self, **parts: object) -> None:
        # To ask would start CUDA, and forbid forks.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.document["gpu"] = torch.cuda.get_device_name()
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


@contextmanager
def expandable(device: torch.device) -> Iterator[None]:
    """What is allocated meanwhile lies in expandable segments."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()  # no block that is there already is used for it
    expandable_segments(on=True)
    try:
        yield
    finally:
        expandable_segments(on=False)


def training_of(options: argparse.Namespace, dtype: str = "", seed: int = 1) -> Training:
    shape = TINY if options.tiny else MODELS[options.model]
    if options.layers and shape.layers:
        shape = replace(shape, layers=options.layers)
    return Training(
        shape, torch.device(options.device), DTYPES[dtype or options.dtype or shape.dtype],
        options.batch or shape.batch, seed,
    )  # fmt: skip


def node_of(training: Training, directory: Path, setting: Setting | None = None) -> Node:
    payload = training.payload_bytes()
    common.require_room(directory, 6 * payload + GIB // 4)
    storage = Path(tempfile.mkdtemp(prefix="node-", dir=directory)) / "storage"
    flags = (setting or Setting("", {})).flags(payload)
    if common.file_system(directory) == "tmpfs":
        flags.append("--allow-any-filesystem")
    return Node(training.state, storage, payload, *flags)


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
