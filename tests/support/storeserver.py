"""A torch store's server, as torchrun's agent or rank 0 is one. Prints its port."""

from __future__ import annotations

import signal

from torch.distributed import TCPStore


def main() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()
