"""Takes values from documents of a daemon or of a storage directory, whatever these documents
hold."""

from __future__ import annotations

import math

from pccheck_wire.errors import one_owner

Document = dict[str, object]


def rows(document: Document, key: str) -> list[Document]:
    """The list of maps under `key`; other items are left out."""
    value = document.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def part(document: Document, key: str) -> Document:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def number(document: Document, key: str) -> float | None:
    value = document.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def whole(document: Document, key: str, default: int = 0) -> int:
    value = number(document, key)
    return default if value is None else int(value)


def text(document: Document, key: str) -> str:
    value = document.get(key)
    return "" if value is None else str(value)


def texts(document: Document, key: str) -> list[str]:
    value = document.get(key)
    return [str(item) for item in value] if isinstance(value, list) else []


def numbers(document: Document, key: str) -> list[int]:
    items = document.get(key)
    return [one for one in items if isinstance(one, int)] if isinstance(items, list) else []


def job_of(document: Document, job: str, *, uid: int | None = None) -> Document | None:
    """The job of this name in a document. Raises UsageError if several users have one."""
    mine = [
        one
        for one in rows(document, "jobs")
        if text(one, "job") == job and uid in (None, one.get("uid"))
    ]
    one_owner(job, (whole(one, "uid") for one in mine))
    return mine[0] if mine else None


def as_json(value: object) -> object:
    """Metadata as JSON; what JSON lacks becomes its repr, and an int that is too long for Python's
    decimals becomes hexadecimal."""
    from pccheck_wire.tree import is_long, shown

    if isinstance(value, dict):
        return {k if isinstance(k, str) else shown(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    exact = value is None or isinstance(value, (bool, str))
    exact = exact or (isinstance(value, int) and not is_long(value))
    exact = exact or (isinstance(value, float) and math.isfinite(value))
    return value if exact else shown(value)
