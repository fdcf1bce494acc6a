"""Promise P6: a user has access to its own jobs and checkpoints only, and root to all."""

from __future__ import annotations

from pccheck_wire.errors import RefusedError


def has_access(asker_uid: int, owner_uid: int) -> bool:
    return asker_uid in (0, owner_uid)


def require_access(asker_uid: int, owner_uid: int, action: str) -> None:
    """Raises RefusedError without access. `action` completes "may not ... of uid 7"."""
    if not has_access(asker_uid, owner_uid):
        raise RefusedError(f"uid {asker_uid} may not {action} of uid {owner_uid}")
