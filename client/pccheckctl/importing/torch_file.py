"""A file of torch.save. Its pickle may name only what torch's safe loader knows: nothing in the
file is executed. Tensors stay in the file until they are saved."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import torch

from pccheck_wire.errors import PccheckError, UnsupportedStateError
from pccheckctl.export.torch_file import noted_step

from .found import Imported


def read(path: Path) -> Imported:
    """Raises UnsupportedStateError for a pickle that needs code, PccheckError for another file."""
    return Imported.of_state(_load(path), noted_step(path))


def _load(path: Path) -> object:
    with path.open("rb") as file:
        mapped = file.read(2) == b"PK"  # torch's format before 1.6 is no archive, and not mapped
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise refused(path, error) from error
    except OSError:
        raise
    except Exception as error:  # of torch's unpickler, which takes any bytes for its instructions
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PccheckError(
            f"{path} is not a complete torch.save() file: {reason}",
            hint="name a torch.save() file, or give the format with --format",
        ) from error


def refused(path: Path, error: Exception) -> PccheckError:
    """Why a pickle is not loaded."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found is None:
        return PccheckError(
            f"{path} is not a torch.save() file: it does not begin with a pickle of tensors",
            hint="name a torch.save() file, or give the format with --format",
        )
    return UnsupportedStateError(
        f"{path} needs {found[1]}, and loading that would execute code from the file",
        hint="where you trust the file, load it with torch.load(weights_only=False), and save only "
        "its tensors, numbers, texts, dicts and lists with torch.save()",
    )
