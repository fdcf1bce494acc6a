"""`verify` through the daemon: what it reads, and its document."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from pccheck_native import _core, catalog
from pccheck_native.subset import Subset, verify_part
from pccheckd.observe.report import SCHEMA, Document


def verify(
    volumes: Iterable[tuple[Path, _core.Volume]],
    sequence: int,
    part: Subset | None,
    *,
    ends: Callable[[], bool],
) -> Document:
    """Reads and checks one checkpoint (0: every one), or a part of it. Blocks until it is read;
    starts no further one when `ends`: the caller has gone."""
    results: list[Document] = []
    for path, volume in volumes:
        for item in catalog.checkpoints_of(volume, path):
            if sequence in (0, item.id.sequence) and not ends():
                with contextlib.suppress(FileNotFoundError):  # newer ones have replaced it
                    results.append(_verified(volume, item, part))
    return {"schema": SCHEMA, "checkpoints": results}


def _verified(
    volume: _core.Volume, item: catalog.StoredCheckpoint, part: Subset | None
) -> Document:
    problem, read = "", 0
    try:
        if part is None:
            volume.verify(item.id.sequence)
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
    }
