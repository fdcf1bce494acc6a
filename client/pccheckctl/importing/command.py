"""Reads a file or a directory that other software wrote, and saves it as a training script does: as
the state of a new job, from which `restore()` continues."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pccheck_native import catalog
from pccheck_store.directory import Storage
from pccheck_store.safetensors_layout import INDEX
from pccheck_wire.basics import some
from pccheck_wire.errors import PccheckError, RefusedError, UnsupportedStateError, UsageError
from pccheckctl.export.torch_file import signals_held
from pccheckctl.output.documents import answer, note, rows
from pccheckctl.source import choose

if TYPE_CHECKING:
    from pccheck import PCcheckClient

    from .found import Imported

TORCH, SAFETENSORS, DCP = "torch", "safetensors", "dcp"
SAVE_LIMIT_S = 24 * 3600.0
RNG = "rng"


def run(arguments: argparse.Namespace) -> int:
    """0 when the checkpoint is durable."""
    if arguments.uid not in (None, os.geteuid()):
        raise UsageError(
            f"an import makes a job of the user that runs it, uid {os.geteuid()}",
            hint=f"run it as uid {arguments.uid}",
        )
    path = Path(arguments.input)
    kind = arguments.format or _kind(path)
    wanted = _wanted(arguments.names)
    storage = _place(arguments)
    read = _reader(kind)(path)
    things, values = _parts(read, wanted, path)
    known = read.step if arguments.step is None else arguments.step
    step = 0 if known is None else known
    metadata: dict[str, object] = {"imported_from": path.name, **values}
    with signals_held():
        from pccheck import PCcheckClient
    with PCcheckClient(
        arguments.job, 0, 1, solo=True, on_error="raise", stall_limit_s=SAVE_LIMIT_S,
        socket=arguments.socket if storage is None else None, autostart=storage is not None,
        storage=storage,
    ) as client:  # fmt: skip
        notes = [*read.notes, *_attach(client, things)]
        client.checkpoint(step=step, metadata=metadata).wait_durable(SAVE_LIMIT_S)
    if known is None and not arguments.json:
        note("step 0, because the file names none; --step sets it")
    for text in () if arguments.json else notes:
        note(text)
    imported = {
        "job": arguments.job, "step": step, "format": kind, "path": arguments.input,
        "attached": sorted(things), "metadata": sorted(values), "changed": notes,
    }  # fmt: skip
    answer(
        arguments,
        {"schema": 1, "imported": imported},
        lambda: (
            f"job {arguments.job}: step {step} from {arguments.input} ({kind}); restore() puts it "
            f"into a script that attaches {', '.join(sorted(things))}"
        ),
    )
    return 0


def _place(arguments: argparse.Namespace) -> Path | None:
    """The directory for a private daemon; None: the daemon of this node. Raises RefusedError for a
    job that exists."""
    job = arguments.job
    if arguments.storage:
        with contextlib.suppress(OSError):  # choose() reports that it is missing
            Path(arguments.storage).mkdir()  # as pccheckd does
    with choose(arguments) as chosen:
        if isinstance(chosen, Storage):
            storage: Path | None = chosen.path
            stored = catalog.checkpoint_documents(catalog.scan(chosen.path, job=job).checkpoints)
        else:
            storage, stored = None, rows(chosen.listing(job), "checkpoints")
    steps = [one.get("step") for one in stored if one.get("uid") == os.geteuid()]
    if steps:
        raise RefusedError(
            f"job {job!r} has checkpoints already (step {steps[0]}), and an import begins a new "
            "job",
            hint=f"import under another name, or first remove them: pccheckctl drop {job}",
        )
    return storage


# -- what is read ------------------------------------------------------------------------------


def _kind(path: Path) -> str:
    """The format, by the name and the kind of file. Raises UsageError."""
    if path.is_dir():
        if (path / ".metadata").exists():
            return DCP
        if any(path.glob("*.safetensors*")):
            return SAFETENSORS
        raise UsageError(
            f"{path} is neither a directory of torch.distributed.checkpoint nor one with "
            "safetensors files",
            hint="name a file in it",
        )
    if not path.exists():
        raise UsageError(f"there is no file {path}", hint="name a file or a directory to import")
    return SAFETENSORS if path.name.endswith((".safetensors", INDEX)) else TORCH


def _reader(kind: str) -> Callable[[Path], Imported]:
    """Imports torch. Raises PccheckError when it is not installed."""
    try:
        with signals_held():
            if kind == TORCH:
                from .torch_file import read
            elif kind == DCP:
                from .dcp_directory import read
            else:
                from .safetensors_files import read
    except ImportError as error:
        raise PccheckError(
            f"cannot import without torch and NumPy: {error}", hint="pip install 'pccheck[torch]'"
        ) from error
    return read


# -- what a script will attach -----------------------------------------------------------------


def _wanted(names: list[str]) -> dict[str, str]:
    """The part of the file ("": all of it) by the name that scripts attach. Raises UsageError."""
    wanted: dict[str, str] = {}
    for text in names:
        name, _, key = text.partition("=")
        if not name or name in wanted or ("=" in text and not key):
            raise UsageError(
                f"--as {text!r} does not name what a script attaches",
                hint="use --as model for all of the file, or --as model=KEY for a part of it",
            )
        wanted[name] = key
    if len(wanted) > 1:  # all of the file is not one of several parts
        return {name: key or name for name, key in wanted.items()}
    return wanted


def _parts(
    read: Imported, wanted: dict[str, str], path: Path
) -> tuple[dict[str, object], dict[str, object]]:
    """What is attached, by name, and the plain values that become metadata. Raises UsageError."""
    state = read.state
    if wanted:
        return {name: _part(state, key, path) for name, key in wanted.items()}, {}
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise UsageError(
            f"{path} holds a {type(state).__name__}, not a dict of parts with names",
            hint="name what a script attaches it as: --as model",
        )
    if read.whole_of:
        raise UsageError(
            f"{path} is the whole state of job {read.whole_of!r}, and safetensors does not keep "
            "which tensors belong to the model and which to the optimizer",
            hint="export it as a torch file or with --format dcp, or only the model: --only model",
        )
    if read.flat:
        return {"model": state}, {}
    import torch

    from .found import is_part, number

    things: dict[str, object] = {k: value for k, value in state.items() if is_part(k, value)}
    values = {key: number(value) for key, value in state.items() if key not in things}
    if tensors := [key for key, value in values.items() if isinstance(value, torch.Tensor)]:
        raise UsageError(
            f"{path} has tensors beside its parts: {some(tensors)}",
            hint=f"import the parts, without these tensors: {' '.join(map(_as_part, things))}"
            if things
            else "name what a script attaches: --as model for all of the file, or --as NAME=KEY "
            "for each part",
        )
    read.notes += [
        f"{key} is left out: it is a {type(value).__name__}"
        for key, value in values.items()
        if not _is_plain(value)
    ]
    values = {key: value for key, value in values.items() if _is_plain(value)}
    if not things:
        raise UsageError(
            f"{path} has no state of a model or an optimizer",
            hint="see what it has: torch.load(FILE, weights_only=True)",
        )
    return things, values


def _as_part(key: str) -> str:
    """The option for a part, under the name that scripts attach: a key is often
    "model_state_dict"."""
    return f"--as {key.removesuffix('_state_dict')}={key}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _part(state: object, name: str, path: Path) -> object:
    """The value at a dotted path of keys and indexes, some of which may have dots themselves."""
    if not name:
        return state
    items = dict(enumerate(state)) if isinstance(state, (list, tuple)) else state
    found = {str(key): value for key, value in items.items()} if isinstance(items, Mapping) else {}
    if name in found:
        return found[name]
    for key, value in found.items():
        if name.startswith(f"{key}."):
            return _part(value, name.removeprefix(f"{key}."), path)
    raise UsageError(
        f"there is no {name!r} in {path}" + (f"; it has {some(found)}" if found else ""),
        hint="use --as NAME=KEY with one of its keys",
    )


class _Given:
    """A state as it was read, in the place of the object that a script attaches."""

    def __init__(self, state: object) -> None:
        self._state = state

    def state_dict(self) -> dict[str, object]:
        return self._state  # type: ignore[return-value]

    def load_state_dict(self, state: object) -> None:
        raise NotImplementedError("an import restores nothing")


def _attach(client: PCcheckClient, things: dict[str, object]) -> list[str]:
    """Returns what could not be kept."""
    given = {name: _Given(state) for name, state in things.items() if name != RNG}
    if given:
        client.attach(**given)  # type: ignore[arg-type]
    return _attach_generators(client, things[RNG]) if RNG in things else []


def _attach_generators(client: PCcheckClient, state: object) -> list[str]:
    """Generators are saved in the state in which they are: this process takes the state over."""
    import warnings

    from pccheck import PccheckWarning, restore_rng

    if not isinstance(state, dict) or not {"python", "numpy", "torch"} <= state.keys():
        raise UnsupportedStateError(
            "rng is not what attach(rng=True) saves",
            hint="import it under another name: --as generators=rng, and the other parts by name",
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PccheckWarning)
        try:
            restore_rng(state)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedStateError(
                f"rng is not what attach(rng=True) saves: {error}",
                hint="leave it out: name the other parts with --as",
            ) from error
    client.attach(rng=True)
    lost = any(isinstance(one.message, PccheckWarning) for one in caught)
    return ["rng: the generators of GPUs are left out: this machine has fewer GPUs"] * lost
