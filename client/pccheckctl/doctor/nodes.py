"""Checks of the jobs on several nodes that run here, as this node's daemon sees the others. Clocks
are not compared: nothing depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from pccheckctl.output import render
from pccheckctl.output.documents import Document, part, rows, text, texts, whole

from .finding import Finding, ok, problem, warning

TRIED_AT_ONCE = 32
PAIRS_SHOWN = 16


def agreement(status: Document) -> Iterator[Finding]:
    """Whether the nodes reach each other and fit together. Nothing without such a job."""
    for job in rows(status, "nodes"):
        name, nodes = f"job {text(job, 'job')}", rows(job, "nodes")
        refused = part(job, "refused")
        if refused:
            yield problem(
                "nodes", f"{name}: this start is refused: {text(refused, 'message')}",
                effect="it neither restores nor saves", fix=text(refused, "hint") or "start again",
            )  # fmt: skip
        elif why := text(job, "silent_reason"):
            yield warning(
                "nodes", f"{name}: the store of the job, or etcd, does not answer: {why}",
                effect="checkpoints go on on each node, and none becomes global",
                fix="check that torchrun's agent, rank 0 or etcd runs, and the network to it",
            )  # fmt: skip
        elif text(job, "phase") != "running":
            yield warning(
                "nodes", f"{name}: the nodes have not agreed: {text(job, 'waits_for')}",
                effect="no checkpoint is saved until they have",
                fix="start the ranks that are missing, with a daemon on each node",
            )  # fmt: skip
        else:
            own = next((text(one, "node") for one in nodes if one.get("here")), "?")
            count = render.plural(len(nodes), "node")
            yield ok("nodes", f"{name}: {count} agree, and the store answers; this node is {own}")
        yield from _versions(name, nodes)


def _versions(name: str, nodes: list[Document]) -> Iterator[Finding]:
    found = {text(one, "version"): text(one, "host") for one in nodes if text(one, "version")}
    if len(found) > 1:
        told = ", ".join(f"{version} on host {host}" for version, host in sorted(found.items()))
        yield warning(
            "nodes", f"{name}: the nodes have several versions of PCcheck: {told}",
            effect="one release apart works; a start of nodes further apart is refused",
            fix="install the same version on all nodes",
        )  # fmt: skip


def servers(document: Document) -> Iterator[Finding]:
    """Whether this node can read from the other nodes of running jobs. Each is tried."""
    from pccheck_native.tls import reaches  # imports ssl

    for job in filter(lambda one: one.get("runs"), rows(document, "jobs")):
        name, nodes = f"job {text(job, 'job')}", rows(job, "nodes")
        silent = [text(one, "host") for one in nodes if not texts(one, "addresses")]
        if silent:
            yield warning(
                "nodes", f"{name}: nobody can read from {', '.join(f'host {h}' for h in silent)}",
                effect="ranks restore only on the nodes that have their parts",
                fix="start pccheckd on every node with --listen INTERFACE (docs/ranks.md)",
            )  # fmt: skip
        others = [one for one in nodes if texts(one, "addresses") and not one.get("here")]
        with ThreadPoolExecutor(TRIED_AT_ONCE) as threads:
            tried = threads.map(lambda one: reaches(*_server(one)), others)
            failed = [(text(one, "host"), why) for one, why in zip(others, tried, strict=True)]
        for host, why in failed:
            if why:
                yield _cannot_read(name, "this node", host, why)
        if others and not any(why for _, why in failed):
            count = render.plural(len(others), "other node")
            yield ok("nodes", f"{name}: this node reaches the {count} that it may read from")


def pairs(document: Document) -> Iterator[Finding]:
    """Whether each node of each job can read from each other one: every node tries."""
    from pccheck_store.cluster import pairs_of  # imports ssl

    for job in rows(document, "jobs"):
        name, tried = f"job {text(job, 'job')}", pairs_of(job)
        for host, why in tried.silent:
            yield warning(
                "nodes", f"{name}: host {host} does not answer: {why}",
                effect="which nodes it can read from is not known",
                fix="start pccheckd there, and open its --listen port for this node",
            )  # fmt: skip
        for reader, host, why in tried.failed[:PAIRS_SHOWN]:
            yield _cannot_read(name, f"host {reader}", host, why)
        count = render.plural(tried.pairs, "pair")
        if (more := len(tried.failed) - PAIRS_SHOWN) > 0:
            yield warning(
                "nodes", f"{name}: of {count} of nodes {more} more fail",
                effect="as above", fix="correct those above, and try again",
            )  # fmt: skip
        if not tried.failed and tried.pairs:
            yield ok("nodes", f"{name}: of {count} of nodes each reader reaches the other node")


def _cannot_read(name: str, reader: str, host: str, why: str) -> Finding:
    return warning(
        "nodes", f"{name}: {reader} cannot read from host {host}: {why}",
        effect=f"a rank that comes up on {reader} does not get what lies on host {host}",
        fix=f"open these ports between the nodes, or let pccheckd on host {host} listen on another "
        "interface: --listen INTERFACE:PORT",
    )  # fmt: skip


def _server(node: Document) -> tuple[list[str], bytes]:
    return texts(node, "addresses"), bytes.fromhex(text(node, "fingerprint"))


def spare_slot(status: Document) -> Iterator[Finding]:
    """Whether the volumes of such a job have a slot that the other nodes never count on."""
    daemon = part(status, "daemon")
    least = whole(daemon, "in_flight") + whole(daemon, "keep") + 1
    wide = {(job.get("uid"), text(job, "job")) for job in rows(status, "nodes")}
    for rank in rows(status, "ranks"):
        slots = whole(part(rank, "volume"), "slots")
        if (rank.get("uid"), text(rank, "job")) in wide and 0 < slots < least:
            yield warning(
                "nodes", f"job {text(rank, 'job')} rank {whole(rank, 'rank')}: its volume has "
                f"{slots} slots, and a job on several nodes needs {least}",
                effect="saves may wait for the other nodes",
                fix="restart pccheckd with one less in --slots, or pccheckctl drop the job",
            )  # fmt: skip
