"""Gemini (SOSP '23): checkpoints in the DRAM of a peer machine, here a process behind loopback.

The link is capped to a rate. The GPU has no memory for a copy, so an update waits until the state
has been sent. The peer keeps two buffers: a checkpoint under way does not destroy the previous one.
Nothing is on a disk: when both machines go, the checkpoint is lost.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.common import BenchError, tensors_of
from bench.figures.contender import Contender, bytes_of
from bench.figures.peer import LIMIT_S, READ, WRITE, receive
from bench.figures.trainers import Trainer

PART_BYTES = 256 * 1024


class Gemini(Contender):
    def __init__(self, trainer: Trainer, directory: Path, link: float) -> None:
        super().__init__(trainer, directory)
        self.link = link  #: bytes a second
        self.sent = threading.Event()
        self.sent.set()
        self._failure: OSError | None = None
        self._thread: threading.Thread | None = None
        self._peer: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "bench.figures.peer", str(self.payload_bytes)]
        self._peer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._peer.stdout is not None
        port = self._peer.stdout.readline()
        if not port.strip():
            raise BenchError("Gemini's peer did not start; what it printed is above")
        self._socket = socket.create_connection(("127.0.0.1", int(port)), LIMIT_S)

    def _parts(self) -> list[memoryview]:
        tensors = tensors_of(self.state.model, self.state.optimizer).values()
        flat = [bytes_of(t) for t in tensors]
        return [
            one[offset : offset + PART_BYTES]
            for one in flat
            for offset in range(0, len(one), PART_BYTES)
        ]

    def save(self, step: int) -> None:
        self.finish()
        self.sent.clear()
        self._thread = threading.Thread(target=self._send, args=(step,), daemon=True)
        self._thread.start()

    def _send(self, step: int) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(WRITE)
            start, done = time.monotonic(), 0
            for part in self._parts():
                self._socket.sendall(part)
                done += len(part)
                _sleep_until(start + done / self.link)
            receive(self._socket, memoryview(bytearray(1)))
            self._landed.append((step, time.monotonic()))
        except OSError as error:
            self._failure = error
        finally:
            self.sent.set()

    def gate(self) -> None:
        self.sent.wait()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise BenchError(f"Gemini's peer failed: {self._failure}")

    def restart(self) -> None:
        pass  # the peer's memory is what survives

    def load(self) -> None:
        assert self._socket is not None
        self._socket.sendall(READ)
        start, done = time.monotonic(), 0
        for part in self._parts():
            receive(self._socket, part)
            done += len(part)
            _sleep_until(start + done / self.link)

    def stop(self) -> None:
        try:
            self.finish()
        finally:
            if self._socket is not None:
                self._socket.close()
            if self._peer is not None:  # ends when its connection does
                if self._socket is None:
                    self._peer.kill()
                self._peer.wait(LIMIT_S)


def _sleep_until(due: float) -> None:
    left = due - time.monotonic()
    if left > 0:
        time.sleep(left)
