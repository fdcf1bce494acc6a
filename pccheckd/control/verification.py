"""`verify` through the daemon: what it reads, and its document."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from pccheck_native import _core, catalog
from pccheck_native.subset import Subset, verify_part
from pccheckd.observe.report import SCHEMA, Document


def verify(
    volumes: Iterable[tuple[str, _core.Volume]],
    sequence: int,
    part: Subset | None = None,
    *,
    gone: Callable[[], bool] = lambda: False,
) -> Document:
    """Reads and checks one checkpoint (0: every one), or a part of it. Blocks until it is read;
    starts no further one when the caller has `gone`."""
    results: list[Document] = []
    for path, volume in volumes:
        for item in catalog.checkpoints_of(volume, path):
            if sequence in (0, item.sequence) and not gone():
                with contextlib.suppress(FileNotFoundError):  # newer ones have replaced it
                    results.append(_verified(volume, item, part))
    return {
        "schema": SCHEMA,
        "checkpoints": results,
        "damaged": sum(item["problem"] not in ("", "UNREADABLE") for item in results),
        "unreadable": sum(item["problem"] == "UNREADABLE" for item in results),
    }


def _verified(volume: _core.Volume, item: catalog.Checkpoint, part: Subset | None) -> Document:
    began_ns = time.monotonic_ns()
    problem, read = "", 0
    try:
        if part is None:
            volume.verify(item.sequence)
            read = item.payload_bytes
        else:
            read = verify_part(volume, item, part)
    except _core.NativeError as error:
        problem = error.code_name
    except FileNotFoundError:
        raise
    except OSError as error:
        problem = catalog.errno_name(error)
    return catalog.checkpoint_document(item) | {
        "valid": not problem,
        "problem": problem,
        "read_bytes": read,
        "took_s": round((time.monotonic_ns() - began_ns) / 1e9, 4),
    }
