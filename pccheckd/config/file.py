"""The configuration file: TOML without tables, whose keys are the flags without their dashes."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pccheck_wire.errors import UsageError

from .options import BY_KEY, PATH

_SEE = "every key is described by: pccheckd --help-config"


def exists(path: Path) -> bool:
    """Also when it may not be read: to go on without it would be a surprise."""
    try:
        return path.exists()
    except OSError:  # its directory may not be looked into
        return False


def read(path: Path) -> Mapping[str, str]:
    """The text of each value, by key, as it would be written on the command line.

    Raises UsageError for a file that cannot be read, is not TOML or has a key that is not known.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            hint=(
                "name a file that is there"
                if isinstance(error, FileNotFoundError)
                else f"give it to uid {os.geteuid()}"
            )
            + ", or start without it: --config /dev/null",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text", hint=_SEE) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not TOML: {error}", hint='lines look like: storage = "/mnt/ssd"'
        ) from error
    unknown = [key for key in data if key not in BY_KEY]
    if unknown:
        raise _unknown(path, unknown, data)
    return {key: _text(path, key, value) for key, value in data.items()}


def _text(path: Path, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (str, int, float)):
        raise UsageError(f'{path}: {key} takes one value, like {key} = "..."', hint=_SEE)
    if BY_KEY[key].kind is PATH and not Path(str(value)).is_absolute():
        raise UsageError(
            f"{path}: {key}: {str(value)!r} does not begin with /", hint="write the whole path"
        )
    return str(value)


def _unknown(path: Path, keys: Iterable[str], data: Mapping[str, object]) -> UsageError:
    """One error for all of them, with what was probably meant."""
    said = []
    for key in keys:
        table = isinstance(data[key], dict)
        near = "" if table else _nearest(key)
        said.append(
            (f"unknown table [{key}]" if table else f"unknown key {key!r}")
            + (f", did you mean {near!r}?" if near else "")
        )
    only_tables = all(isinstance(data[key], dict) for key in keys)
    hint = "the file has no tables: every key stands at the top" if only_tables else _SEE
    return UsageError(f"{path}: {'; '.join(said)}", hint=hint)


def _nearest(key: str) -> str:
    import difflib  # for people who mistyped only

    shown = [option.key for option in BY_KEY.values() if not option.hidden]
    wanted = key.lower().replace("_", "-")
    return next(iter(difflib.get_close_matches(wanted, shown, n=1, cutoff=0.6)), "")
