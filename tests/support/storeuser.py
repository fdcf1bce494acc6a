"""What one process does in a job's torch store, as the first word says; prints what came out."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pccheck.nodes.stores import JobStore, StoreError

ADDS = 1500


def swap(count: str) -> None:
    """Tries to be the first at so many keys."""
    store, mine = JobStore(), str(os.getpid()).encode()
    for number in range(int(count)):
        print(store.swap(f"race/{number}", mine).decode(), flush=True)


def add() -> None:
    """From two threads, each with a store of its own."""

    def run() -> None:
        store = JobStore()
        for _ in range(ADDS):
            store.add("sum", 1)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def group(kind: str, place: str) -> None:
    """Before and after init_process_group(), and after the end of the group."""
    store = JobStore()
    said = []
    try:
        store.add("n", 1)
    except StoreError as error:
        said.append(str(error))
    options: dict[str, Any] = {
        "env": {"init_method": "env://"},
        "file": {"init_method": Path(place).as_uri()},
        "hash": {"store": dist.HashStore()},
        "wrapped": {"store": dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore()))},
    }[kind]
    dist.init_process_group("gloo", rank=0, world_size=1, **options)
    store.set("key", b"value")
    held = dist.distributed_c10d._get_default_store()
    while isinstance(held, dist.PrefixStore):
        held = held.underlying_store
    said += [store.get(["key", "none"]), store.swap("key", b"other"), store.wait("none", 0.01)]
    said += [store.add("n", 2), held.get("pccheck/key"), bool(store._socket)]
    print(repr(said), flush=True)
    os._exit(0)


def main() -> None:
    {"swap": swap, "add": add, "group": group}[sys.argv[1]](*sys.argv[2:])
