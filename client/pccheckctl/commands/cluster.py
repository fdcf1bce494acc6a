"""`pccheckctl status --cluster`: the jobs that have run on several nodes, as all of their nodes
know these jobs, also while they do not run."""

from __future__ import annotations

import argparse

from pccheck_wire.errors import UsageError
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, numbers, part, rows, text, whole
from pccheckctl.source import daemon

DEGRADED = 3
HEADINGS = ("host", "node", "ranks", "newest step", "known global", "answer")
NOTHING = "no job of this node has run on several nodes; ask on a node of the job (docs/ranks.md)"


def run(arguments: argparse.Namespace) -> int:
    """0, or 3 when a job would be refused, or a node has not answered."""
    if arguments.watch:
        raise UsageError(
            "--cluster asks every node once, and is not repeated", hint="leave --watch out"
        )
    document = fetch(arguments)
    answer(arguments, document, lambda: as_text(document))
    return DEGRADED if any(map(_needs_attention, rows(document, "jobs"))) else 0


def fetch(arguments: argparse.Namespace) -> Document:
    from pccheck_store.cluster import Cluster  # imports ssl

    with daemon(arguments) as observer:
        jobs = rows(observer.servers(), "jobs")
    wanted = [one for one in jobs if arguments.uid in (None, one.get("uid"))]
    return {"schema": 1, "jobs": [Cluster(one).document() for one in wanted]}


def as_text(document: Document) -> str:
    return "\n\n".join(map(_job, rows(document, "jobs"))) or NOTHING


def _needs_attention(job: Document) -> bool:
    return bool(part(job, "refused")) or bool(_silent(job))


def _silent(job: Document) -> list[str]:
    """The hosts that have not answered."""
    return [text(one, "host") for one in rows(job, "nodes") if not one.get("answered")]


def _job(job: Document) -> str:
    refused, step, silent = part(job, "refused"), job.get("step"), _silent(job)
    if step is None and silent:
        hosts = ", ".join(f"host {host}" for host in silent)
        why = f": {text(refused, 'message')}" if refused else ""
        found = (
            f"not all nodes answer: start pccheckd with --listen on {hosts}, then try again. "
            f"Without {hosts} restore() would {'be refused' if refused else 'find nothing'}{why}"
        )
    elif refused:
        hint = f"; {text(refused, 'hint')}" if text(refused, "hint") else ""
        found = f"restore() would be refused: {text(refused, 'message')}{hint}"
    elif step is None:
        found = "restore() would find nothing"
    else:
        count = render.plural(whole(job, "world_size"), "rank")
        found = f"restore() would restore step {step} on {count}"
    if any(one.get("runs") for one in rows(job, "nodes")):
        found += "; the job runs: see pccheckctl status"
    table = render.table(HEADINGS, map(_cells, rows(job, "nodes")))
    return f"job {text(job, 'job')}: {found}\n{table}"


def _cells(node: Document) -> tuple[object, ...]:
    return (
        f"{text(node, 'host')}, this node" if node.get("here") is True else text(node, "host"),
        text(node, "node")[:8],
        render.spans(numbers(node, "ranks")),
        node.get("newest_step"),
        node.get("global_step"),
        "yes" if node.get("answered") else f"no: {text(node, 'reason')}",
    )
