"""PCcheck as a contender: a real daemon process, this process as the trainer."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from bench.common import GIB, MIB, BenchError, cpu_seconds
from bench.rivals import State
from pccheck import Checkpoint, PCcheckClient
from tests.support import daemon

DURABLE_LIMIT_S = 120.0


class Daemon(daemon.Daemon):
    """pccheckd as users start it. The daemons of the tests check each of their calls; they are
    forked from a process that has imported everything, and so are ready six times sooner."""

    module = "pccheckd"


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint. Seconds, from the call of checkpoint(), but for `persist_s` and CPU."""

    call_s: float  # until checkpoint() returned
    gate_s: float  # until the tensors might be changed
    durable_s: float
    persist_s: float  # from the first chunk's write to durable, as the daemon saw it
    cpu_client_s: float
    cpu_daemon_s: float


class Ours(AbstractContextManager["Ours"]):
    """Daemon, client and attached state; `save` takes one checkpoint and waits for it."""

    def __init__(
        self, state: State, storage: Path, payload_bytes: int, *flags: str,
        durable_every: int | Literal["auto"] = 1,
    ) -> None:  # fmt: skip
        storage.mkdir()
        dram_bytes = 2 * payload_bytes if payload_bytes <= 2 * GIB else payload_bytes * 5 // 4
        # Of a small state two chunks, the least that a daemon takes.
        self.flags = ("--dram", f"{max(32, dram_bytes // MIB)}MiB", *flags)
        self.daemon = Daemon(*self.flags, storage=storage)
        self.state = state
        self.durable_every = durable_every
        self.step = 0
        self.to: Literal["device", None] = None

    def __enter__(self) -> Self:
        self.daemon.start()
        self._connect()
        self.client.restore()
        return self

    def _connect(self) -> None:
        self.client = PCcheckClient(
            job="bench", socket=str(self.daemon.socket), on_error="raise",
            durable_every=self.durable_every,
        )  # fmt: skip
        self.client.attach(model=self.state.model, optimizer=self.state.optimizer)
        # checkpoint() blocks until the client has seen this optimizer step; without gradients the
        # step changes nothing.
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.optimizer.step()

    def reconnect(self, *, restart_daemon: bool = False) -> None:
        """Restores like a restarted trainer; optionally after the daemon has lost its memory."""
        self.client.close()
        if restart_daemon:
            self.daemon.stop()
            self.daemon.start()
        self._connect()

    def __exit__(self, *_exception: object) -> None:
        try:
            self.client.close()
            self.daemon.stop()
        finally:
            self.daemon.cleanup()

    def start_save(self) -> Checkpoint:
        """Only the call; the optimizer's next step waits for the copy."""
        self.step += 1
        return self.client.checkpoint(step=self.step, to=self.to)

    def save(self) -> Saved:
        daemon_before = cpu_seconds(self.daemon.pid)
        client_before = time.process_time()
        start = time.monotonic()
        checkpoint = self.start_save()
        called = time.monotonic()
        self.client.gate()
        gated = time.monotonic()
        checkpoint.wait_durable(DURABLE_LIMIT_S)
        durable = time.monotonic()
        time.sleep(0.02)  # what the daemon still does for it afterwards counts, too
        return Saved(
            call_s=called - start,
            gate_s=gated - start,
            durable_s=durable - start,
            persist_s=self._persist_seconds(),
            cpu_client_s=time.process_time() - client_before,
            cpu_daemon_s=cpu_seconds(self.daemon.pid) - daemon_before,
        )

    def save_into_memory(self) -> Saved:
        """A checkpoint that the daemon's memory holds whole. The first one streams through memory
        that is still growing: it is thrown away, and the growth waited for."""
        self.save()
        deadline = time.monotonic() + DURABLE_LIMIT_S
        while (has := self.status()["ranks"][0]["dram"])["bytes"] < has["wanted_bytes"]:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"the daemon took {has['bytes'] // MIB} MiB of DRAM, not the "
                    f"{has['wanted_bytes'] // MIB} MiB that two checkpoints need; free some memory"
                )
            time.sleep(0.005)
        return self.save()

    def status(self) -> Any:
        return self.daemon.status()

    def _persist_seconds(self) -> float:
        """From the first chunk's write to the durable record, from the daemon's status."""
        for rank in self.status()["ranks"]:
            for found in reversed(rank["checkpoints"]):
                times = found["times"]
                if found["step"] == self.step and times["durable"]:
                    return float(times["durable"] - times["first_write"]) * 1e-9
        raise BenchError(f"the daemon's status does not tell when step {self.step} became durable")
