"""`pccheckctl show`: what is in one checkpoint, of tensors or of a process."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import time
from collections.abc import Iterator

from pccheck_native import _core, catalog
from pccheck_native.group import stale
from pccheck_store import directory
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError, UnreadableError
from pccheckctl.commands import image
from pccheckctl.commands.listing import age_s, flags
from pccheckctl.output import render
from pccheckctl.output.documents import Document, answer, as_json, note, rows, text, whole
from pccheckctl.source import files

TEXT_WIDTH_MAX = 60
RUN_MAX, SHOWN_OF_RUN = 8, 3  # items of a list with a line each; items that stand for the others


def run(arguments: argparse.Namespace) -> int:
    """0, or 14 when damaged checkpoints were skipped in favour of the one shown."""
    storage = files(arguments)
    found = storage.held(uid=arguments.uid, job=arguments.job, sizes=True)
    by_rank = directory.of_job(found, arguments.job, storage.path)
    rank = min(by_rank) if arguments.rank is None else arguments.rank
    wanted = directory.matching(
        by_rank.get(rank, ()), step=arguments.step, sequence=arguments.sequence
    )
    damaged: list[DamagedError | UnreadableError] = []
    for one in wanted:
        try:
            with contextlib.closing(storage.open([one])) as payloads:
                if one.flags & _core.SLOT_IMAGE:
                    image.show(arguments, one, payloads)
                    return DamagedError.exit_code if damaged else 0
                content = payloads.tree(rank)
        except (DamagedError, UnreadableError) as error:
            damaged.append(error)
            continue
        steps = {other.id.sequence: other.id.step for other in by_rank[rank]}
        document = describe(one, content) | {
            "base_step": steps.get(one.base),
            "stale": rank in stale(catalog.ranks_of(by_rank)),
        }
        for passed in () if arguments.json else damaged:
            note(f"{passed.message}; showing the previous one")
        answer(arguments, document, functools.partial(as_text, document))
        return DamagedError.exit_code if damaged else 0
    if damaged:
        raise damaged[0]
    raise directory.missing(arguments.job, rank, step=arguments.step, sequence=arguments.sequence)


def describe(one: catalog.StoredCheckpoint, content: tree.Tree) -> Document:
    """What `show --json` prints."""
    return {
        "schema": 1,
        **catalog.checkpoint_document(one),
        "attached": content.attached,
        "metadata": as_json(tree.plain(content.metadata)),
        "about": as_json(tree.plain(content.about)),
        "tensors": tensors_of(content),
        "leaves": leaves_of(content),
    }


def tensors_of(content: tree.Tree) -> list[Document]:
    """Every tensor and NumPy array, in the order of the state. `offset`: of its first byte in the
    payload, 0 when another rank stores it; `bytes`: of its elements, more than it takes in the
    payload when it is expanded. A shard also has the shape of the whole tensor, and its place."""
    found: list[Document] = []
    shard: tree.Shard | None = None
    for path, node in tree.walk(content.root):
        if isinstance(node, tree.Shard):
            shard = node  # its local part is next
            continue
        if not isinstance(node, (tree.Tensor, tree.Array)):
            continue
        whole = shard if shard is not None and node is shard.local else None
        start = content.extents[node.extent].offset if node.extent >= 0 else tree.ELSEWHERE
        if isinstance(node, tree.Tensor):
            dtype, strides = node.dtype, list(node.strides)
            nbytes = math.prod(node.shape) * tree.ITEM_BYTES[node.dtype]
        else:
            dtype, strides, nbytes = f"numpy {node.dtype}", [], node.nbytes
        found.append({
            "path": path, "dtype": dtype, "shape": list(node.shape), "strides": strides,
            "offset": 0 if start == tree.ELSEWHERE else start + node.offset, "bytes": nbytes,
            "whole_shape": whole and list(whole.shape),
            "whole_offsets": whole and list(whole.offsets),
        })  # fmt: skip
    return found


def leaves_of(content: tree.Tree) -> list[Document]:
    """Every value that is neither a container nor a tensor."""
    leaves = ((path, tree.leaf(node)) for path, node in tree.walk(content.root))
    return [{"path": path, **leaf._asdict()} for path, leaf in leaves if leaf is not None]


def as_text(document: Document) -> str:
    """The same for people: a head, then tensors, then leaves."""
    tensors, leaves = rows(document, "tensors"), rows(document, "leaves")
    start = f"start {text(document, 'start')[:12]}" if document["start"] else "start unknown"
    lines = [
        f"job {document['job']} rank {document['rank']} of {document['world_size']}: "
        f"step {document['step']}, sequence {document['sequence']}, "
        f"run {document['incarnation']} ({start}), "
        f"{render.size(whole(document, 'payload_bytes'))}, "
        f"{render.age(age_s(document, time.time()))}"
        + (f", {flags(document)}" if flags(document) else "")
    ]
    if document.get("base_step") is not None:
        known = document["own_bytes"] is not None
        own = render.size(whole(document, "own_bytes")) if known else "an unknown part"
        lines.append(
            f"{own} of it was written; the rest lies in the checkpoint of step "
            f"{document['base_step']}"
        )
    if isinstance(about := document["about"], dict):
        lines.append(
            f"saved by {about.get('command')}, pid {about.get('pid')} on {about.get('host')}, "
            f"in {about.get('directory')}"
        )
    if document["metadata"]:
        lines.append(render.safe(f"metadata: {document['metadata']}"))
    if tensors:
        cells = [
            (text(t, "path") or ".", t["dtype"], _shape(t), render.size(whole(t, "bytes")))
            for t in tensors
        ]
        lines += ["", render.table(("tensor", "dtype", "shape", "size"), cells)]
    if leaves:
        lines += ["", render.table(("value", "type", "is"), _values(leaves))]
    total = sum(whole(t, "bytes") for t in tensors)
    lines += ["", f"{render.plural(len(tensors), 'tensor')} of {render.size(total)}, "
              f"{render.plural(len(leaves), 'value')}"]  # fmt: skip
    return "\n".join(lines)


def _shape(tensor: Document) -> str:
    """The shape; for a shard also the whole tensor's, and where the shard begins in it."""
    dims, whole_dims, offsets = (tensor[k] for k in ("shape", "whole_shape", "whole_offsets"))
    assert isinstance(dims, list)
    if not isinstance(whole_dims, list) or not isinstance(offsets, list):
        return render.shape(dims)
    where = ",".join(map(str, offsets))
    return f"{render.shape(dims)} at {where} of {render.shape(whole_dims)}"


def _values(leaves: list[Document]) -> Iterator[tuple[str, ...]]:
    """A line for each; a long list, like the state of a random generator, has one line. --json has
    every item."""
    for (parent, kind), group in itertools.groupby(leaves, _place):
        run = list(group)
        if parent is None or len(run) <= RUN_MAX:
            for leaf in run:
                yield text(leaf, "path") or ".", text(leaf, "kind"), _cut(text(leaf, "text"))
            continue
        first = ", ".join(text(leaf, "text") for leaf in run[:SHOWN_OF_RUN])
        yield f"{parent}.*", f"{len(run)} x {kind}", _cut(f"{first}, ...")


def _place(leaf: Document) -> tuple[str | None, str]:
    """The list that the value is in, and its type."""
    parent, _, name = text(leaf, "path").rpartition(".")
    return (parent if parent and name.isdecimal() else None), text(leaf, "kind")


def _cut(value: str) -> str:
    return value if len(value) <= TEXT_WIDTH_MAX else value[: TEXT_WIDTH_MAX - 3] + "..."
