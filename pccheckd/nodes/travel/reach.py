"""Whether this node can read from the other nodes of a job: each is tried."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from pccheck_native import tls
from pccheck_native.nodes.offers import NodeServer

TRIED_AT_ONCE = 32
#: The asker waits for `tls.SILENT_LIMIT_S`.
LIMIT_S = 20.0


def unreachable(servers: Sequence[NodeServer]) -> list[tuple[bytes, str]]:
    """The ids of the nodes that this process cannot connect to, and why. Blocks for LIMIT_S."""
    threads = ThreadPoolExecutor(TRIED_AT_ONCE, "reach")
    try:
        begun = {threads.submit(_why, one): one.node for one in servers}
        done, late = wait(begun, LIMIT_S)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    found = [(begun[one], one.result()) for one in done]
    found += [(begun[one], "no answer in time") for one in late]
    return sorted((node, why) for node, why in found if why)


def _why(server: NodeServer) -> str:
    if server.peer is None:
        return "its pccheckd had no --listen"
    return tls.reaches(server.peer.addresses, server.peer.fingerprint)[:1000]
