"""What a process shares with itself and its children without a file: a pipe and socket pairs with
bytes in them, an eventfd, an epoll, a memfd, shared memory, a thread that waits for a pipe.

Shared memory that has a name is a file in /dev/shm: where the target goes on after a snapshot, a
restored process finds what was written later, too. So only what is known to be written is read."""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import socket
import threading
from multiprocessing import shared_memory

from tests.transparent.targets.steps import Log, words

BYTES = 1 << 20


class Shared:
    """All of them. A turn moves one message through each, with the one before still in there."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.stream = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.packets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.event = os.eventfd(5)
        self.poll = select.epoll()
        self.poll.register(self.event, select.EPOLLIN)
        self.poll.register(self.reading, select.EPOLLIN)
        self.file = os.memfd_create("target")
        os.ftruncate(self.file, BYTES)
        self.mapped = mmap.mmap(self.file, BYTES)
        self._named = shared_memory.SharedMemory(create=True, size=BYTES)
        assert self._named.buf is not None
        self.memory = self._named.buf
        self._questions, self._answers = os.pipe(), os.pipe()
        threading.Thread(target=self._answer, daemon=True).start()

    def put(self, step: int) -> None:
        text = hashlib.sha256(str(step).encode()).digest()
        os.write(self.writing, text)
        self.stream[0].sendall(text)
        self.packets[0].send(text)
        at = step * len(text) % BYTES
        self.mapped[at : at + len(text)] = text
        self.memory[at : at + len(text)] = text

    def take(self, step: int) -> str:
        events = sorted(kind for _, kind in self.poll.poll(0))
        os.write(self._questions[1], b"?")
        parts = [
            os.read(self.reading, 32), self.stream[1].recv(32), self.packets[1].recv(32),
            os.read(self._answers[0], 64), os.pread(self.file, BYTES, 0),
            bytes(self.memory[: (step + 1) * 32]),
        ]  # fmt: skip
        counted = os.eventfd_read(self.event)
        os.eventfd_write(self.event, counted)
        return f"{events} {counted} {hashlib.sha256(b''.join(parts)).hexdigest()}"

    def close(self) -> None:
        del self.memory
        self._named.close()
        self._named.unlink()

    def _answer(self) -> None:
        turn = 0
        while os.read(self._questions[0], 1):
            turn += 1
            os.write(self._answers[1], str(turn).encode())


def main() -> None:
    options = words().parse_args()
    log = Log(options)
    shared = Shared()
    shared.put(0)
    for step in range(1, options.steps + 1):
        shared.put(step)
        log.step(step, shared.take(step))
    shared.close()


if __name__ == "__main__":
    main()
