"""Clients with a short stall limit, beside disks that are slow."""

from __future__ import annotations

from pccheck import PCcheckClient


def shorten(client: PCcheckClient, stall_limit_s: float) -> None:
    """Sets the limit as if the client had been made with it. To be called after the first
    checkpoint: the daemon makes a volume for that one, which takes longer on a slow disk."""
    saver = client._saver
    for owner in (client._session, saver, saver._gate, saver._breaker, saver._exposure):
        if owner is not None:
            assert hasattr(owner, "_stall_limit_s")
            owner._stall_limit_s = stall_limit_s
