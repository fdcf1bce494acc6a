"""A node with GPUs: one daemon and its trainers, each with the stand-in's faults and counters."""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any, Self

from . import fakegpu
from .daemon import Daemon
from .fakegpu import Faults, StandinDaemon
from .gputrainer import PARTS, GpuTrainer, Part
from .manager import ServedDaemon


class KeptDaemon(ServedDaemon):
    """A daemon with stand-in GPUs under a manager that keeps its descriptors."""

    def __init__(self, *flags: str, gpus: dict[str, str], **options: Any) -> None:
        super().__init__(*flags, **options)
        self.gpus = gpus

    def environment(self) -> dict[str, str]:
        return super().environment() | self.gpus


class Node:
    """`node.faults` is for the daemon's driver, `trainer.faults` for a trainer's. At the end a
    daemon that still runs must map no memory of dead trainers.

    `blind`: the daemon has no driver. `driver`: faults of the daemon's driver from the start on.
    `visible`: the GPUs that the daemon sees. `memory_bytes`: all memory of a GPU; each context
    takes `context_bytes` of it. `kept`: a manager keeps the descriptors of a killed daemon for the
    next daemon. `lie`: a name of tests/standin/lie.c, for the drivers of all processes. `dead`:
    what becomes of the memory of a dead process, as in `standin.environment`.
    """

    def __init__(
        self,
        *flags: str,
        devices: int = 1,
        visible: str = "",
        blind: bool = False,
        kept: bool = False,
        driver: dict[str, int] | None = None,
        memory_bytes: int = 0,
        context_bytes: int = 0,
        lie: str = "",
        dead: str = "scramble",
        **daemon_options: Any,
    ) -> None:
        self.directory = fakegpu.new_directory()
        self._gpus: dict[str, Any] = {
            "devices": devices, "memory_bytes": memory_bytes, "context_bytes": context_bytes,
            "lie": lie, "dead": dead,
        }  # fmt: skip
        self.faults = Faults(self.directory / "daemon.faults")
        self.faults.set(**driver or {})
        self.daemon: Daemon
        self.trainers: list[GpuTrainer] = []
        self._numbers = itertools.count()
        if fakegpu.is_real() or blind:
            self.daemon = Daemon(*flags, **daemon_options)
        else:
            gpus = fakegpu.environment(
                self.directory, visible=visible, faults=self.faults, **self._gpus
            )
            made = KeptDaemon if kept else StandinDaemon
            self.daemon = made(*flags, gpus=gpus, **daemon_options)

    def start(self) -> Self:
        self.daemon.start()
        return self

    def ready(self, parts: tuple[Part, ...] = PARTS, **options: Any) -> GpuTrainer:
        """A trainer after step 2; step 1 is durable, and all tensors are exposed."""
        stall_limit_s = options.pop("stall_limit_s", None)
        trainer = self.connect(parts, **options)
        assert trainer.save() == "durable"
        if stall_limit_s is not None:
            trainer.shorten(stall_limit_s)
        trainer.step()
        return trainer

    def connect(
        self, parts: tuple[Part, ...] = PARTS, *, environment: dict[str, str] | None = None,
        **options: Any,
    ) -> GpuTrainer:  # fmt: skip
        """A trainer with a client for job "job"."""
        trainer = self.process(**environment or {})
        self.open(trainer, parts, **options)
        return trainer

    def process(self, **environment: str) -> GpuTrainer:
        """A trainer that has not loaded the driver yet; its faults can be set."""
        faults = Faults(self.directory / f"trainer-{next(self._numbers)}.faults")
        gpus = {}
        if not fakegpu.is_real():
            gpus = fakegpu.environment(self.directory, faults=faults, **self._gpus)
        trainer = GpuTrainer(**gpus | environment)
        trainer.faults = faults
        self.trainers.append(trainer)
        return trainer

    def open(
        self, trainer: GpuTrainer, parts: tuple[Part, ...] = PARTS, **options: Any
    ) -> None:  # fmt: skip
        options.setdefault("job", "job")
        trainer.open(list(parts), socket=str(self.daemon.socket), **options)

    def status(self) -> dict[str, Any]:
        return self.daemon.status()

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        until = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < until, self.status()
            time.sleep(0.05)

    def transfer(self) -> tuple[str, str]:
        """How GPU tensors of the only session are transferred, and why."""
        (session,) = self.status()["sessions"]
        return session["transfer"], session["transfer_reason"]

    def alive(self) -> bool:
        process = self.daemon.process
        return process is not None and process.poll() is None

    def be_honest(self) -> None:
        """The driver of the next daemon and of the next trainers does not lie."""
        self._gpus["lie"] = ""
        self.daemon.gpus["PCCHECK_STANDIN_LIE"] = ""  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Kills the trainers, and waits until none of their memory is mapped."""
        for trainer in self.trainers:
            trainer.kill()
        if self.alive() and isinstance(self.daemon, (StandinDaemon, KeptDaemon)):
            self.daemon.kill(signal.SIGCONT)
            self.faults.release_copies()
            self.faults.wait_for(lambda f: f.open_mappings == 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        try:
            self.settle()
        finally:
            for trainer in self.trainers:
                trainer.__exit__(None, None, None)
            self.daemon.cleanup()
            shutil.rmtree(self.directory, ignore_errors=True)


Start = Callable[..., Node]  #: the fixture `start_node`
