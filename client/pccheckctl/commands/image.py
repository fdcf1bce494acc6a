"""What `pccheckctl show` says of a process image: which process it was, and what it needs."""

from __future__ import annotations

import argparse
import dataclasses
import time

from pccheck_native import catalog
from pccheck_process import index
from pccheck_process.facts import Facts
from pccheck_store.reading.source import Payloads
from pccheck_wire.basics import plural
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer


def show(arguments: argparse.Namespace, one: catalog.StoredCheckpoint, payloads: Payloads) -> None:
    found = index.unpack(payloads.packed_tree(one.id.rank), one.payload_bytes)
    facts = Facts.of_plain(found.facts)
    answer(arguments, document(one, found, facts), lambda: as_text(one, found, facts))


def document(one: catalog.StoredCheckpoint, found: index.ImageIndex, facts: Facts) -> Document:
    plain = facts.plain()
    del plain["fingerprint"]
    plain["written"] = [dataclasses.asdict(file) for file in facts.written]
    plain["read"] = [dataclasses.asdict(file) for file in facts.read]
    files = {name: file.nbytes for name, file in found.streams.items()}
    return {"schema": 1, **catalog.checkpoint_document(one), "process": plain, "files": files}


def as_text(one: catalog.StoredCheckpoint, found: index.ImageIndex, facts: Facts) -> str:
    size, when = render.size(one.payload_bytes), render.age(time.time() - facts.wall_s)
    threads = sum(map(len, facts.tree.values()))
    lines = [
        f"job {one.id.job}: process image of step {one.id.step}, sequence {one.id.sequence}, "
        f"{size}, taken {when}",
        f"command    {' '.join(facts.argv)}",
        f"directory  {facts.cwd}",
        f"pids       {', '.join(map(str, facts.tree))} ({plural(threads, 'thread')}), uid "
        f"{facts.uid}, gid {facts.gid}",
        *{f"writes     {file.path}, {render.size(file.size_bytes)}": 0 for file in facts.written},
        f"image      {plural(len(found.streams), 'file')} of CRIU",
    ]
    return "\n".join(lines)
