"""The store that torchrun's agent brings, in a process that can be stopped and killed."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Self

from tests.support.programs import CONTEXT


def _serve(link: Connection) -> None:
    from torch import distributed

    store = distributed.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False
    )
    link.send(store.port)
    while link.recv() == "empty":
        link.send(sum(map(store.delete_key, store.list_keys())))


class TorchStore:
    """The end of the block kills it."""

    def __init__(self) -> None:
        self._link, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.port: int = self._link.recv()

    def environment(self, run: str, per_node: int, local_rank: int) -> dict[str, str]:
        """Of a rank, as torchrun sets it."""
        return {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": run,
            "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": str(per_node),
            "LOCAL_RANK": str(local_rank),
        }  # fmt: skip

    def stop(self) -> None:
        """It answers no more, and its connections stay."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def empty(self) -> int:
        """It loses all keys; how many."""
        self._link.send("empty")
        return int(self._link.recv())

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
