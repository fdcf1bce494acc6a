"""PCcheck as a contender, and its engine held to the policy of CheckFreq or GPM.

CheckFreq's policy is one checkpoint in flight; GPM's is that training waits until each checkpoint
is durable. Against the scheme of the same name this compares implementations, against PCcheck
policies.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.common import MIB, BenchError
from bench.figures.contender import Contender, Landed
from bench.figures.trainers import Trainer
from bench.ours import DURABLE_LIMIT_S, Ours
from pccheck import Checkpoint
from pccheck_store.observer import Observer
from pccheckctl.output.documents import rows


@dataclass(frozen=True, slots=True)
class Knobs:
    """The knobs of the paper's Table 2."""

    in_flight: int = 2  # N
    dram: float = 2.0  # M, in checkpoints
    chunks: int = 16  # m / b
    writers: int = 2  # p
    engine: str = "pwrite"
    blocking: bool = False  # until durable, as GPM
    durable_every: int | Literal["auto"] = 1  # "auto": in memory, and written by an idle disk

    def flags(self, payload_bytes: int) -> list[str]:
        # Chunks are whole MiB; the daemon takes memory for two of them at least.
        chunk = max(1, -(-payload_bytes // self.chunks // MIB)) * MIB
        dram = max(2 * chunk, int(self.dram * payload_bytes) // chunk * chunk)
        if self.durable_every != 1:  # the manifest of a state may take a chunk of its own
            dram += 3 * chunk
        return [
            "--slots", str(self.in_flight + 1), "--keep", "1", "--writers", str(self.writers),
            "--chunk", f"{chunk // MIB}MiB", "--dram", f"{dram // MIB}MiB",
            "--engine", self.engine,
        ]  # fmt: skip


class Service(Contender):
    def __init__(self, trainer: Trainer, directory: Path, knobs: Knobs) -> None:
        super().__init__(trainer, directory)
        self.knobs = knobs
        self.storage = directory / "storage"
        self.ours: Ours | None = None
        self.handle: Checkpoint | None = None
        self.warm_saves = knobs.in_flight + 2  # every slot is written, the memory has grown

    def start(self) -> None:
        flags = self.knobs.flags(self.payload_bytes)
        self.ours = Ours(
            self.state, self.storage, self.payload_bytes, *flags,
            durable_every=self.knobs.durable_every,
        )  # fmt: skip
        self.ours.__enter__()

    def save(self, step: int) -> None:
        assert self.ours is not None
        self.handle = self.ours.client.checkpoint(step=step)
        if self.knobs.blocking:
            self.handle.wait_durable(DURABLE_LIMIT_S)

    def gate(self) -> None:
        assert self.ours is not None
        self.ours.client.gate()

    def finish(self) -> None:
        if self.handle is not None:
            self.handle.wait_durable(DURABLE_LIMIT_S)

    def landed(self) -> Landed:
        return self._reached("durable")

    def kept(self) -> Landed:
        return self._reached("sealed")

    def _reached(self, moment: str) -> Landed:
        """From the daemon's trace, where a checkpoint appears a moment after its handle's end."""
        assert self.ours is not None and self.handle is not None
        deadline = time.monotonic() + DURABLE_LIMIT_S
        with Observer(str(self.ours.daemon.socket)) as observer:
            while time.monotonic() < deadline:
                found = rows(observer.trace(600), "checkpoints")
                landed = [(one["step"], one[moment] * 1e-9) for one in found if one[moment]]  # type: ignore[operator]
                if any(step == self.handle.step for step, _ in landed):
                    return landed  # type: ignore[return-value]
                time.sleep(0.005)
        raise BenchError(f"the daemon's trace has no end of step {self.handle.step}")

    def other_engine(self) -> str:
        """Why the daemon does not write as the knobs say; empty if it does."""
        assert self.ours is not None
        return str(self.ours.status()["daemon"]["engine_reason"])

    def restart(self) -> None:
        """A restarted trainer, and a daemon that has lost its memory."""
        assert self.ours is not None
        self.ours.reconnect(restart_daemon=True)

    def reconnect(self) -> None:
        assert self.ours is not None
        self.ours.reconnect()

    def load(self) -> None:
        assert self.ours is not None
        self.ours.client.restore()

    def stop(self) -> None:
        try:
            if self.ours is not None:
                self.ours.__exit__()
        finally:
            shutil.rmtree(self.storage, ignore_errors=True)
