"""Chooses checkpoints, one for each rank, and writes each as a file: all or none, of one step.

`recover` is an export without a choice: the whole of the newest valid state.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from pccheck_native import catalog, group
from pccheck_native.identity import CheckpointId
from pccheck_store import directory, selection
from pccheck_store.reading.errors import RecycledError
from pccheck_store.reading.source import Source
from pccheck_store.reading.state_reader import StateReader, open_state
from pccheck_wire.basics import some
from pccheck_wire.errors import DamagedError, NoCheckpointError, UnreadableError, UsageError
from pccheckctl.output import render
from pccheckctl.output.documents import Document, note, part, print_json, say, text, texts, whole
from pccheckctl.output.files import DIRECTORIES, Output
from pccheckctl.output.progress import Bar
from pccheckctl.source import files, of_all_nodes

from . import safetensors_file

#: How often a running daemon may replace a checkpoint while it is read.
ATTEMPTS = 8
NAMED_MAX = 8
TORCH, SAFETENSORS, HUGGINGFACE = "torch", "safetensors", "huggingface"

Ranks = dict[int, list[catalog.StoredCheckpoint]]
Chosen = dict[int, catalog.StoredCheckpoint]
Skipped = list[tuple[catalog.StoredCheckpoint, str]]  # and why
_Reading = Callable[..., StateReader]


def run(arguments: argparse.Namespace) -> int:
    """0, or 14 when damaged or unreadable checkpoints were skipped in favour of the one written."""
    check(arguments)
    storage = of_all_nodes(arguments) or files(arguments)
    skipped: Skipped = []
    for _ in range(ATTEMPTS):
        found = storage.held(uid=arguments.uid, job=arguments.job)
        stored = directory.of_job(found, arguments.job, storage.path)
        ranks = {
            rank: directory.matching(mine, step=arguments.step, sequence=arguments.sequence)
            for rank, mine in stored.items()
        }
        without = {one.id for one, _ in skipped}
        try:
            world_size = directory.ranks_of(stored)
            chosen = choose(storage, ranks, world_size, arguments, without)
            with _terminable():
                everything = [one for mine in stored.values() for one in mine]
                reading = functools.partial(open_state, storage, stored=everything)
                written = write(reading, chosen, Path(arguments.output), arguments)
        except RecycledError:
            continue
        except _DamageError as damage:
            skipped.append(damage.args)
            continue
        except NoCheckpointError as error:
            if not skipped:
                raise
            raise NoCheckpointError(
                f"{error.message}; {render.plural(len(skipped), 'checkpoint')} found damaged or "
                "unreadable",
                hint=f"see: pccheckctl verify {arguments.job}",
            ) from error
        flagged = [
            (one, "an earlier read found it damaged")
            for rank, taken in chosen.items()
            for one in ranks[rank]
            if one.is_damaged and one.id.sequence > taken.id.sequence and one.id not in without
        ]
        return _report(arguments, written, [*flagged, *skipped])
    if skipped:
        raise DamagedError(skipped[-1][1])
    raise RecycledError("checkpoints are replaced faster than they can be read", hint="try again")


def check(arguments: argparse.Namespace) -> None:
    """Raises UsageError for flags that exclude each other."""
    if arguments.all_ranks and arguments.sequence is not None:
        raise UsageError(
            "--sequence numbers are different on every rank", hint="use --rank R, or --step"
        )
    if arguments.max_shard_size is not None and arguments.format != HUGGINGFACE:
        raise UsageError(
            "--max-shard-size is for --format huggingface, which writes a directory of files",
            hint="add --format huggingface, and name a directory: --output DIR",
        )
    if arguments.format == TORCH and arguments.output.endswith(".safetensors"):
        raise UsageError(
            f"torch.load() takes {arguments.output} for a file of safetensors, because of its name",
            hint="use --format safetensors, or a name that ends with .pt",
        )
    if arguments.output.endswith("/") and arguments.format not in DIRECTORIES:
        raise UsageError(
            f"--output must name a file, not a directory (got {arguments.output})",
            hint=f"--output {arguments.output}{arguments.job}.pt; or write a directory: pccheckctl "
            "export --format huggingface, or --format dcp for torch.distributed.checkpoint",
        )


# -- choosing ----------------------------------------------------------------------------------


def choose(
    storage: Source,
    ranks: Ranks,
    world_size: int,
    arguments: argparse.Namespace,
    without: set[CheckpointId],
) -> Chosen:
    """One checkpoint for each rank that is written. Raises NoCheckpointError, UsageError."""
    usable = {
        rank: [one for one in found if not one.is_damaged and one.id not in without]
        for rank, found in ranks.items()
    }
    if arguments.rank is None and arguments.step is None and arguments.sequence is None:
        usable = _without_stale(usable)
    ranks = {rank: found for rank, found in ranks.items() if rank in usable}
    alone = world_size == 1 or arguments.sequence is not None
    common = None if alone else catalog.common_step(usable, world_size)
    if arguments.all_ranks and world_size == 1:
        return {rank: _newest(usable, rank, arguments) for rank in ranks}
    if arguments.all_ranks:
        if common is not None:
            return common
        newest = [f"rank {rank}: {found[0].id.step}" for rank, found in usable.items() if found]
        raise NoCheckpointError(
            f"there is no step that all {world_size} ranks of job {arguments.job!r} have a valid "
            f"checkpoint of here; newest steps: {some(newest) or 'none'}",
            hint="copy the volumes of all ranks into one directory, or choose one with --rank",
        )
    if arguments.rank is None and common and len(common) > 1 and _is_of_all(storage, common[0]):
        return {0: common[0]}  # with what the others have stored
    if arguments.rank is None and len(ranks) > 1:
        named = ", ".join(map(str, ranks))
        if len(ranks) > NAMED_MAX:
            named = f"{min(ranks)} to {max(ranks)} ({len(ranks)} of them)"
        shared = f"; the newest step that all have is {common[0].id.step}" if common else ""
        raise UsageError(
            f"job {arguments.job!r} has ranks {named}{shared}",
            hint="choose one with --rank R, or all with --all-ranks",
        )
    rank = next(iter(ranks)) if arguments.rank is None else arguments.rank
    if common is not None and rank in common:
        return {rank: common[rank]}
    if not alone:
        note(
            f"some of the {world_size} ranks do not have this step: do not combine this file with "
            "files of other ranks"
        )
    return {rank: _newest(usable, rank, arguments)}


def _without_stale(usable: Ranks) -> Ranks:
    """Without the ranks that the run that saved last did not have."""
    old = sorted(group.stale(catalog.ranks_of(usable)))
    if old:
        which = f"rank {old[0]} is" if len(old) == 1 else f"ranks {some(old)} are"
        note(
            f"{which} left out: the run that saved last did not have "
            f"{'it' if len(old) == 1 else 'them'} (to choose one: --rank R)"
        )
    return {rank: found for rank, found in usable.items() if rank not in old}


def _is_of_all(storage: Source, one: catalog.StoredCheckpoint) -> bool:
    """Whether the ranks have stored one state together: sharded, or replicated."""
    try:
        with contextlib.closing(storage.open([one])) as payloads:
            found = payloads.tree(one.id.rank)
            return found.sharded() or bool(found.shared())
    except (DamagedError, UnreadableError) as error:
        raise _DamageError(one, error.message) from error


def _newest(usable: Ranks, rank: int, arguments: argparse.Namespace) -> catalog.StoredCheckpoint:
    for one in usable.get(rank, ()):
        return one
    raise directory.missing(arguments.job, rank, step=arguments.step, sequence=arguments.sequence)


# -- writing -----------------------------------------------------------------------------------


class _DamageError(Exception):
    """The checkpoint that is damaged, and why it is skipped."""

    args: tuple[catalog.StoredCheckpoint, str]


def write(
    reading: _Reading, chosen: Chosen, output: Path, arguments: argparse.Namespace
) -> list[Document]:
    """Writes all files, then renames them: a damaged rank leaves none behind.

    Raises RecycledError, or _DamageError with the checkpoint that is damaged.
    """
    written = []
    payload = sum(one.payload_bytes for one in chosen.values())
    with ExitStack() as stack:
        bar = stack.enter_context(Bar("read", payload, show=not arguments.json))
        outputs: list[Output] = []
        for rank, one in chosen.items():
            target = _target(output, rank) if arguments.all_ranks else output
            by_name = SAFETENSORS if target.suffix == ".safetensors" else TORCH
            kind = arguments.format or by_name
            made = Output(
                target, force=arguments.force, directory=kind if kind in DIRECTORIES else ""
            )
            outputs.append(stack.enter_context(made))
            try:
                written.append(_write_one(reading, one, made, kind, bar, arguments))
            except (DamagedError, UnreadableError) as error:
                raise _DamageError(one, error.message) from error
        for made in outputs:
            made.commit()
    return written


def _write_one(
    reading: _Reading,
    one: catalog.StoredCheckpoint,
    output: Output,
    kind: str,
    bar: Bar,
    arguments: argparse.Namespace,
) -> Document:
    only = arguments.only
    with reading(one, progress=bar) as reader:
        content = reader.content()
        if only:
            content = selection.only(content, only, one.id.job)
            bar.spare(selection.spared_bytes(content))
        if kind == SAFETENSORS:
            changed = safetensors_file.write(reader, one, content, output, only)
        elif kind == HUGGINGFACE:
            shard_bytes = arguments.max_shard_size or safetensors_file.SHARD_BYTES
            changed = safetensors_file.write_directory(
                reader, one, content, output, only, shard_bytes=shard_bytes
            )
        else:
            from . import torch_file  # imports torch when used

            changed = torch_file.write(reader, content, output)
    return {
        "path": str(output.target), "format": kind, "bytes": output.size(),
        "changed": changed,  # what the format cannot hold unchanged
        "checkpoint": catalog.checkpoint_document(one),
    }  # fmt: skip


def _target(output: Path, rank: int) -> Path:
    if "{rank}" in output.name:
        return output.with_name(output.name.replace("{rank}", str(rank)))
    return output.with_name(f"{output.stem}.rank-{rank}{output.suffix}")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends like an error does: temporary files are removed."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- output ------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace, written: list[Document], skipped: Skipped) -> int:
    document: Document = {
        "schema": 1,
        "written": written,
        "skipped": [
            {"checkpoint": catalog.checkpoint_document(one), "reason": reason}
            for one, reason in skipped
        ],
    }
    if arguments.json:
        print_json(document)
        return DamagedError.exit_code if skipped else 0
    for one, reason in skipped:
        note(
            f"skipped the checkpoint of step {one.id.step} (sequence {one.id.sequence}, rank "
            f"{one.id.rank}): {reason}"
        )
    for item in written:
        of, changed = part(item, "checkpoint"), texts(item, "changed")
        say(
            f"{item['path']}: step {of['step']} of job {of['job']} rank {of['rank']}, "
            f"{render.size(whole(item, 'bytes'))}, {item['format']}"
        )
        name = Path(text(item, "path")).name
        for change in changed[:NAMED_MAX]:
            note(f"{name}: {change}")
        if len(changed) > NAMED_MAX:
            note(f"{name}: {len(changed) - NAMED_MAX} more; --json has all")
    return DamagedError.exit_code if skipped else 0
